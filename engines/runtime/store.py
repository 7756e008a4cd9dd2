"""How K and V of a step's rows reach a pool."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(pool_k, pool_v [R, Hkv, D] of a layer, rows [M], k, v [M, Hkv, D]): pool[rows[i]] = row i."""


def store_by_index(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    pool_k.index_copy_(0, rows, k)
    pool_v.index_copy_(0, rows, v)
