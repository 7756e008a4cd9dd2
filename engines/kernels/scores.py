"""Importance of context rows to a block, pooled (dLLM-Serve §4.5, eq. 6; Sparse-dLLM for ``uniform``; ours for ``attended``), in torch and
by Triton kernels.

Shapes: n requests that build their cache in this step, N packed rows, H / Hkv heads, D head width. B is the longest block, C the longest
context: all positions outside the block, prefix ++ suffix, as one list.

score[h, j] = mean over the block's query rows of q[h] . k[j], after rotation, unscaled. ``head`` ranks each KV head on its own and pools
per head; with GQA it takes the maximum over query heads. ``uniform`` averages the heads first, then pools, and all heads share one set.
With ``attended`` they share one too, and scores are attention probabilities. Pooling is a max over ``kernel`` neighbours of the list,
across the gap that the block leaves.

The kernels' sums are float32 whatever the dtype of q and k, so 16-bit activations tie less often than in torch. They take the mean over
query rows first: a mean of dot products is the dot product with the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.pack import Building, power_of_two, tiles
from engines.models.protocol import Ranks
from engines.runtime.device import on

Selection = Literal["head", "uniform"]


@dataclass(frozen=True, kw_only=True)
class ContextRows:
    """The places of block and context rows of the building requests among the step's packed rows."""

    block_rows: Tensor
    """[n, B] packed row of each block position; padding repeats row 0 of the request."""
    block_valid: Tensor | None
    """[n, B] False for padding; None if all blocks are equally long."""
    context_rows: Tensor
    """[n, C] packed row of each context index."""
    context_valid: Tensor | None
    """[n, C] False for padding; None if all contexts are equally long."""


def importance(
    q: Tensor, k: Tensor, rows: ContextRows, selection: Selection, kernel: int, ranks: Ranks | None = None
) -> Tensor:
    """Return pooled scores [n, Hkv or 1, C]; padding is -inf. q [N, H, D] and k [N, Hkv, D] are rotated.

    If heads are divided among ``ranks``, q and k hold this process's heads; ``uniform`` still averages all heads.
    """
    n, context = rows.context_rows.shape
    kv_heads, width = k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    block_q = q[rows.block_rows]
    if rows.block_valid is None:
        mean_q = block_q.sum(dim=1) / block_q.shape[1]
    else:
        weight = rows.block_valid.to(q.dtype)
        mean_q = (block_q * weight[:, :, None, None]).sum(dim=1) / weight.sum(dim=1)[:, None, None]
    # A product and a sum over D, not a matmul: each score is then the same number in any batch.
    keys = k[rows.context_rows].unsqueeze(3)
    score = (mean_q.view(n, 1, kv_heads, group, width) * keys).sum(dim=-1)
    score = score.amax(dim=3) if selection == "head" else _mean_of_heads(score.flatten(2), ranks)
    return _pool_scores(score.transpose(1, 2), rows.context_valid, kernel).reshape(n, -1, context)


