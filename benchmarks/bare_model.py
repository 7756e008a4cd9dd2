"""The layers of a published model as functions of its weights, in two readings (bare_sampler.py).

Shapes: L query columns, H / Hkv heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.llada import LLaDABlock, LLaDAModelLM

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, H, L, D], k and v [n, Hkv, L, D]) -> [n, H, L, D]; q is rotated, k where ``turns_keys``."""
Part = Callable[[Tensor], Tensor]
Tables = Iterable[tuple[Tensor, Tensor]]
"""cos and sin [n, 1, L, D] for each layer."""


class Layer:
    """Functions of [n, L, ...]."""

    def __init__(self, block: LLaDABlock, part: Callable[[nn.Module], Part]) -> None:
        self.attention_norm, self.mlp_norm = part(block.attn_norm), part(block.ff_norm)
        self.q, self.k, self.v = part(block.q_proj), part(block.k_proj), part(block.v_proj)
        self.out, self.down = part(block.attn_out), part(block.ff_out)
        self.gate, self.up = part(block.ff_proj), part(block.up_proj)

    def mlp(self, x: Tensor) -> Tensor:
        h = self.mlp_norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


class PublishedNorm(nn.Module):
    """RMSNorm as the published model code computes it, one operator at a time."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = x.to(torch.float32)
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            y = y.to(x.dtype)
        return self.weight * y


class BareModel:
    def __init__(self, model: LLaDAModelLM, *, as_modules: bool) -> None:
        self.config = model.config
        self.rotate_q, self.rotate_k = (rotate_in_region, published_rotate) if as_modules else (rotate, rotate)

        def part(module: nn.Module) -> Part:
            """The module itself, or what it computes."""
            weight = module.get_parameter("weight").detach()
            if as_modules:
                if isinstance(module, nn.Linear):
                    published: nn.Module = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
                    published.weight = nn.Parameter(weight, requires_grad=False)
                else:
                    norm = PublishedNorm(weight, model.config.rms_norm_eps)
                    published = module if isinstance(module, nn.Embedding) else norm
                return partial(nn.Module.__call__, published)
            if isinstance(module, nn.Linear):
                return partial(F.linear, weight=weight)
            if isinstance(module, nn.Embedding):
                return lambda ids: F.embedding(ids, weight)
            return lambda x: F.rms_norm(x, weight.shape, weight, model.config.rms_norm_eps)

        self.embed, self.norm = part(model.transformer["wte"]), part(model.transformer["ln_f"])
        tied = partial(F.linear, weight=model.transformer["wte"].weight)
        self.head: Part = tied if model.config.weight_tying else part(model.transformer["ff_out"])
        self.layers = [Layer(cast(LLaDABlock, block), part) for block in model.blocks]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [n, 1, L, D] of positions [n, L]."""
        width = self.config.head_dim
        frequency = 1.0 / self.config.rope_theta ** (torch.arange(0, width, 2).float() / width)
        angles = positions[..., None].float() * frequency
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def hidden(self, ids: Tensor, tables: Tables, attend: Attend, *, turns_keys: bool) -> Tensor:
        """[n, L, d] before the final norm."""
        x = self.embed(ids)
        for n, (layer, (cos, sin)) in enumerate(zip(self.layers, tables, strict=False)):
            h = layer.attention_norm(x)
            q, k, v = self.heads(layer.q(h)), self.heads(layer.k(h)), self.heads(layer.v(h))
            q = self.rotate_q(q, cos, sin)
            if turns_keys:
                k = self.rotate_k(k, cos, sin)
            x = x + layer.out(attend(n, q, k, v).transpose(1, 2).flatten(2))
            x = x + layer.mlp(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def published_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32 whatever the dtype, and back."""
    wide = x.float()
    a, b = wide.view(*wide.shape[:-1], 2, -1).unbind(-2)
    return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def rotate_in_region(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Published code rotates queries and keys in one region; it is charged to the queries."""
    with torch.autocast(x.device.type, enabled=False):
        return published_rotate(x, cos, sin)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
