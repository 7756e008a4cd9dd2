"""The parts of a transformer layer one by one, which is how dLLM-Cache recomputes them.

A published model's own names are mapped here; executors see one interface for all. Everything is
row-wise: x and h are [rows, d].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class Layers:
    """A model, taken apart."""

    def __init__(self, model: LLaDAModelLM | DreamModel) -> None:
        layer_of = _of_llada if isinstance(model, LLaDAModelLM) else _of_dream
        self.layers = [layer_of(block) for block in model.blocks]
        self.embed, self.final_norm = model.embedding, model.final_norm
        self.rotate = rotate_in_float32 if model.rotates_in_float32 else rotate_halves
        self._model = model

    def rotary(self, positions: Tensor) -> Rotary:
        """cos, sin [N, 1, D] of positions [N], in the dtype of the rotation."""
        cos, sin = self._model.rotary(positions)
        dtype = cos.dtype if self._model.rotates_in_float32 else self._model.dtype
        return cos.to(dtype), sin.to(dtype)


def _of_llada(block: Any) -> Layer:
    return Layer(
        attention_norm=block.attn_norm,
        query=block.q_proj,
        key=block.k_proj,
        value=block.v_proj,
        attention_output=block.attn_out,
        mlp_norm=block.ff_norm,
        gated_mlp=block.mlp,
    )


def _of_dream(block: Any) -> Layer:
    """Under Qwen2's names; the projections bring their biases along."""
    attention = block.self_attn
    return Layer(
        attention_norm=block.input_layernorm,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        attention_output=attention.o_proj,
        mlp_norm=block.post_attention_layernorm,
        gated_mlp=block.mlp,
    )


def layers_of(model: DiffusionModel) -> Layers:
    if not isinstance(model, LLaDAModelLM | DreamModel):
        raise TypeError(f"dLLM-Cache does not know the layers of {type(model).__name__}")
    return Layers(model)
