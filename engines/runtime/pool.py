"""The memory of K and V that an allocator hands out: rows of a ``KvPool``, or blocks of ``BlockTables``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Model(Protocol):
    """What the pool reads of a model."""

    kv_heads_here: int

    @property
    def config(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class PoolTensors:
    """``k`` and ``v`` [layers, *places, Hkv, D], of the heads this process holds."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        # Views cost a step more than what is made of them.
        self._rows = [(k[layer].flatten(0, -3), v[layer].flatten(0, -3)) for layer in range(len(k))]

    @classmethod
    def of(cls, model: Model, *places: int, make: Callable[..., Tensor] = torch.empty) -> PoolTensors:
        """In the dtype and on the device of the model; unwritten, but where ``make`` is torch.zeros."""
        shape, weight = model.config, next(model.parameters())
        size = (shape.n_layers, *places, model.kv_heads_here, shape.head_dim)
        k, v = (make(size, dtype=weight.dtype, device=weight.device) for _ in "kv")
        return cls(k, v)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [rows, Hkv, D]."""
        return self._rows[layer]

    @property
    def num_rows(self) -> int:
        return self.k.shape[1:-2].numel()

    def fill_with_zeros(self) -> None:
        self.k.zero_()
        self.v.zero_()

    def close(self) -> None:
        """Give the memory back; the rows are gone."""
        self._rows = []
        self.k = self.v = self.k.new_empty((self.k.shape[0], 0, *self.k.shape[2:]))


Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(pool_k, pool_v [R, Hkv, D] of a layer, rows [M], k, v [M, Hkv, D]): pool[rows[i]] = row i."""


def store_by_index(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    pool_k.index_copy_(0, rows, k)
    pool_v.index_copy_(0, rows, v)
