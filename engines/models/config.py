"""What every diffusion language model's configuration says, under one set of names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from engines.knobs import Range

Width = Annotated[int, Range(1, 2**17)]
Layers = Annotated[int, Range(1, 1024)]
Heads = Annotated[int, Range(1, 4096)]
Hidden = Annotated[int, Range(1, 2**20)]
Rows = Annotated[int, Range(1, 2**24)]
"""Rows of a vocabulary, or positions."""
Positive = Annotated[float, Range(above=0, most=1e30)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Fields are named as LLaDA publishes them (OLMo's names, not Llama's)."""

    family: ClassVar[str]
    """'llada' or 'dream': names the chat format and the decoding conventions."""
    shifts_logits: ClassVar[bool]
    """Row i of ``DiffusionModel.logits`` predicts the token at i + 1, not at i. The decoder shifts."""
    qkv_bias: ClassVar[bool]

    d_model: Width
    n_layers: Layers
    n_heads: Heads
    n_kv_heads: Heads
    mlp_hidden_size: Hidden
    vocab_size: Rows
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: Rows
    rope_theta: Positive
    rms_norm_eps: Positive
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    weight_tying: bool = False

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The published layout of ``config.json``."""