def _pool_scores(score: Tensor, valid: Tensor | None, kernel: int) -> Tensor:
    """Return pooled scores [n, heads, C], with -inf where ``valid`` [n, C] is false."""
    padding = None if valid is None else ~valid.unsqueeze(1)
    if padding is not None:
        score = score.masked_fill(padding, -torch.inf)
    if kernel > 1:
        score = F.max_pool1d(score, kernel, stride=1, padding=kernel // 2)
        if padding is not None:
            score = score.masked_fill(padding, -torch.inf)
    return score


def _mean_of_heads(score: Tensor, ranks: Ranks | None) -> Tensor:
    """Return [n, C, 1], the mean of [n, C, H]; every rank has equally many heads."""
    if ranks is None:
        return score.mean(dim=2, keepdim=True)
    total = ranks.all_reduce(score.sum(dim=2, keepdim=True, dtype=torch.promote_types(score.dtype, torch.float32)))
    return (total / (score.shape[2] * ranks.size)).to(score.dtype)


QUERY_ROWS = 32
"""Query rows whose probabilities are in memory at once."""


def attention_importance(
    q: Tensor,
    k: Tensor,
    rows: ContextRows,
    block_len: Sequence[int],
    num_context: Sequence[int],
    kernel: int,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return pooled scores [n, 1, C] float32 of ``attended``; padding is -inf. q [N, H, D] and k [N, Hkv, D] are rotated.

    score[j] = max over heads h and the block's query rows i of softmax_j(q[i, h] . k[j] / sqrt(D)) over context and block. It is the
    largest share that any row of the block gives row j. This multiplies the block's B queries once more with the keys of all T rows, B / T
    of the Refresh's own products. It holds [H, QUERY_ROWS, T] of one request at a time, which no other request changes.
    """
    n, context = rows.context_rows.shape
    group = q.shape[1] // k.shape[1]
    score = q.new_full((n, context), -torch.inf, dtype=torch.float32)
    for i, (block, length) in enumerate(zip(block_len, num_context, strict=True)):
        if length == 0:
            continue
        block_rows, context_rows = rows.block_rows[i, :block], rows.context_rows[i, :length]
        keys = k[torch.cat((context_rows, block_rows))].float().permute(1, 2, 0).repeat_interleave(group, dim=0)
        highest = score[i, :length]
        for part in block_rows.split(QUERY_ROWS):
            queries = q[part].float().transpose(0, 1) * q.shape[2] ** -0.5
            highest = torch.maximum(highest, (queries @ keys).softmax(dim=-1)[..., :length].amax(dim=(0, 1)))
        score[i, :length] = highest
    if ranks is not None:
        score = ranks.all_gather(score.unsqueeze(0)).amax(dim=0)
    return _pool_scores(score.unsqueeze(1), rows.context_valid, kernel)


_QUERY_ROWS = 16
_HEAD_TILE = 64
_UNIFORM_TILE = 32
"""Context rows of a program, including the pooling's neighbours on both sides."""


def scores(
    q: Tensor, k: Tensor, building: Building, selection: Selection, kernel: int, max_block: int, max_context: int
) -> Tensor:
    """Return pooled scores [n, Hkv or 1, C] float32, -inf past a request's context.

    q [N, H, D] and k [N, Hkv, D] are rotated, with rows of any stride. ``max_block`` and ``max_context`` = C are the longest of the step,
    or more; ``kernel`` is odd.
    """
    from engines.kernels.jit import pooled_scores

    n, (kv_heads, width) = len(building.kept), k.shape[1:]
    uniform = selection == "uniform"
    group = q.shape[1] // kv_heads
    heads = 1 if uniform else kv_heads
    out = torch.empty((n, heads, max_context), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    radius = kernel // 2
    tile = max(_UNIFORM_TILE if uniform else _HEAD_TILE, power_of_two(4 * radius))
    # ``uniform`` averages all heads, so heads of a group may be averaged before the product with their keys.
    mean_q = _mean_queries(q, building, group if uniform else 1, max_block)
    with on(q.device):
        pooled_scores[(tiles(max_context, tile - 2 * radius), heads, n)](
            *(out, mean_q, k),
            *(building.run_start, building.block_start, building.window_len, building.num_context),
            max_context,
            *k.stride()[:2],
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
    """Return [n, H / group, D] float32 means over the rows of each request's block, and over ``group`` neighbouring heads."""
    from engines.kernels.jit import mean_queries

    n, heads, width = len(building.kept), q.shape[1] // group, q.shape[2]
    mean_q = torch.empty((n, heads, width), dtype=torch.float32, device=q.device)
    with on(q.device):
        mean_queries[(heads, n)](
            *(mean_q, q, building.run_start, building.block_start, building.block_len),
            *q.stride()[:2],
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
    table = torch.stack(building).unsqueeze(2)
    run_start, block_start, block_len, window_len, num_context = table[:5]
    context = torch.arange(max_context, device=q.device).unsqueeze(0)
    offset = torch.arange(max_block, device=q.device).unsqueeze(0)
    position = torch.where(context < block_start, context, context + window_len)
    rows = ContextRows(
        block_rows=run_start + torch.where(offset < block_len, block_start + offset, 0),
        block_valid=offset < block_len,
        context_rows=run_start + torch.where(context < num_context, position, 0),
        context_valid=context < num_context,
    )
    return importance(q.float(), k.float(), rows, selection, kernel)
