"""The memory behind a ``KvPool``: K and V of every row it hands out."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.models.protocol import DiffusionModel


class PoolTensors:
    """``k`` and ``v`` [layers, rows, Hkv, D], of the heads this process holds."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    @classmethod
    def of(cls, model: DiffusionModel, rows: int) -> PoolTensors:
        """Unwritten, in the dtype and on the device of the model."""
        shape, weight = model.config, next(model.parameters())
        size = (shape.n_layers, rows, model.kv_heads_here, shape.head_dim)
        k, v = (torch.empty(size, dtype=weight.dtype, device=weight.device) for _ in "kv")
        return cls(k, v)

    def fill_with_zeros(self) -> None:
        self.k.zero_()
        self.v.zero_()

    def close(self) -> None:
        """Give the memory back; the rows are gone."""
        self.k = self.v = self.k.new_empty((self.k.shape[0], 0, *self.k.shape[2:]))

    @property
    def num_rows(self) -> int:
        return self.k.shape[1]
