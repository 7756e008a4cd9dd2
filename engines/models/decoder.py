"""The decoder layers of Qwen2, Llama and Dream over packed (varlen) rows.

Dream is a Qwen2 without a causal mask, and what masks is ``attend``. Shapes: N packed rows, d model width, H / Hkv
query and key-value heads, D head width. State-dict names are those of the published checkpoints.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.layers import FusedOps, Products, RMSNorm, rotate_halves
from engines.models.protocol import Attend


class DecoderConfig(Protocol):
    """What the layers read of a model's configuration."""

    @property
    def d_model(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


class DecoderAttention(nn.Module):
    fused = FusedOps()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, width
        self.q_proj = nn.Linear(d, config.n_heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, config.n_kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, config.n_kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_heads * width, d, bias=config.o_bias)
        self.qkv = Products(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        n = h.shape[0]
        products = self.qkv(h)
        q = next(products).view(n, self.heads, self.head_dim)
        k = next(products).view(n, self.kv_heads, self.head_dim)
        if self.fused.rotate is None:
            q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        else:
            self.fused.rotate(q, k, cos, sin, full_precision=False)
        v = next(products).view(n, self.kv_heads, self.head_dim)
        return self.o_proj(attend(layer, q, k, v).reshape(n, -1))

    __call__ = forward  # looking for hooks takes as long as a small product


class GatedMLP(nn.Module):
    fused = FusedOps()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, config.mlp_hidden_size
        self.gate_proj = nn.Linear(d, hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(d, hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden, d, bias=config.mlp_bias)
        self.gate_and_up = Products(self.gate_proj, self.up_proj)

    def forward(self, h: Tensor) -> Tensor:
        products = self.gate_and_up(h)
        if self.fused.swiglu is None:
            return self.down_proj(F.silu(next(products)) * next(products))
        return self.down_proj(self.fused.swiglu(*products))

    __call__ = forward


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.self_attn = DecoderAttention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [N, d] and what is to be added to it, as it takes them."""
        # Two calls, so that q, k and v are freed before the MLP's activations exist.
        x, h = self.input_layernorm.of_sum(x, delta)
        x, h = self.post_attention_layernorm.of_sum(x, self.self_attn(h, cos, sin, layer, attend))
        return x, self.mlp(h)

    __call__ = forward


def decoder_body(config: DecoderConfig) -> nn.ModuleDict:
    """Embedding, layers and final norm."""
    return nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(config.vocab_size, config.d_model),
            "layers": nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers)),
            "norm": RMSNorm(config.d_model, config.rms_norm_eps),
        }
    )
