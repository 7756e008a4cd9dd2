"""The parts of a transformer layer one by one, which is how dLLM-Cache recomputes them.

A published model's own names are mapped here; executors see one interface for all. Everything is
row-wise: x and h are [rows, d].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from engines.models.decoder import DreamModel
from engines.models.layers import rotate_halves, rotate_in_float32
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import DiffusionModel, Rotary

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    attention_norm: Part
    query: Part
    """[rows, H * D], not rotated; likewise ``key`` and ``value`` [rows, Hkv * D]."""
    key: Part
    value: Part
    attention_output: Part
    """[rows, d] of the heads' results [rows, H * D]."""
    mlp_norm: Part
    gated_mlp: Part

    def mlp(self, x: Tensor) -> Tensor:
        """[rows, d], its norm included; to be added to x."""
        return self.gated_mlp(self.mlp_norm(x))


_LLADA = {
    "attention_norm": "attn_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "attention_output": "attn_out",
    "mlp_norm": "ff_norm",
    "gated_mlp": "mlp",
}
"""Our names of a layer's parts -> those of the model."""
_DREAM = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gated_mlp": "mlp",
}
"""Under Qwen2's names; the projections bring their biases along."""


class Layers:
    """A model, taken apart."""

    def __init__(self, model: DiffusionModel) -> None:
        if not isinstance(model, LLaDAModelLM | DreamModel):
            raise TypeError(f"dLLM-Cache does not know the layers of {type(model).__name__}")
        names = _LLADA if isinstance(model, LLaDAModelLM) else _DREAM
        self.layers = [
            Layer(**{part: attrgetter(name)(block) for part, name in names.items()}) for block in model.blocks
        ]
        self.embed, self.final_norm = model.embedding, model.final_norm
        self.rotate = rotate_in_float32 if model.rotates_in_float32 else rotate_halves
        self._model = model

    def rotary(self, positions: Tensor) -> Rotary:
        """cos, sin [N, 1, D] of positions [N], in the dtype of the rotation."""
        cos, sin = self._model.rotary(positions)
        dtype = cos.dtype if self._model.rotates_in_float32 else self._model.dtype
        return cos.to(dtype), sin.to(dtype)
