"""Importance of context rows to a block (dLLM-Serve §4.5, eq. 6; Sparse-dLLM for ``uniform``), in torch.

Shapes: n requests building their cache in this step, B the longest block, C the longest context
(all positions outside the block: prefix ++ suffix, as one list), H / Hkv heads, D head width.

score[h, j] = mean over the block's query rows of q[h] . k[j], after rotation, unscaled. ``head``
ranks each KV head on its own (with GQA the maximum over its query heads) and pools per head;
``uniform`` averages the heads first, then pools, and all heads share one set. Pooling is a max over
``kernel`` neighbours of the list, across the gap the block leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.models.protocol import Ranks

Selection = Literal["head", "uniform"]


@dataclass(frozen=True, kw_only=True)
class ContextRows:
    """Where block and context rows of the building requests lie among the step's packed rows."""

    block_rows: Tensor
    """[n, B] packed row of each block position (padding repeats row 0 of the request)."""
    block_valid: Tensor | None
    """[n, B]; None where all blocks are equally long."""
    context_rows: Tensor
    """[n, C]"""
    context_valid: Tensor | None
    """[n, C]; None where all contexts are equally long."""


def importance(
    q: Tensor, k: Tensor, rows: ContextRows, selection: Selection, kernel: int, ranks: Ranks | None = None
) -> Tensor:
    """Pooled scores [n, Hkv or 1, C]; padding is -inf. q [N, H, D] and k [N, Hkv, D] are rotated.

    Where heads are divided among ``ranks``, q and k hold this process's; ``uniform`` still averages all heads.
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
    score = score.transpose(1, 2)
    padding = None if rows.context_valid is None else ~rows.context_valid.unsqueeze(1)
    if padding is not None:
        score = score.masked_fill(padding, -torch.inf)
    if kernel > 1:
        score = F.max_pool1d(score, kernel, stride=1, padding=kernel // 2)
        if padding is not None:
            score = score.masked_fill(padding, -torch.inf)
    return score.reshape(n, -1, context)


def _mean_of_heads(score: Tensor, ranks: Ranks | None) -> Tensor:
    """[n, C, 1] of [n, C, H]; equally many heads on every rank."""
    if ranks is None:
        return score.mean(dim=2, keepdim=True)
    total = ranks.all_reduce(score.sum(dim=2, keepdim=True, dtype=torch.promote_types(score.dtype, torch.float32)))
    return (total / (score.shape[2] * ranks.size)).to(score.dtype)
