"""Importance scores of context rows, pooled (dLLM-Serve eq. 6), as ``engines.kernels.importance`` defines them.

Shapes: n building requests, N packed rows, H / Hkv heads of width D, C the longest context. Sums are
float32 whatever the dtype of q and k, so 16-bit activations tie less often than in torch. The mean over
query rows comes first: a mean of dot products is the dot product with the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.kernels.building import Building
from engines.kernels.importance import ContextRows, Selection, importance
from engines.kernels.launch import expect, expect_alike, power_of_two, tiles
from engines.runtime.device import on

_QUERY_ROWS = 16
_HEAD_TILE = 64
_UNIFORM_TILE = 32
"""Context rows of a program, the pooling's neighbours on both sides among them."""


def scores(
    q: Tensor, k: Tensor, building: Building, selection: Selection, kernel: int, max_block: int, max_context: int
) -> Tensor:
    """Pooled scores [n, Hkv or 1, C] float32, -inf past a request's context.

    q [N, H, D] and k [N, Hkv, D] are rotated, their rows of any stride; ``max_block`` and ``max_context`` = C are
    the longest of the step, or more; ``kernel`` is odd.
    """
    _check(q, k, building, selection, kernel)
    from engines.kernels.jit.scores import pooled_scores

    n, (kv_heads, width) = len(building.kept), k.shape[1:]
    uniform = selection == "uniform"
    group = q.shape[1] // kv_heads
    heads = 1 if uniform else kv_heads
    out = torch.empty((n, heads, max_context), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    radius = kernel // 2
    tile = max(_UNIFORM_TILE if uniform else _HEAD_TILE, power_of_two(4 * radius))
    # ``uniform`` averages all heads, so those of a group may be averaged before they meet their keys.
    mean_q = _mean_queries(q, building, group if uniform else 1, max_block)
    with on(q.device):
        pooled_scores[(tiles(max_context, tile - 2 * radius), heads, n)](
            out,
            mean_q,
            k,
            building.run_start,
            building.block_start,
            building.window_len,
            building.num_context,
            max_context,
            k.stride(0),
            k.stride(1),
            D=width,
            KV_HEADS=kv_heads,
            GROUP=group,
            UNIFORM=uniform,
            RADIUS=radius,
            TILE=tile,
            WIDTH=power_of_two(width),
            num_warps=4 if tile <= _HEAD_TILE else 8,
            enable_fp_fusion=True,
        )
    return out


def _mean_queries(q: Tensor, building: Building, group: int, max_block: int) -> Tensor:
    """[n, H / group, D] float32 means over the rows of each request's block, and over ``group`` neighbouring heads."""
    from engines.kernels.jit.scores import mean_queries

    n, heads, width = len(building.kept), q.shape[1] // group, q.shape[2]
    mean_q = torch.empty((n, heads, width), dtype=torch.float32, device=q.device)
    with on(q.device):
        mean_queries[(heads, n)](
            mean_q,
            q,
            building.run_start,
            building.block_start,
            building.block_len,
            q.stride(0),
            q.stride(1),
            D=width,
            GROUP=group,
            TILES=tiles(max_block, _QUERY_ROWS),
            ROWS=_QUERY_ROWS,
            WIDTH=power_of_two(width),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return mean_q


def scores_reference(
    q: Tensor, k: Tensor, building: Building, selection: Selection, kernel: int, max_block: int, max_context: int
) -> Tensor:
    """As ``scores``."""
    _check(q, k, building, selection, kernel)
    table = torch.stack(building).unsqueeze(2)
    run_start, block_start, block_len, window_len, num_context = table[:5]
    context = torch.arange(max_context, device=q.device).unsqueeze(0)
    place = torch.arange(max_block, device=q.device).unsqueeze(0)
    position = torch.where(context < block_start, context, context + window_len)
    rows = ContextRows(
        block_rows=run_start + torch.where(place < block_len, block_start + place, 0),
        block_valid=place < block_len,
        context_rows=run_start + torch.where(context < num_context, position, 0),
        context_valid=context < num_context,
    )
    return importance(q.float(), k.float(), rows, selection, kernel)


def _check(q: Tensor, k: Tensor, building: Building, selection: Selection, kernel: int) -> None:
    expect(
        q.dim() == k.dim() == 3 and q.shape[::2] == k.shape[::2] and q.shape[1] % k.shape[1] == 0,
        "q [N, H, D] and k [N, Hkv, D], H a multiple of Hkv",
    )
    expect_alike("q and k", q, k)
    expect(q.stride(2) == k.stride(2) == 1, "q and k with contiguous D")
    expect(selection in ("head", "uniform") and kernel % 2 == 1, "selection head or uniform and an odd kernel")
    building.check(q.device)
