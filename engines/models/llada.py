"""The LLaDA mask predictor over packed (varlen) rows.

Shapes: N packed rows (all requests of a step, no padding), d model width, H / Hkv query and
key-value heads, D head width, V vocabulary rows. Rows of different requests meet only inside
``attend``; everything else is row-wise, which is what makes continuous batching a concatenation.

LLaDA has no time-step embedding: the number of masks is the only time information.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.layers import FusedOps, Linear, Products, RMSNorm, inverse_frequencies, rotary_tables, rotate_halves
from engines.models.llada_config import LLaDAConfig
from engines.models.mask_predictor import MaskPredictor
from engines.models.protocol import Attend, Rotary


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in float32 (rope_full_precision); x [N, heads, D], cos and sin [N, 1, D]."""
    return rotate_halves(x.float(), cos, sin).to(x.dtype)


class LLaDABlock(nn.Module):
    fused = FusedOps()

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, config.mlp_hidden_size
        kv = config.n_kv_heads * config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
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
        """The residual stream [N, d] and what is to be added to it, as it takes them."""
        # Two calls, so that q, k and v are freed before the MLP's activations exist.
        x, h = self.attn_norm.of_sum(x, delta)
        x, h = self.ff_norm.of_sum(x, self.attention(h, cos, sin, layer, attend))
        return x, self.mlp(h)

    def attention(self, h: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        n = h.shape[0]
        products = self.qkv(h)
        q = next(products).view(n, self.heads, self.head_dim)
        k = next(products).view(n, self.kv_heads, self.head_dim)
        if self.fused.rotate is None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        else:
            self.fused.rotate(q, k, cos, sin, full_precision=True)
        v = next(products).view(n, self.kv_heads, self.head_dim)
        return self.attn_out(attend(layer, q, k, v).reshape(n, -1))

    def mlp(self, h: Tensor) -> Tensor:
        products = self.gate_and_up(h)
        if self.fused.swiglu is None:
            return self.ff_out(F.silu(next(products)) * next(products))
        return self.ff_out(self.fused.swiglu(*products))


class LLaDAModelLM(MaskPredictor[LLaDAConfig]):
    """State-dict names are those of the published checkpoints (``model.transformer.*``)."""

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

    @property
    def transformer(self) -> nn.ModuleDict:
        return self.model["transformer"]  # type: ignore[return-value]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer["blocks"]  # type: ignore[return-value]

    @property
    def tied_weights(self) -> dict[str, str]:
        """Names a checkpoint may repeat -> the tensor they share."""
        root = "model.transformer"
        return {f"{root}.ff_out.weight": f"{root}.wte.weight"} if self.config.weight_tying else {}

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

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x = self.transformer["wte"](ids)
        cos, sin = rotary
        delta = None
        for layer, block in enumerate(self.blocks):
            x, delta = block(x, delta, cos, sin, layer, attend)
        return self.transformer["ln_f"].of_sum(x, delta)[1]  # type: ignore[operator]

    def local_logits(self, hidden: Tensor) -> Tensor:
        if self.config.weight_tying:
            return F.linear(hidden, self.transformer.get_parameter("wte.weight"))
        return self.transformer["ff_out"](hidden)
