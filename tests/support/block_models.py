"""Small block-diffusion models of every family, and one written plainly from the papers' formulas to compare them with."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.tables import data_beside
from torch import Tensor

from engines.models.block_config import BLOCK_SHAPES, BlockConfig
from engines.models.layers import FusedOps, fuse
from engines.models.loader import load_block
from engines.models.packed import PackedModel

VOCAB = 103
MASK, END = VOCAB - 1, VOCAB - 2
RAW: dict[str, dict[str, Any]] = data_beside(__file__, "block_models")["raw"]
FAMILIES = tuple(RAW)
LLADA2_MINI, SDAR_8B = BLOCK_SHAPES["llada2-mini"], BLOCK_SHAPES["sdar-8b"]


@cache
def block_model(family: str, seed: int = 0, **config: Any) -> PackedModel[BlockConfig]:
    """Random weights, large enough that the likeliest token is not always the same."""
    model = load_block(BlockConfig.from_dict(RAW[family] | config), weights="random", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif name.endswith("expert_bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.mul_(8.0)
    # A product of several layers does not see that they were written to.
    fuse(model, FusedOps(joins=False))
    model.reorder(joins=True)
    return model


def write_block(folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A checkpoint folder with that model's weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(RAW[family] | config))
    weights = {
        name: tensor.detach().to(dtype).clone() for name, tensor in block_model(family, seed).state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- the same, plainly: one sequence, no packing, experts one by one ---------------------------------------------------


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return weight * (y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_rotary(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """x [N, heads, D]: dimension i of the first half of ``rotary_dim`` turns with that of its second half."""
    half = rotary_dim // 2
    angle = positions[:, None].double() / theta ** (torch.arange(half).double() * 2 / rotary_dim)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def plain_router(h: Tensor, weight: Tensor, bias: Tensor, config: Any) -> list[dict[int, float]]:
    """Of each row the weights of its experts, by expert."""
    found = []
    per_group = config.num_experts // config.num_groups
    for row in h.double():
        score = torch.sigmoid(weight.double() @ row)
        biased = (score + bias.double()).tolist()
        groups = [biased[g * per_group : (g + 1) * per_group] for g in range(config.num_groups)]
        best = sorted(range(len(groups)), key=lambda g: -sum(sorted(groups[g])[-2:]))[: config.groups_per_token]
        among = [g * per_group + i for g in best for i in range(per_group)]
        chosen = sorted(among, key=lambda e: -biased[e])[: config.experts_per_token]
        total = sum(score[e].item() for e in chosen)
        found.append({e: score[e].item() / total * config.scaling for e in chosen})
    return found


def plain_mlp(h: Tensor, w: dict[str, Tensor], at: str) -> Tensor:
    inner = F.silu(h @ w[f"{at}.gate_proj.weight"].T) * (h @ w[f"{at}.up_proj.weight"].T)
    return inner @ w[f"{at}.down_proj.weight"].T


def plain_mixture(h: Tensor, w: dict[str, Tensor], at: str, config: Any) -> Tensor:
    routed = plain_router(h, w[f"{at}.gate.weight"], w[f"{at}.gate.expert_bias"], config)
    out = plain_mlp(h, w, f"{at}.shared_experts")
    for i, experts in enumerate(routed):
        for e, share in experts.items():
            out[i] += share * plain_mlp(h[i : i + 1], w, f"{at}.experts.{e}")[0]
    return out


@torch.inference_mode()
def plain_logits(model: PackedModel[BlockConfig], ids: list[int], block: int) -> Tensor:
    """[N, V] of a whole sequence under the mask of blocks: position q sees k where k // block <= q // block."""
    c, w = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    n = len(ids)
    position = torch.arange(n)
    seen = (position // block)[None] <= (position // block)[:, None]
    is_llada2 = c.family == "llada2"
    x = w[f"{model.EMBEDDING}.weight"][torch.tensor(ids)]
    for layer in range(c.n_layers):
        at = f"model.layers.{layer}"
        h = plain_norm(x, w[f"{at}.input_layernorm.weight"], c.rms_norm_eps)
        if is_llada2:
            qkv = (h @ w[f"{at}.attention.query_key_value.weight"].T).view(n, -1, c.head_dim)
            q, k, v = qkv.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], dim=1)
            norms, out = ("attention.query_layernorm", "attention.key_layernorm"), "attention.dense"
        else:
            q, k, v = (
                F.linear(h, w[f"{at}.self_attn.{p}_proj.weight"], w.get(f"{at}.self_attn.{p}_proj.bias")).view(
                    n, -1, c.head_dim
                )
                for p in "qkv"
            )
            norms, out = ("self_attn.q_norm", "self_attn.k_norm"), "self_attn.o_proj"
        if c.qk_norm:
            q, k = (
                plain_norm(y, w[f"{at}.{name}.weight"], c.rms_norm_eps) for y, name in zip((q, k), norms, strict=True)
            )
        q, k = (plain_rotary(y, position, c.rotary_dim, c.rope.theta) for y in (q, k))
        k, v = (y.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", shares, v).reshape(n, -1) @ w[f"{at}.{out}.weight"].T
        h = plain_norm(x, w[f"{at}.post_attention_layernorm.weight"], c.rms_norm_eps)
        has_experts = c.experts is not None and layer >= c.experts.dense_layers
        x = x + (plain_mixture(h, w, f"{at}.mlp", c.experts) if has_experts else plain_mlp(h, w, f"{at}.mlp"))
    return plain_norm(x, w["model.norm.weight"], c.rms_norm_eps) @ w["lm_head.weight"].T
