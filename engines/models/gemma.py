"""DiffusionGemma's text model over packed rows of two kinds: causal rows of final tokens, and rows of canvases.

Shapes as in ``engines.models.packed``. State-dict names are those of published checkpoints, whose vision tower we do not read. Both kinds
use the same matrices. They differ in the scalar that multiplies a layer's sum, and in their input. We add soft embeddings, which come
from the previous forward's logits, to a canvas' input, and then norm it.
"""

import math
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.block_config import BlockConfig, CanvasConfig
from engines.models.decoder import DecoderMLP
from engines.models.layers import Linear, Products, RMSNorm, RotaryAttention, inverse_frequencies, rotary_tables
from engines.models.llada2 import experts_sum
from engines.models.packed import PackedModel
from engines.models.product import Product, product_of
from engines.models.protocol import Attend, Rotary

_gelu = partial(F.gelu, approximate="tanh")


class CanvasRows(NamedTuple):
    row: Tensor
    """[m] int64: rows of the step that belong to a canvas."""
    soft: Tensor
    """[m, d] their soft embeddings, zeros in a canvas' first step."""


class GemmaNorm(RMSNorm):
    """An RMSNorm that also applies its weight in float32, and rounds once."""

    def forward(self, x: Tensor) -> Tensor:
        h, weight = F.rms_norm(x.float(), self.shape, None, self.eps), self.weight.float()
        return (h * weight if h.requires_grad else h.mul_(weight)).to(x.dtype)

    __call__ = forward


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return x with an RMS norm along its last dimension, without a weight."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class GemmaMLP(DecoderMLP):
    def activations(self, h: Tensor) -> Tensor:
        gate, up = self.gate_and_up(h)
        return _gelu(gate) * up if gate.requires_grad else _gelu(gate).mul_(up)


