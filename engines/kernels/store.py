"""Fresh rows of K and V to their places in the pool, both in one launch; M rows of Hkv heads of width D, R pool rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.kernels.launch import expect, expect_alike, power_of_two, tiles
from engines.runtime.device import on

TILE = 2048


def store(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """pool[rows[i]] = row i; pool_k, pool_v [R, Hkv, D] of one layer, rows [M] int64, k and v [M, Hkv, D].

    Rows of all four lie anywhere, their heads side by side. Rows of the pool that are named twice hold one of the two.
    """
    _check(pool_k, pool_v, rows, k, v)
    from engines.kernels.jit.store import store_rows

    size = k.shape[1] * k.shape[2]
    if rows.numel() == 0 or size == 0:
        return
    tile = min(TILE, power_of_two(size))
    with on(k.device):
        store_rows[(len(rows), tiles(size, tile))](
            pool_k,
            pool_v,
            rows,
            k,
            v,
            pool_k.stride(0),
            pool_v.stride(0),
            k.stride(0),
            v.stride(0),
            SIZE=size,
            TILE=tile,
            num_warps=4,
        )


def store_reference(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """As ``store``."""
    _check(pool_k, pool_v, rows, k, v)
    pool_k.index_copy_(0, rows, k)
    pool_v.index_copy_(0, rows, v)


def _check(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    expect(
        k.dim() == pool_k.dim() == 3 and k.shape == v.shape and pool_k.shape == pool_v.shape,
        "k and v [M, Hkv, D], pool_k and pool_v [R, Hkv, D]",
    )
    expect(
        k.shape[1:] == pool_k.shape[1:] and all(_has_whole_rows(t) for t in (k, v, pool_k, pool_v)),
        "the same Hkv and D in k, v and the pool, heads side by side in a row",
    )
    expect_alike("k, v and the pool", k, v, pool_k, pool_v)
    expect(
        rows.shape == k.shape[:1] and rows.dtype == torch.int64 and rows.is_contiguous() and rows.device == k.device,
        "contiguous rows [M] int64 on the device of k",
    )


def _has_whole_rows(x: Tensor) -> bool:
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
