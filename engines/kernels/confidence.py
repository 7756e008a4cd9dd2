"""Reduces logits to (token, confidence) in one pass, without probabilities or a copy of the logits.

Shapes: M rows of V logits; S shards of a vocabulary. Sums are float32. The token is that of the largest logit, the lowest id of equals;
``suppress_id`` is never the token, but counts in the normaliser. A NaN among a row's logits makes its confidence NaN, and its token some id
of the vocabulary. Torch's token would be that of the first NaN. Every row is summed in the same TILE pieces, whatever M: its numbers do not
depend on other rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engines.kernels.pack import power_of_two, tiles
from engines.runtime.device import on

TILE = 4096
"""Logits that a program reads, all at once; LLaDA's row of 126,464 has 31 such tiles."""


class Partial(NamedTuple):
    """Reduced logits, [M] of one shard of a vocabulary or [S, M] of all; ``sumexp`` is relative to ``maximum``."""

    best: Tensor
    """float32, the largest logit of the tokens that may be chosen."""
    token: Tensor
    """int64, the id of that token."""
    maximum: Tensor
    """float32, the largest logit of all tokens."""
    sumexp: Tensor
    """float32, sum of exp(logit - maximum)."""


def confidence(logits: Tensor, suppress_id: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token [M] int64 and softmax probability [M] float32 of logits [M, V], with rows of any stride."""
    parts = _tile_parts(logits, suppress_id, 0)
    return _combine(parts, by_row=True)


def confidence_reference(logits: Tensor, suppress_id: int | None = None) -> tuple[Tensor, Tensor]:
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if suppress_id is not None:
        logits = logits.clone()
        logits[:, suppress_id] = -torch.inf
    token = logits.argmax(dim=-1)
    return token, p.gather(1, token.unsqueeze(1)).squeeze(1)


def partial(logits: Tensor, suppress_id: int | None, offset: int) -> Partial:
    """Reduce the shard [M, V] whose first column is token ``offset``; ``suppress_id`` may lie in any shard."""
    parts = _tile_parts(logits, suppress_id, offset)
    merged = _empty(parts.best.shape[:1], logits.device)
    _merge(merged, parts, by_row=True, is_final=False)
    return merged


def partial_reference(logits: Tensor, suppress_id: int | None, offset: int) -> Partial:
    """Like ``partial``, but reduces float64 logits in float64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide, copy=suppress_id is not None)
    maximum = logits.amax(dim=-1)
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)
    sumexp = torch.exp(logits - shift.unsqueeze(1)).sum(dim=-1)
    if suppress_id is not None and 0 <= suppress_id - offset < logits.shape[1]:
        logits[:, suppress_id - offset] = -torch.inf
    best, token = logits.max(dim=-1)
    return Partial(best, token + offset, maximum, sumexp)


def combine(parts: Partial) -> tuple[Tensor, Tensor]:
    """Return token [M] and confidence [M] of a vocabulary whose shards' ``partial`` are stacked [S, M], in any order."""
    return _combine(parts, by_row=False)


def combine_reference(parts: Partial) -> tuple[Tensor, Tensor]:
    maximum = parts.maximum.amax(dim=0)
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)
    normaliser = (parts.sumexp * torch.exp(parts.maximum - shift)).sum(dim=0)
    best = parts.best.amax(dim=0)
    last = torch.iinfo(torch.int64).max
    token = torch.where(parts.best == best, parts.token, last).amin(dim=0)
    token = torch.where(token == last, parts.token.amax(dim=0), token)
    return token, torch.exp(best - shift) / normaliser


def _empty(shape: tuple[int, ...], device: torch.device) -> Partial:
    best, maximum, sumexp = torch.empty((3, *shape), dtype=torch.float32, device=device).unbind(0)
    return Partial(best, torch.empty(shape, dtype=torch.int64, device=device), maximum, sumexp)


def _tile_parts(logits: Tensor, suppress_id: int | None, offset: int) -> Partial:
    """Reduce TILE logits each, to [M, tiles]."""
    from engines.kernels.jit import reduce_tiles

    rows, vocabulary = logits.shape
    count = tiles(vocabulary, TILE)
    parts = _empty((rows, count), logits.device)
    if rows > 0:
        suppressed = -1 if suppress_id is None else suppress_id - offset
        with on(logits.device):
            reduce_tiles[(rows * count,)](
                *parts,
                logits,
                logits.stride(0),
                vocabulary,
                count,
                suppressed,
                offset,
                TILE=TILE,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return parts


def _combine(parts: Partial, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Token and confidence of parts [M, count] or [count, M]."""
    parts = Partial(*(t.contiguous() for t in parts))
    rows = parts.best.shape[0 if by_row else 1]
    token = torch.empty(rows, dtype=torch.int64, device=parts.best.device)
    probability = torch.empty(rows, dtype=torch.float32, device=parts.best.device)
    _merge((probability, token, None, None), parts, by_row=by_row, is_final=True)
    return token, probability


def _merge(outputs: Sequence[Tensor | None], parts: Partial, *, by_row: bool, is_final: bool) -> None:
    """Merge parts [M, count] or [count, M] into ``outputs``: a ``Partial``, or the final probability and token."""
    from engines.kernels.jit import merge_parts

    rows, count = parts.best.shape if by_row else parts.best.shape[::-1]
    if rows == 0:
        return
    strides = (count, 1) if by_row else (1, rows)
    with on(parts.best.device):
        merge_parts[(rows,)](
            *outputs,
            *parts,
            count,
            *strides,
            WIDTH=power_of_two(count),
            FINAL=is_final,
            num_warps=1,
            enable_fp_fusion=False,
        )
