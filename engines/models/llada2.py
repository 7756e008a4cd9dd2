"""LLaDA2 over packed rows: a mixture-of-experts decoder that attends within blocks and to those before.

Shapes as in ``engines.models.packed``. State-dict names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engines.models.block_config import BlockConfig
from engines.models.experts import DenseMLP, MixtureMLP, Router
from engines.models.layers import Linear, RMSNorm, RotaryAttention, inverse_frequencies, rotary_tables, rotate_halves
from engines.models.packed import PackedModel
from engines.models.protocol import Attend, Rotary


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


class LLaDA2Model(PackedModel[BlockConfig]):
    EMBEDDING, HEAD = "model.word_embeddings.weight", "lm_head.weight"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, config.d_model),
                "layers": nn.ModuleList(LLaDA2Layer(config, layer) for layer in range(config.n_layers)),
                "norm": RMSNorm(config.d_model, config.rms_norm_eps),
            }
        )
        if not config.weight_tying:
            self.lm_head = Linear(config.d_model, config.vocab_size)
        self._frequencies: Tensor | None = None

    @property
    def embedding(self) -> nn.Module:
        return self.model["word_embeddings"]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model["layers"]  # type: ignore[return-value]

    @property
    def final_norm(self) -> RMSNorm:
        return self.model["norm"]  # type: ignore[return-value]

    @property
    def head(self) -> nn.Module:
        return self.lm_head

    @property
    def float32_weights(self) -> frozenset[str]:
        """Routers': a checkpoint has them in either precision."""
        return frozenset(
            f"{name}.{own}"
            for name, module in self.named_modules()
            if isinstance(module, Router)
            for own, _ in module.named_parameters()
        )

    def rotary(self, positions: Tensor) -> Rotary:
        """float32 cos, sin [N, 1, rotary_dim]."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            frequencies = inverse_frequencies(self.config.rotary_dim, self.config.rope.theta)
            self._frequencies = frequencies.to(positions.device)
        return rotary_tables(positions.float().unsqueeze(1) * self._frequencies)
