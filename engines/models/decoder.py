"""The decoder of Qwen2, Qwen3, Llama, Mistral, Dream, SDAR and Fast-dLLM v2 over packed (varlen) rows.

Dream is a Qwen2 without a causal mask. SDAR is a Qwen3 and Fast-dLLM v2 a Qwen2, both with a mask of blocks. ``attend`` applies the
masks. Shapes as in ``engines.models.packed``. State-dict names are those of the published checkpoints.
"""

import math
from typing import TypeVar

from torch import Tensor, nn

from engines.models.block_config import BlockConfig
from engines.models.config import DreamConfig, Llama3Scaling, Rope
from engines.models.layers import (
    GatedMLP,
    Linear,
    Products,
    RMSNorm,
    RotaryAttention,
    inverse_frequencies,
    rotary_tables,
)
from engines.models.packed import PackedModel
from engines.models.protocol import Attend, Rotary
from engines.models.qwen2_config import CausalConfig

Config = TypeVar("Config", bound=DreamConfig | CausalConfig | BlockConfig)


class DecoderAttention(RotaryAttention):
    def __init__(self, config: DreamConfig | CausalConfig | BlockConfig) -> None:
        super().__init__(config.n_heads, config.n_kv_heads, config.head_dim)
        d, width, kv_width = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = Linear(d, width, bias=config.qkv_bias)
        self.k_proj = Linear(d, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(d, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, d, bias=config.o_bias)
        self.qkv = Products(self.q_proj, self.k_proj, self.v_proj)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        return self.o_proj(self.attend_heads(h, cos, sin, layer, attend))

    __call__ = forward  # looking for hooks takes as long as a small product


class DecoderMLP(GatedMLP):
    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden, bias=bias)
        self.up_proj = Linear(width, hidden, bias=bias)
        self.down_proj = Linear(hidden, width, bias=bias)
        self.gate_and_up = Products(self.gate_proj, self.up_proj)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(self.activations(h))

    __call__ = forward


class DecoderLayer(nn.Module):
    ATTENTION = "self_attn"
    self_attn: DecoderAttention
    mlp: DecoderMLP

    def __init__(
        self, config: DreamConfig | CausalConfig | BlockConfig, attention: RotaryAttention, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.add_module(self.ATTENTION, attention)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.add_module("mlp", mlp)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream [N, d] and a delta that is still to be added to it."""
        # Two calls, so that q, k and v are freed before the MLP's activations exist.
        x, h = self.input_layernorm.add_and_norm(x, delta)
        x, h = self.post_attention_layernorm.add_and_norm(x, getattr(self, self.ATTENTION)(h, cos, sin, layer, attend))
        return x, self.mlp(h)

    __call__ = forward


class DecoderModel(PackedModel[Config]):
    """A decoder. Subclasses may give the embedding another name, have other layers, and rotate only a part of each head."""

    EMBEDDING, LAYERS, NORM = "model.embed_tokens", "model.layers", "model.norm"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict(
            {
                self.EMBEDDING.removeprefix("model."): nn.Embedding(config.vocab_size, config.d_model),
                "layers": nn.ModuleList(self._layer(index) for index in range(config.n_layers)),
                "norm": RMSNorm(config.d_model, config.rms_norm_eps),
            }
        )
        if not config.weight_tying:
            self.lm_head = Linear(config.d_model, config.vocab_size)
        self._frequencies: Tensor | None = None

    def _layer(self, index: int) -> nn.Module:
        config = self.config
        mlp = DecoderMLP(config.d_model, config.mlp_hidden_size, bias=config.mlp_bias)
        return DecoderLayer(config, DecoderAttention(config), mlp)

    @property
    def _rotary_dim(self) -> int:
        return self.config.head_dim

    def rotary(self, positions: Tensor) -> Rotary:
        """float32 cos, sin [N, 1, rotated dimensions]."""
        # We compute only these rows: a table of all 131,072 positions would take 64 MiB.
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = rope_frequencies(self._rotary_dim, self.config.rope).to(positions.device)
        return rotary_tables(positions.float().unsqueeze(1) * self._frequencies)


class DreamModel(DecoderModel[DreamConfig]):
    """The mask predictor: a Qwen2.5 body and its autoregressive head (``DreamConfig.shifts_logits``).

    Unlike LLaDA: q, k and v have biases, and rotation happens in the activation dtype.
    """


class CausalModel(DecoderModel[CausalConfig]):
    """Qwen2, Qwen3, Llama and Mistral, which differ in which products have a bias, and whether heads are normed."""


class BlockModel(DecoderModel[BlockConfig]):
    """SDAR, a Qwen3, and Fast-dLLM v2, a Qwen2. A query sees all of its block and the blocks before it."""


def rope_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Radians per position [D / 2], float32 on the CPU."""
    frequencies = inverse_frequencies(head_dim, rope.theta)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if not isinstance(scaling, Llama3Scaling):
        return frequencies / scaling.factor
    # A frequency's turns within the original context say how far it is between "stretched" and "kept".
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
