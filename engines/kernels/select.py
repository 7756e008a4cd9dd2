"""The K most important context rows of every (request, head) without a sort.

The set is that of ``engines.dllm.cache.sparsity.top_rows``, ties to the lower index included, but listed by rising
index: attention sums the same rows in another order. Where that order matters, sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.kernels.launch import expect, power_of_two
from engines.runtime.device import on

MAX_CONTEXT = 16384
"""A row of scores is held in registers."""


def select(score: Tensor, kept: Tensor, max_kept: int) -> Tensor:
    """[n, heads, max_kept] int64 context indices; what is past kept[i] is left unwritten.

    score [n, heads, C] float32, -inf where there is no row (-0 and 0 tie; NaN is the largest, as in
    ``torch.sort``); kept [n] int64, at most ``max_kept`` and the number of the request's rows.
    """
    _check(score, kept)
    from engines.kernels.jit.select import select_rows

    n, heads, context = score.shape
    expect(context <= MAX_CONTEXT, f"at most {MAX_CONTEXT} context rows; sort longer ones")
    out = torch.empty((n, heads, max_kept), dtype=torch.int64, device=score.device)
    if out.numel() == 0:
        return out
    padded = power_of_two(context)
    with on(score.device):
        select_rows[(heads, n)](
            out,
            score,
            kept,
            score.stride(0),
            score.stride(1),
            context,
            max_kept,
            WIDTH=padded,
            num_warps=min(16, max(4, padded // 512)),
            enable_fp_fusion=False,
        )
    return out


def select_reference(score: Tensor, kept: Tensor, max_kept: int) -> Tensor:
    """As ``select``; past kept[i] it holds 0."""
    _check(score, kept)
    ranked = score.sort(dim=-1, descending=True, stable=True).indices[..., :max_kept]
    past = torch.arange(max_kept, device=score.device) >= kept[:, None, None]
    ordered = ranked.masked_fill(past, score.shape[2]).sort(dim=-1).values
    return ordered.masked_fill(past, 0)


def _check(score: Tensor, kept: Tensor) -> None:
    expect(
        score.dim() == 3 and score.dtype == torch.float32 and (score.shape[2] < 2 or score.stride(2) == 1),
        "score [n, heads, C] float32 with contiguous C",
    )
    expect(
        kept.shape == score.shape[:1] and kept.dtype == torch.int64 and kept.device == score.device,
        "kept [n] int64 on the device of score",
    )
