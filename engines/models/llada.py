"""The LLaDA mask predictor over packed (varlen) rows; shapes as in ``engines.models.packed``."""

import torch
from torch import Tensor, nn

from engines.models.config import LLaDAConfig
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


class LLaDABlock(RotaryAttention, GatedMLP):
    rotates_in_float32 = True

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config.n_heads, config.n_kv_heads, config.head_dim)
        d, hidden = config.d_model, config.mlp_hidden_size
        kv = config.n_kv_heads * config.head_dim
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.q_proj = Linear(d, d)
        self.k_proj = Linear(d, kv)
        self.v_proj = Linear(d, kv)
        self.attn_out = Linear(d, d)
        self.ff_norm = RMSNorm(d, config.rms_norm_eps)
        self.ff_proj = Linear(d, hidden)
        self.up_proj = Linear(d, hidden)
        self.ff_out = Linear(hidden, d)
        self.qkv = Products(self.q_proj, self.k_proj, self.v_proj)
        self.gate_and_up = Products(self.ff_proj, self.up_proj)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream [N, d] and a delta that is still to be added to it."""
        # Two calls, so that q, k and v are freed before the MLP's activations exist.
        x, h = self.attn_norm.add_and_norm(x, delta)
        x, h = self.ff_norm.add_and_norm(x, self.attn_out(self.attend_heads(h, cos, sin, layer, attend)))
        return x, self.mlp(h)

    def mlp(self, h: Tensor) -> Tensor:
        return self.ff_out(self.activations(h))


class LLaDAModelLM(PackedModel[LLaDAConfig]):
    EMBEDDING, LAYERS = "model.transformer.wte", "model.transformer.blocks"
    NORM, HEAD = "model.transformer.ln_f", "model.transformer.ff_out"
    rotates_in_float32 = True

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model),
                "blocks": nn.ModuleList(LLaDABlock(config) for _ in range(config.n_layers)),
                "ln_f": RMSNorm(config.d_model, config.rms_norm_eps),
            }
        )
        if not config.weight_tying:
            transformer["ff_out"] = Linear(config.d_model, config.vocab_size)
        self.model = nn.ModuleDict({"transformer": transformer})
        self._rotary: tuple[Tensor, Tensor] | None = None

    def rotary(self, positions: Tensor) -> Rotary:
        if self._rotary is None or self._rotary[0].device != positions.device:
            angles = torch.outer(
                torch.arange(self.config.max_sequence_length, dtype=torch.float32),
                inverse_frequencies(self.config.head_dim, self.config.rope_theta),
            )
            cos, sin = rotary_tables(angles)
            self._rotary = cos.to(positions.device), sin.to(positions.device)
        cos, sin = self._rotary
        return cos[positions], sin[positions]
