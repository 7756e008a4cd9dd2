"""The Dream mask predictor over packed (varlen) rows.

A Qwen2.5 body run without a causal mask. Shapes: N packed rows, d model width, H / Hkv query and
key-value heads, D head width, V vocabulary rows. As in LLaDA there is no time-step embedding.

Unlike LLaDA: q, k and v have biases, rotation happens in the activation dtype, and the head is
still the autoregressive one (``DreamConfig.shifts_logits``).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.dream_config import DreamConfig
from engines.models.layers import FusedOps, Products, RMSNorm, inverse_frequencies, rotary_tables, rotate_halves
from engines.models.mask_predictor import MaskPredictor
from engines.models.protocol import Attend, Rotary


class DreamAttention(nn.Module):
    fused = FusedOps()

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        d, kv = config.d_model, config.n_kv_heads * config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_proj = nn.Linear(d, d, bias=True)
        self.k_proj = nn.Linear(d, kv, bias=True)
        self.v_proj = nn.Linear(d, kv, bias=True)
        self.o_proj = nn.Linear(d, d, bias=False)
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


class DreamMLP(nn.Module):
    fused = FusedOps()

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden_size, config.d_model, bias=False)
        self.gate_and_up = Products(self.gate_proj, self.up_proj)

    def forward(self, h: Tensor) -> Tensor:
        products = self.gate_and_up(h)
        if self.fused.swiglu is None:
            return self.down_proj(F.silu(next(products)) * next(products))
        return self.down_proj(self.fused.swiglu(*products))


class DreamLayer(nn.Module):
    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.self_attn = DreamAttention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = DreamMLP(config)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [N, d] and what is to be added to it, as it takes them."""
        # Two calls, so that q, k and v are freed before the MLP's activations exist.
        x, h = self.input_layernorm.of_sum(x, delta)
        x, h = self.post_attention_layernorm.of_sum(x, self.self_attn(h, cos, sin, layer, attend))
        return x, self.mlp(h)


class DreamModel(MaskPredictor[DreamConfig]):
    """State-dict names are those of the published checkpoints (``model.layers.*``, ``lm_head``)."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.d_model),
                "layers": nn.ModuleList(DreamLayer(config) for _ in range(config.n_layers)),
                "norm": RMSNorm(config.d_model, config.rms_norm_eps),
            }
        )
        if not config.weight_tying:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._frequencies: Tensor | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.model["layers"]  # type: ignore[return-value]

    @property
    def tied_weights(self) -> dict[str, str]:
        """Names a checkpoint may repeat -> the tensor they share."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.weight_tying else {}

    def rotary(self, positions: Tensor) -> Rotary:
        # For the rows at hand: a table of all 131,072 positions would be 64 MiB.
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self.config.head_dim, self.config.rope_theta).to(positions.device)
        return rotary_tables(positions.float().unsqueeze(1) * self._frequencies)

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x = self.model["embed_tokens"](ids)
        cos, sin = (table.to(x.dtype) for table in rotary)
        delta = None
        for layer, block in enumerate(self.layers):
            x, delta = block(x, delta, cos, sin, layer, attend)
        return self.model["norm"].of_sum(x, delta)[1]  # type: ignore[operator]

    def local_logits(self, hidden: Tensor) -> Tensor:
        if self.config.weight_tying:
            return F.linear(hidden, self.model.get_parameter("embed_tokens.weight"))
        return self.lm_head(hidden)
