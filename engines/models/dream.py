"""The Dream mask predictor over packed (varlen) rows.

A Qwen2.5 body run without a causal mask. Shapes: N packed rows, d model width, D head width, V vocabulary
rows. As in LLaDA there is no time-step embedding.

Unlike LLaDA: q, k and v have biases, rotation happens in the activation dtype, and the head is
still the autoregressive one (``DreamConfig.shifts_logits``).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engines.models.decoder import decoder_body
from engines.models.dream_config import DreamConfig
from engines.models.layers import inverse_frequencies, rotary_tables
from engines.models.mask_predictor import MaskPredictor
from engines.models.protocol import Attend, Rotary


class DreamModel(MaskPredictor[DreamConfig]):
    """State-dict names are those of the published checkpoints (``model.layers.*``, ``lm_head``)."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.model = decoder_body(config)
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