class GemmaRouter(nn.Module):
    """Chooses experts from the residual stream itself, not from the experts' normed input."""

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.d_model))
        self.proj = Linear(config.d_model, config.mixture.num_experts)
        self.per_expert_scale = nn.Parameter(torch.ones(config.mixture.num_experts))
        self._eps, self._chosen, self._factor = (
            config.rms_norm_eps,
            config.mixture.experts_per_token,
            config.d_model**-0.5,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [n, k] of rows [n, d], and their weights [n, k] float32."""
        scores = self.proj(normalize(x, self._eps) * self.scale * self._factor)
        weights, chosen = torch.softmax(scores.float(), dim=-1).topk(self._chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights * self.per_expert_scale.float()[chosen]

    __call__ = forward


class GemmaExperts(nn.Module):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        count, hidden, width = config.mixture.num_experts, config.mixture.expert_hidden, config.d_model
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return experts_sum(h, chosen, weights, self.gate_up_proj, self.down_proj, _gelu)

    __call__ = forward


class GemmaAttention(RotaryAttention):
    """Attention with unscaled scores. Full layers have no matrix of values: they use the keys."""

    def __init__(self, config: CanvasConfig, layer: int) -> None:
        kv_heads, head_dim = config.kv_shape(layer)
        super().__init__(config.n_heads, kv_heads, head_dim)
        width, kv_width = config.n_heads * head_dim, kv_heads * head_dim
        self.q_proj = Linear(config.d_model, width)
        self.k_proj = Linear(config.d_model, kv_width)
        self.has_values = not config.is_full(layer)
        if self.has_values:
            self.v_proj = Linear(config.d_model, kv_width)
        self.qkv = Products(self.q_proj, self.k_proj, *([self.v_proj] if self.has_values else []))
        self.o_proj = Linear(width, config.d_model)
        self.q_norm = GemmaNorm(head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(head_dim, config.rms_norm_eps)
        self._eps, self._unscaled = config.rms_norm_eps, math.sqrt(head_dim)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        n, products = h.shape[0], self.qkv(h)
        q = next(products).view(n, self.heads, self.head_dim)
        k = next(products).view(n, self.kv_heads, self.head_dim)
        v = normalize(next(products).view(k.shape) if self.has_values else k, self._eps)
        q, k = self.rotate(self.q_norm(q), self.k_norm(k), cos, sin)
        # ``attend`` divides scores by the square root of the head's width.
        return self.o_proj(attend(layer, q * self._unscaled, k, v).reshape(n, -1))

    __call__ = forward


class GemmaLayer(nn.Module):
    def __init__(self, config: CanvasConfig, layer: int) -> None:
        super().__init__()
        norm = partial(GemmaNorm, config.d_model, config.rms_norm_eps)
        self.input_layernorm = norm()
        self.self_attn = GemmaAttention(config, layer)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GemmaMLP(config.d_model, config.mlp_hidden_size)
        self.post_feedforward_layernorm_1 = norm()
        self.router = GemmaRouter(config)
        self.pre_feedforward_layernorm_2 = norm()
        self.experts = GemmaExperts(config)
        self.post_feedforward_layernorm_2 = norm()
        self.post_feedforward_layernorm = norm()
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, scalar: Tensor) -> Tensor:
        """Return the residual stream [N, d], with each row multiplied by its ``scalar`` [N, 1] at the end."""
        h = self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        x = x + self.post_attention_layernorm(h)
        y = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        routed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        y = y + self.post_feedforward_layernorm_2(routed)
        return (x + self.post_feedforward_layernorm(y)) * scalar

    __call__ = forward


class SelfConditioning(GemmaMLP):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__(config.d_model, config.mlp_hidden_size)
        self.pre_norm = GemmaNorm(config.d_model, config.rms_norm_eps)
        self._eps = config.rms_norm_eps

    def inputs(self, embedded: Tensor, soft: Tensor) -> Tensor:
        """Return the input [m, d] of canvas rows from their embeddings and soft embeddings, both [m, d]."""
        return normalize(embedded + self(self.pre_norm(soft)), self._eps)


class _LayerScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1))


class GemmaModel(PackedModel[BlockConfig]):
    config: CanvasConfig
    EMBEDDING, LAYERS, NORM = "model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.norm"
    ignored = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__(config)
        scalars = nn.ModuleList(_LayerScalar() for _ in range(config.n_layers))
        decoder = {
            "embed_tokens": nn.Embedding(config.vocab_size, config.d_model),
            "layers": nn.ModuleList(GemmaLayer(config, index) for index in range(config.n_layers)),
            "norm": GemmaNorm(config.d_model, config.rms_norm_eps),
            "self_conditioning": SelfConditioning(config),
        }
        encoder = {"language_model": nn.ModuleDict({"layers": scalars})}
        self.model = nn.ModuleDict({"decoder": nn.ModuleDict(decoder), "encoder": nn.ModuleDict(encoder)})
        self._of_final = cast(tuple[_LayerScalar, ...], tuple(scalars))
        self._expected_embedding: Product | None = None

    @property
    def unit_weights(self) -> frozenset[str]:
        names = ("layer_scalar", "router.scale", "per_expert_scale")
        return frozenset(name for name, _ in self.named_parameters() if name.endswith(names))

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotations of layers with a window and those of full layers, side by side."""
        config = self.config
        inverse = inverse_frequencies(config.head_dim, config.rope.theta)
        full = inverse_frequencies(config.full_head_dim, config.full_theta)
        full[config.full_rotary_dim // 2 :] = 0
        angles = positions.float().unsqueeze(1)
        tables = [rotary_tables(angles * frequencies.to(positions.device)) for frequencies in (inverse, full)]
        return torch.cat([cos for cos, _ in tables], dim=-1), torch.cat([sin for _, sin in tables], dim=-1)

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend, canvas: CanvasRows | None = None) -> Tensor:
        """Like ``PackedModel.hidden``; rows outside of ``canvas`` are causal."""
        config = self.config
        x = self.embedding(ids) * torch.tensor(math.sqrt(config.d_model), dtype=self.dtype)
        is_canvas = torch.zeros(len(ids), 1, dtype=torch.bool, device=x.device)
        if canvas is not None:
            conditioning = cast(SelfConditioning, cast(nn.ModuleDict, self.model["decoder"])["self_conditioning"])
            x = x.index_copy(0, canvas.row, conditioning.inputs(x.index_select(0, canvas.row), canvas.soft))
            is_canvas.index_fill_(0, canvas.row, True)
        tables = [table.to(x.dtype).split([config.head_dim, config.full_head_dim], dim=-1) for table in rotary]
        for layer, (block, of_final) in enumerate(
            zip(cast(list[GemmaLayer], self.blocks), self._of_final, strict=True)
        ):
            cos, sin = (table[config.is_full(layer)] for table in tables)
            scalar = torch.where(is_canvas, block.layer_scalar, of_final.layer_scalar)
            x = block(x, cos, sin, layer, attend, scalar)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return capped logits [M, V] in float32."""
        cap = self.config.softcap
        capped = self.local_logits(hidden).float().div_(cap).tanh_()
        return capped * cap if capped.requires_grad else capped.mul_(cap)

    def soft_embeddings(self, probabilities: Tensor) -> Tensor:
        """Return the expected embedding [M, d] under probabilities [M, V], in the dtype of the weights."""
        p, root = probabilities.to(self.dtype), torch.tensor(math.sqrt(self.config.d_model), dtype=self.dtype)
        product = self._expected_embedding
        return (p @ self._embedding_weight if product is None else product(p)) * root

    def reorder(self, *, joins: bool, keeps_weights: bool = True) -> None:
        super().reorder(joins=joins, keeps_weights=keeps_weights)
        self._expected_embedding = product_of(self._embedding_weight.t().contiguous())
        if self._expected_embedding is not None:
            self._expected_embedding.release()
