"""The parts of a transformer layer one by one, which is how dLLM-Cache recomputes them.

A published model's own names are mapped here; executors see one interface for all. Everything is
row-wise: x and h are [rows, d].
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from engines.models.decoder import DreamModel
from engines.models.layers import rotate_halves, rotate_in_float32
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import DiffusionModel


class Layer(Protocol):
    def attention_norm(self, x: Tensor) -> Tensor: ...

    def query(self, h: Tensor) -> Tensor:
        """[rows, H * D], not rotated; likewise ``key`` and ``value`` [rows, Hkv * D]."""
        ...

    def key(self, h: Tensor) -> Tensor: ...

    def value(self, h: Tensor) -> Tensor: ...

    def attention_output(self, a: Tensor) -> Tensor:
        """[rows, d] of the heads' results [rows, H * D]."""
        ...

    def mlp(self, x: Tensor) -> Tensor:
        """[rows, d], its norm included; to be added to x."""
        ...


class Layers(Protocol):
    """A model, taken apart."""

    layers: list[Layer]

    def embed(self, ids: Tensor) -> Tensor: ...

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [N, 1, D] of positions [N]."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., heads, D]."""
        ...

    def final_norm(self, x: Tensor) -> Tensor: ...


class LLaDALayer:
    def __init__(self, block: Any) -> None:
        self.attention_norm = block.attn_norm
        self.query, self.key, self.value = block.q_proj, block.k_proj, block.v_proj
        self.attention_output = block.attn_out
        self._norm, self._mlp = block.ff_norm, block.mlp

    def mlp(self, x: Tensor) -> Tensor:
        return self._mlp(self._norm(x))


class LLaDALayers:
    """Rotates in float32."""

    def __init__(self, model: LLaDAModelLM) -> None:
        self.layers: list[Layer] = [LLaDALayer(block) for block in model.blocks]
        self.embed, self.final_norm = model.transformer["wte"], model.transformer["ln_f"]
        self.rotary = model.rotary

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_in_float32(x, cos, sin)


class DreamLayer:
    """Qwen2's names; the projections bring their biases along."""

    def __init__(self, block: Any) -> None:
        attention = block.self_attn
        self.attention_norm = block.input_layernorm
        self.query, self.key, self.value = attention.q_proj, attention.k_proj, attention.v_proj
        self.attention_output = attention.o_proj
        self._norm, self._mlp = block.post_attention_layernorm, block.mlp

    def mlp(self, x: Tensor) -> Tensor:
        return self._mlp(self._norm(x))


class DreamLayers:
    """Rotates in the activations' dtype."""

    def __init__(self, model: DreamModel) -> None:
        self.layers: list[Layer] = [DreamLayer(block) for block in model.blocks]
        self.embed, self.final_norm = model.model["embed_tokens"], model.model["norm"]
        self._model = model

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._model.rotary(positions)
        dtype = self._model.model.get_parameter("embed_tokens.weight").dtype
        return cos.to(dtype), sin.to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_halves(x, cos, sin)


def layers_of(model: DiffusionModel) -> Layers:
    if isinstance(model, LLaDAModelLM):
        return LLaDALayers(model)
    if isinstance(model, DreamModel):
        return DreamLayers(model)
    raise TypeError(f"dLLM-Cache does not know the layers of {type(model).__name__}")
