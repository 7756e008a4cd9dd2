"""What the architectures have in common beyond their layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from engines.models.config import ModelConfig
from engines.models.protocol import Attend, Ranks, Rotary

Config = TypeVar("Config", bound=ModelConfig)


class MaskPredictor(nn.Module, Generic[Config]):
    """A ``DiffusionModel``; subclasses name their tensors as published checkpoints do."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.kv_heads_here = config.n_kv_heads
        self.tensor_parallel: Ranks | None = None

    @abstractmethod
    def rotary(self, positions: Tensor) -> Rotary:
        """float32 cos, sin [N, 1, D] for absolute positions [N]."""

    @abstractmethod
    def hidden(self, ids: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """As ``forward``, with the positions' rotations made beforehand."""

    @abstractmethod
    def local_logits(self, hidden: Tensor) -> Tensor:
        """[M, own] the columns of ``logits`` that this process computes; all where the model is whole."""

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final-norm hidden states [N, d] of packed ids [N] at absolute positions [N]."""
        return self.hidden(ids, self.rotary(positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] raw logits; row i predicts the token at its own position, or at the next where the configuration
        ``shifts_logits``."""
        logits = self.local_logits(hidden)
        if self.tensor_parallel is None:
            return logits
        return self.tensor_parallel.gather_columns(logits, self.config.vocab_size)
