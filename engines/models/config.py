"""What every diffusion language model's configuration says, under one set of names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Fields are named as LLaDA publishes them (OLMo's names, not Llama's)."""

    family: ClassVar[str]
    """'llada' or 'dream': names the chat format and the decoding conventions."""
    shifts_logits: ClassVar[bool]
    """Row i of ``DiffusionModel.logits`` predicts the token at i + 1, not at i. The decoder shifts."""
    qkv_bias: ClassVar[bool]

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp_hidden_size: int
    vocab_size: int
    """Rows of the embedding and of the head, padding rows included."""
    max_sequence_length: int
    rope_theta: float
    rms_norm_eps: float
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
