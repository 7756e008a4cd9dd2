"""Select-and-pack (dLLM-Serve §4.5, eq. 6): retained K and V rows go straight into the pool.

Shapes: n building requests, N packed rows, R pool rows, Hkv heads of width D. K and V are written by
one launch that follows the selection itself; no index or row is stored in between.

Fresh rows of K and V to their places in the pool, both in one launch; M rows of Hkv heads of width D, R pool rows.
"""

import torch
from torch import Tensor

from engines.kernels.launch import Building, expect, expect_alike, power_of_two, tiles
from engines.runtime.device import on

ROWS = 32
"""Rows a program moves: 8 KiB of K and of V at 16 bits and D = 128."""


def pack(
    pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, building: Building, chosen: Tensor | None, max_kept: int
) -> None:
    """pool[kv_start + j, h] = row of context index chosen[i, h, j], for j < kept[i] of every request i.

    pool_k, pool_v [R, Hkv, D] of one layer; k, v [N, Hkv, D], rows of any stride; chosen [n, Hkv or 1, K]
    context indices, best first, what is past kept is not read; None keeps context row j as row j.
    ``max_kept`` is at least every kept and at most K. Ranges of pool rows must not overlap.
    """
    _check(pool_k, pool_v, k, v, building, chosen, max_kept)
    from engines.kernels.jit import pack_rows

    n, (kv_heads, width) = len(building.kept), k.shape[1:]
    if min(n, max_kept) == 0:
        return
    request_stride = head_stride = 0
    if chosen is not None:
        request_stride = chosen.stride(0)
        head_stride = chosen.stride(1) if chosen.shape[1] > 1 else 0
    with on(k.device):
        pack_rows[(kv_heads, tiles(max_kept, ROWS), n)](
            pool_k,
            pool_v,
            k,
            v,
            chosen,
            building.run_start,
            building.block_start,
            building.window_len,
            building.kept,
            building.kv_start,
            pool_k.stride(0),
            pool_k.stride(1),
            pool_v.stride(0),
            pool_v.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
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
    """As ``pack``, request by request."""
    _check(pool_k, pool_v, k, v, building, chosen, max_kept)
    head = torch.arange(k.shape[1], device=k.device).unsqueeze(1)
    for i, (kept, start) in enumerate(zip(building.kept.tolist(), building.kv_start.tolist(), strict=True)):
        first = torch.arange(kept, device=k.device).unsqueeze(0)
        context = first if chosen is None else chosen[i, :, :kept].long()
        source = building.rows(i, context)
        pool_k[start : start + kept] = k[source, head].transpose(0, 1)
        pool_v[start : start + kept] = v[source, head].transpose(0, 1)


def _check(
    pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, building: Building, chosen: Tensor | None, max_kept: int
) -> None:
    expect(
        k.dim() == pool_k.dim() == 3 and k.shape == v.shape and pool_k.shape == pool_v.shape,
        "k and v [N, Hkv, D], pool_k and pool_v [R, Hkv, D]",
    )
    expect(
        k.shape[1:] == pool_k.shape[1:] and all(t.stride(2) == 1 for t in (k, v, pool_k, pool_v)),
        "the same Hkv and D in k, v and the pool, with contiguous D",
    )
    expect_alike("k, v and the pool", k, v, pool_k, pool_v)
    building.check(k.device)
    if chosen is not None:
        expect(
            chosen.dim() == 3
            and chosen.shape[0] == len(building.kept)
            and chosen.shape[1] in (1, k.shape[1])
            and chosen.shape[2] >= max_kept
            and (chosen.shape[2] < 2 or chosen.stride(2) == 1)
            and chosen.dtype in (torch.int32, torch.int64),
            "chosen [n, Hkv or 1, K] int32 or int64 with contiguous K of max_kept at least",
        )


TILE = 2048


def store(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """pool[rows[i]] = row i; pool_k, pool_v [R, Hkv, D] of one layer, rows [M] int64, k and v [M, Hkv, D].

    Rows of all four lie anywhere, their heads side by side. Rows of the pool that are named twice hold one of the two.
    """
    _check_store(pool_k, pool_v, rows, k, v)
    from engines.kernels.jit import store_rows

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
    _check_store(pool_k, pool_v, rows, k, v)
    pool_k.index_copy_(0, rows, k)
    pool_v.index_copy_(0, rows, v)


def _check_store(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
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
