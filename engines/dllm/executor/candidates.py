"""Which rows of a step get logits, and the random numbers of requests that draw theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engines.dllm.decode.denoise import Sampling
from engines.dllm.executor.rows import Places
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import Block, BlockTokens, Candidates, StepLayout
from engines.dllm.plan import PlanItem
from engines.runtime.noise import row_keys
from engines.runtime.rows import MIN_ROWS, Ints
from engines.runtime.staging import Staging


def first_places(counts: Ints, block: Block, places: Tensor | None, staging: Staging) -> Candidates:
    """The first ``counts`` of every request's ``places`` [n, B]; None takes a block's places in order."""
    width = block.positions.shape[1]
    if places is not None and len(counts) == 1 and counts[0] >= MIN_ROWS:
        cell, item = places[0, : counts[0]], np.zeros(counts[0], dtype=np.int64)
        return Candidates(size=len(item), cell=cell, row=block.packed.take(cell), item=item)
    wanted = Places.of(counts, least=MIN_ROWS)
    start = wanted.request * width
    cell, first = staging.send(start + wanted.rank, start)
    if places is not None:
        cell = places.take(cell) + first
    return Candidates(size=wanted.size, cell=cell, row=block.packed.take(cell), item=wanted.request)


class CandidateChoice:
    """The masked places of every block, or all of them where a layout says so."""

    def __init__(self, state: RequestState, staging: Staging, *, vocab_size: int) -> None:
        self._state, self._staging = state, staging
        self._vocab_size = vocab_size

    def of(self, items: Sequence[PlanItem], layout: StepLayout, found: BlockTokens) -> Candidates:
        if layout.every is not None:
            return layout.every
        # How many positions are masked is known here without asking the device; which, there.
        fixed = found.fixed.byte() if found.fixed.is_cuda else found.fixed
        places = fixed.sort(dim=1, stable=True).indices
        return first_places(np.array([item.masks_left for item in items]), layout.block, places, self._staging)

    def sampling(self, items: Sequence[PlanItem], candidates: Candidates, block: Block) -> Sampling | None:
        """None where no resident request draws at random."""
        if not self._state.sampled:
            return None
        generations, draws = self._state.generations(items), self._state.next_draws(items)
        vocabulary = self._vocab_size
        real = [[g.temperature, g.top_p, g.alg_temp, float(g.remasking == "random")] for g in generations]
        whole = [[g.seed, n, min(g.top_k or vocabulary, vocabulary)] for g, n in zip(generations, draws, strict=True)]
        temperature, top_p, alg_temp, is_random = self._staging.floats(np.array(real)[candidates.item].T)
        seeds, counts, top_k = self._staging.send(np.array(whole, dtype=np.int64)[candidates.item].T.copy())[0]
        truncates = any(g.top_p < 1 or g.top_k is not None for g in generations)
        return Sampling(
            temperature=temperature,
            keys=row_keys(seeds, counts, block.positions.take(candidates.cell)),
            random_remasking=is_random > 0,
            top_p=top_p if truncates else None,
            top_k=top_k if truncates else None,
            alg_temp=alg_temp if any(g.alg_temp > 0 for g in generations) else None,
        )
