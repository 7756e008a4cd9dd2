"""Predicted tokens and their confidences: greedy, or drawn from each request's own seed.

A draw is a function of (seed, which draw of the request, position) alone. Shapes: m rows, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engines.blockdiffusion.plan import Denoised
from engines.blockdiffusion.rows import StepRows
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling
from engines.models.packed import PackedModel
from engines.runtime.noise import row_keys
from engines.runtime.staging import Staging


@dataclass(frozen=True, kw_only=True)
class BlockDraws(Sampling):
    """``Sampling`` whose ``top_k`` is taken before ``top_p``, as the authors of SDAR and LLaDA2 do."""

    draws: Tensor
    """bool [m]; the others take the likeliest token."""

    def rows(self, index: slice | Tensor) -> BlockDraws:
        base = super().rows(index)
        return BlockDraws(
            temperature=base.temperature,
            keys=base.keys,
            random_remasking=base.random_remasking,
            top_p=base.top_p,
            top_k=base.top_k,
            draws=self.draws[index],
        )

    def kept(self, logits: Tensor, suppress_id: int | None) -> Tensor | None:
        """[m, V] the tokens whose probabilities confidence is read off: the ``top_k`` likeliest, and of these the shortest beginning
        whose probabilities sum to more than ``top_p``. None if all are.

        The mask is one of them where it is so likely, as in the published samplers; it is never drawn, and where it would be
        alone the next token joins it."""
        if self.top_p is None or self.top_k is None:
            return None
        ordered, token = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
        place = torch.arange(logits.shape[1], device=logits.device)
        is_near = place < self.top_k.unsqueeze(1)
        scaled = (ordered - ordered[:, :1]) / torch.where(self.temperature > 0, self.temperature, 1.0).unsqueeze(1)
        share = torch.softmax(scaled.masked_fill(~is_near, -torch.inf), dim=-1)
        top_p = self.top_p.unsqueeze(1)
        is_kept = is_near & ((share.cumsum(dim=-1) - share <= top_p) | (top_p >= 1))
        if suppress_id is not None:
            is_kept |= (place == 1) & (token[:, :1] == suppress_id)
        return torch.empty_like(is_kept).scatter_(1, token, is_kept)

    def tokens(self, logits: Tensor, greedy: Tensor, kept: Tensor | None) -> Tensor:
        return torch.where(self.draws, super().tokens(logits, greedy, kept), greedy)

    def remasked(self, confidence: Tensor) -> Tensor:
        return confidence


def step_draws(
    rows: StepRows, wanted: np.ndarray, denoised: Denoised, staging: Staging, vocab: int
) -> BlockDraws | None:
    """For the ``wanted`` rows [m] of a step, as ``rows.wanted_rows`` orders them. None where all are greedy at temperature 0.

    A block's first token is the likeliest, whatever its request draws.
    """
    if all(each.temperature == 0 for each in denoised.sampling):
        return None
    request, place = np.nonzero(denoised.wanted)
    sampling, num_first = denoised.sampling, len(wanted) - len(request)

    def column(of_requests: Sequence[float], otherwise: float) -> np.ndarray:
        """[m] of each row's request; integers stay integers."""
        return np.append(np.array(of_requests)[request], np.full(num_first, otherwise))

    seeds = column([each.seed for each in sampling], 0)
    draw = column(denoised.draw.tolist(), 0)
    where = np.append(rows.block_start[request] + place, np.zeros(num_first, dtype=np.int64))
    keys = row_keys(*staging.send(seeds, draw, where))
    cut = [each.top_k is not None or each.top_p < 1 for each in sampling]
    has_cuts = bool(column(cut, False).any())
    return BlockDraws(
        temperature=staging.floats(column([each.temperature for each in sampling], 0.0)),
        keys=keys,
        random_remasking=torch.zeros_like(keys, dtype=torch.bool),
        top_p=staging.floats(column([each.top_p for each in sampling], 1.0)) if has_cuts else None,
        top_k=staging.ints(column([min(each.top_k or vocab, vocab) for each in sampling], vocab)) if has_cuts else None,
        draws=staging.ints(column([int(each.draws) for each in sampling], 0)).bool(),
    )


def reduced(
    model: PackedModel, hidden: Tensor, reduction: Reduction, draws: BlockDraws | None, *, most: int
) -> Reduced:
    """Token and confidence of hidden states [m, d], at most ``most`` rows of logits at a time and in parts of nearly equal size:
    none is so small that it would be summed in another order."""
    num_parts = -(-len(hidden) // most)
    bounds = np.linspace(0, len(hidden), num_parts + 1).astype(int).tolist()
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    found = [reduction(model.logits(hidden[part]), None if draws is None else draws.rows(part)) for part in parts]
    tokens, confidences = zip(*found, strict=True)
    return torch.cat(tokens), torch.cat(confidences)
