"""Causal decoders of the Qwen2/Qwen2.5 and Llama families over packed (varlen) rows.

Shapes: N packed rows (all sequences of a step, no padding), d model width, D head width, V vocabulary rows. Rows of
different sequences meet only inside ``attend``, which is also what makes the model causal; everything else is
row-wise. State-dict names are those of the published checkpoints.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.errors import UserError
from engines.models.checkpoint import checkpoint_dir
from engines.models.decoder import decoder_body
from engines.models.layers import RMSNorm, inverse_frequencies, rotary_tables
from engines.models.loader import Weights, check_device, check_room, check_weights
from engines.models.protocol import Attend, Rotary
from engines.models.qwen2_config import (
    CAUSAL_SHAPES,
    CausalConfig,
    Llama3Scaling,
    Rope,
    causal_config,
    read_causal_config,
)
from engines.models.skeleton import shapes_only
from engines.models.weights import load_weights


class CausalModel(nn.Module):
    """Qwen2ForCausalLM and LlamaForCausalLM in one: they differ in which products have a bias."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
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

    @property
    def device(self) -> torch.device:
        return self.model.get_parameter("embed_tokens.weight").device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_parameter("embed_tokens.weight").dtype

    def rotary(self, positions: Tensor) -> Rotary:
        """cos and sin [N, 1, D] of positions [N], computed in float32."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = rope_frequencies(self.config.head_dim, self.config.rope).to(positions.device)
        cos, sin = rotary_tables(positions.to(torch.float32).unsqueeze(1) * self._frequencies)
        return cos.to(self.dtype), sin.to(self.dtype)

    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Final-norm hidden states [N, d] of packed ids [N]."""
        x = F.embedding(ids, self.model.get_parameter("embed_tokens.weight"))
        delta = None
        for layer, block in enumerate(self.layers):
            x, delta = block(x, delta, *rotary, layer, attend)
        return self.model["norm"].of_sum(x, delta)[1]  # type: ignore[operator]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] raw logits of hidden states [M, d]; row i predicts the token after its own."""
        if self.config.weight_tying:
            return F.linear(hidden, self.model.get_parameter("embed_tokens.weight"))
        return self.lm_head(hidden)


def rope_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Radians per position [D / 2], float32 on the CPU."""
    frequencies = inverse_frequencies(head_dim, rope.theta)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if not isinstance(scaling, Llama3Scaling):
        return frequencies / scaling.factor
    # Turns of each frequency within the original context say how far between "stretched" and "kept" it is.
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def load_causal(
    model: str | CausalConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    weights: Weights = "checkpoint",
    seed: int = 0,
) -> CausalModel:
    """A ready model in eval mode, in ``dtype`` whatever the checkpoint is stored in.

    ``model`` is a checkpoint directory or a hub id; with ``weights="random"`` also a name of ``CAUSAL_SHAPES`` or a
    config, whose weights are drawn from N(0, 0.02): speed does not depend on their values.
    """
    check_weights(weights)
    check_device(device)
    if weights == "random":
        return random_causal(model if isinstance(model, CausalConfig) else causal_config(model), dtype, device, seed)
    if isinstance(model, CausalConfig) or model.lower() in CAUSAL_SHAPES:
        raise UserError(f"model={model!r} is a shape without weights: add --weights random, or give a checkpoint")
    directory = checkpoint_dir(model)
    return _from_checkpoint(directory, dtype, device)


def random_causal(config: CausalConfig, dtype: torch.dtype, device: str, seed: int) -> CausalModel:
    """Small random weights; norms are one, biases are drawn like the rest."""
    network = _empty(config)
    check_room(network, dtype, device)
    network = network.to(dtype).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    norms = {id(module.weight) for module in network.modules() if isinstance(module, RMSNorm)}
    with torch.no_grad():
        for parameter in network.parameters():
            if id(parameter) in norms:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return network.requires_grad_(False).eval()


def _from_checkpoint(directory: Path, dtype: torch.dtype, device: str) -> CausalModel:
    network = _empty(read_causal_config(directory))
    load_weights(network, directory, repeated=network.tied_weights, dtype=dtype, device=device)
    return network.requires_grad_(False).eval()


def _empty(config: CausalConfig) -> CausalModel:
    """On the meta device: names and shapes, no memory."""
    with shapes_only():
        return CausalModel(config)
