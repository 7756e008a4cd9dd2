"""Select-and-pack (dLLM-Serve §4.5, eq. 6): retained K and V rows go straight into the pool.

Shapes: n building requests, N packed rows, M fresh rows, R pool rows, Hkv heads of width D. One launch writes K and V and follows the
selection itself; no index or row is stored in between.

``store`` writes fresh rows of K and V to their places in the pool, both in one launch. This module also has sizes that the wrappers share,
and the requests of a step that build their cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engines.runtime.device import on


def power_of_two(count: int) -> int:
    """The smallest power of two that is not less than ``count``."""
    return 1 << max(0, count - 1).bit_length()


def tiles(count: int, size: int) -> int:
    return -(-count // size)


class Building(NamedTuple):
    """The requests that build their cache: [n] int64 each, on the device.

    Context index c of a request is position c if that lies before its block, else c + window_len. Position p is packed row run_start + p. A
    request with kept 0 writes nothing, and one with num_context 0 has no scores: padding of a fixed-size step is all zeros.
    """

    run_start: Tensor
    block_start: Tensor
    block_len: Tensor
    window_len: Tensor
    num_context: Tensor
    kept: Tensor
    kv_start: Tensor

    @classmethod
    def of(cls, table: Tensor) -> "Building":
        """Views of a [7, n] table, which one transfer brings to the device."""
        return cls(*table.unbind(0))

    def rows(self, i: int, context: Tensor) -> Tensor:
        """Return the packed rows of context indices of request i."""
        is_behind = context >= self.block_start[i]
        return self.run_start[i] + context + torch.where(is_behind, self.window_len[i], 0)


ROWS = 32
"""Rows that a program moves: 8 KiB each of K and V at 16 bits and D = 128."""


def pack(
    pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, building: Building, chosen: Tensor | None, max_kept: int
) -> None:
    """Do pool[kv_start + j, h] = row of context index chosen[i, h, j], for j < kept[i] of every request i.

    Shapes: pool_k, pool_v [R, Hkv, D] of one layer; k, v [N, Hkv, D], rows of any stride. ``chosen`` [n, Hkv or 1, K] holds context
    indices, best first; those past kept are not read. None keeps context row j as row j. ``max_kept`` is at least every kept and at most K.
    Ranges of pool rows must not overlap.
    """
    from engines.kernels.jit import pack_rows

    n, (kv_heads, width) = len(building.kept), k.shape[1:]
    if min(n, max_kept) == 0:
        return
    request_stride = head_stride = 0
    if chosen is not None:
        request_stride = chosen.stride(0)
        head_stride = chosen.stride(1) if chosen.shape[1] > 1 else 0
    fields = building.run_start, building.block_start, building.window_len, building.kept, building.kv_start
    with on(k.device):
        pack_rows[(kv_heads, tiles(max_kept, ROWS), n)](
            *(pool_k, pool_v, k, v, chosen),
            *fields,
            *(stride for x in (pool_k, pool_v, k, v) for stride in x.stride()[:2]),
            request_stride,
            head_stride,
            D=width,
            SELECTED=chosen is not None,
            ROWS=ROWS,
            WIDTH=power_of_two(width),
            num_warps=4,
            enable_fp_fusion=False,
        )


def pack_reference(
    pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, building: Building, chosen: Tensor | None, max_kept: int
) -> None:
    """Like ``pack``, request by request."""
    head = torch.arange(k.shape[1], device=k.device).unsqueeze(1)
    for i, (kept, start) in enumerate(zip(building.kept.tolist(), building.kv_start.tolist(), strict=True)):
        rank = torch.arange(kept, device=k.device).unsqueeze(0)
        context = rank if chosen is None else chosen[i, :, :kept].long()
        source = building.rows(i, context)
        pool_k[start : start + kept] = k[source, head].transpose(0, 1)
        pool_v[start : start + kept] = v[source, head].transpose(0, 1)


TILE = 2048


def store(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Do pool[rows[i]] = row i; pool_k, pool_v [R, Hkv, D] of one layer, rows [M] int64, k and v [M, Hkv, D].

    Rows of all four may have any stride, with their heads side by side. A pool row that is named twice holds one of the two.
    """
    from engines.kernels.jit import store_rows

    size = k.shape[1] * k.shape[2]
    if rows.numel() == 0 or size == 0:
        return
    tile = min(TILE, power_of_two(size))
    with on(k.device):
        store_rows[(len(rows), tiles(size, tile))](
            *(pool_k, pool_v, rows, k, v),
            *(x.stride(0) for x in (pool_k, pool_v, k, v)),
            SIZE=size,
            TILE=tile,
            num_warps=4,
        )
