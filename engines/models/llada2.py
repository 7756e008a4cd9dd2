"""LLaDA2 over packed rows: a mixture-of-experts decoder that attends within blocks and to those before.

Shapes as in ``engines.models.packed``. State-dict names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engines.models.block_config import BlockConfig
from engines.models.decoder import DecoderModel
from engines.models.experts import DenseMLP, MixtureMLP, Router
from engines.models.layers import Linear, RMSNorm, RotaryAttention, rotate_halves
from engines.models.protocol import Attend


class LLaDA2Attention(RotaryAttention):
    """One product of all queries, all keys and all values; a head's first dimensions are rotated, the others are not."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.n_heads, config.n_kv_heads, config.head_dim)
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.query_key_value = Linear(config.d_model, width + 2 * kv_width)
        self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.dense = Linear(width, config.d_model)
        self._widths = [width, kv_width, kv_width]
        self._rotary_dim = config.rotary_dim

    def qkv(self, h: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        return iter(self.query_key_value(h).split(self._widths, dim=-1))

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        if self._rotary_dim == self.head_dim:
            return super().rotated(q, k, cos, sin)
        part = self._rotary_dim
        return (
            torch.cat((rotate_halves(q[..., :part], cos, sin), q[..., part:]), dim=-1),
            torch.cat((rotate_halves(k[..., :part], cos, sin), k[..., part:]), dim=-1),
        )

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        return self.dense(self.attended(h, cos, sin, layer, attend))

    __call__ = forward


class LLaDA2Layer(nn.Module):
    def __init__(self, config: BlockConfig, layer: int) -> None:
        super().__init__()
        assert config.experts is not None
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.attention = LLaDA2Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        is_dense = layer < config.experts.dense_layers
        self.mlp = (
            DenseMLP(config.d_model, config.mlp_hidden_size) if is_dense else MixtureMLP(config.d_model, config.experts)
        )

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [N, d] and what is to be added to it, as it takes them."""
        x, h = self.input_layernorm.of_sum(x, delta)
        x, h = self.post_attention_layernorm.of_sum(x, self.attention(h, cos, sin, layer, attend))
        return x, self.mlp(h)

    __call__ = forward


class LLaDA2Model(DecoderModel[BlockConfig]):
    EMBED_TOKENS = "word_embeddings"
    EMBEDDING = f"model.{EMBED_TOKENS}.weight"

    def _layer(self, index: int) -> LLaDA2Layer:
        return LLaDA2Layer(self.config, index)

    @property
    def _rotary_dim(self) -> int:
        return self.config.rotary_dim

    @property
    def float32_weights(self) -> frozenset[str]:
        """Routers': a checkpoint has them in either precision."""
        return frozenset(
            f"{name}.{own}"
            for name, module in self.named_modules()
            if isinstance(module, Router)
            for own, _ in module.named_parameters()
        )
