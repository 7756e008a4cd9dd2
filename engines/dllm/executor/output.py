"""The output of packed steps: which rows get logits, the head (dLLM-Serve §4.3; §3.2 for logits made all at once), and remasking.

Requests that draw their tokens get their random numbers here. Remasking decides which candidates become tokens of their request, and what
the host must learn of them.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.attention.backends import Run
from engines.dllm.config import EngineConfig, GenerationConfig, Learned
from engines.dllm.denoise import (
    Reduced,
    Reduction,
    Sampling,
    VocabularyReduction,
    choose,
    choose_parity,
    reduce_in_chunks,
)
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import (
    AttendFactory,
    BlockPlaces,
    BlockTokens,
    Candidates,
    Guidance,
    Places,
    StepLayout,
    StepRows,
)
from engines.dllm.plan import PlanItem, Request
from engines.dllm.rows import array_of
from engines.models.protocol import Attend, DiffusionModel
from engines.runtime.device import PoolTensors, Staging
from engines.runtime.noise import row_keys, uniform
from engines.runtime.rows import MIN_ROWS, Ints


class PackedHead:
    """Makes logits of the candidates alone, at most ``max_num_logits`` rows at a time. If monolithic, it makes logits of every row of the
    step at once, and reduces those of the candidates."""

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        reduction: Reduction,
        local: VocabularyReduction | None = None,
    ) -> None:
        self._model, self._max_num_logits = model, config.max_num_logits
        self._is_monolithic = config.logit_rows == "monolithic"
        self._reduction, self._local = reduction, local

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        needs_whole_rows = self._local is None or sampling is not None or guidance is not None
        reduction = self._reduction if needs_whole_rows or self._local is None else self._local

        def project(rows: Tensor | slice) -> Tensor:
            if needs_whole_rows:
                return guided_logits(self._model, hidden, guidance, rows)
            return self._model.local_logits(hidden[rows])

        if self._is_monolithic:
            return reduction(project(slice(None))[candidates.row], sampling)
        return reduce_in_chunks(project, candidates.row, self._max_num_logits, reduction, sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows if self._is_monolithic else wanted


def guided_logits(model: DiffusionModel, hidden: Tensor, guidance: Guidance | None, rows: Tensor | slice) -> Tensor:
    """Return [M, V] logits of some packed rows, guided if the step has guidance."""
    logits = model.logits(hidden[rows])
    if guidance is None:
        return logits
    base = model.logits(guidance.hidden[rows])
    scale = guidance.scale[rows].unsqueeze(1)
    return torch.where(scale > 0, base + (scale + 1) * (logits - base), logits)


def first_places(counts: Ints, block: BlockPlaces, places: Tensor | None, staging: Staging) -> Candidates:
    """The first ``counts`` of each request's ``places`` [n, B]; None takes a block's places in order."""
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
    """Picks the places that get logits: the masked places of each block, or all places if the layout says so."""

    def __init__(self, state: RequestState, staging: Staging, *, vocab_size: int) -> None:
        self._state, self._staging = state, staging
        self._vocab_size = vocab_size

    def of(self, items: Sequence[PlanItem], layout: StepLayout, block_tokens: BlockTokens) -> Candidates:
        if layout.every is not None:
            return layout.every
        # The host knows how many positions are masked without asking the device; only the device knows which.
        fixed = block_tokens.fixed.byte() if block_tokens.fixed.is_cuda else block_tokens.fixed
        places = fixed.sort(dim=1, stable=True).indices
        return first_places(np.array([item.candidates for item in items]), layout.block, places, self._staging)

    def sampling(self, items: Sequence[PlanItem], candidates: Candidates, block: BlockPlaces) -> Sampling | None:
        """The random numbers of a step; None if no resident request draws at random."""
        if not self._state.sampled:
            return None
        generations, draws = self._state.generations(items), self._state.next_draws(items)
        vocabulary = self._vocab_size
        floats = [[g.temperature, g.top_p, g.alg_temp, float(g.remasking == "random")] for g in generations]
        ints = [[g.seed, n, min(g.top_k or vocabulary, vocabulary)] for g, n in zip(generations, draws, strict=True)]
        temperature, top_p, alg_temp, is_random = self._staging.floats(np.array(floats)[candidates.item].T)
        seeds, counts, top_k = self._staging.send(np.array(ints, dtype=np.int64)[candidates.item].T.copy())[0]
        truncates = any(g.top_p < 1 or g.top_k is not None for g in generations)
        return Sampling(
            temperature=temperature,
            keys=row_keys(seeds, counts, block.positions.take(candidates.cell)),
            random_remasking=is_random > 0,
            top_p=top_p if truncates else None,
            top_k=top_k if truncates else None,
            alg_temp=alg_temp if any(g.alg_temp > 0 for g in generations) else None,
        )


RankedSpan = Callable[[PlanItem, Request], tuple[int, int]]
"""Returns where the active block begins among the positions that a published sampler ranks, and how many those are."""


class Committed(NamedTuple):
    counts: list[int]
    """How many tokens each item committed."""
    stops: dict[int, int]
    """``StepOutcome.stops``"""
    confidences: list[tuple[float, ...]] | None = None
    """Confidences of each item's tokens, best first, if the rule asks for them."""
    learned: list[Learned] | None = None
    """The ``Learned`` of each item, if a rule that chooses rows asks; its importance comes from elsewhere."""


def forwarded_span(item: PlanItem, request: Request) -> tuple[int, int]:
    """Rank all positions on a Refresh, the window on a Reuse."""
    return item.block_start if item.phase.is_refresh else 0, item.query_tokens


def _limits(generation: GenerationConfig, item: PlanItem, *, relax: float) -> tuple[float, ...]:
    """Threshold and factor of a request's step, then LocalLeap's levels and radius. If a request has no level, one that nothing reaches."""
    threshold = np.inf if generation.threshold is None else generation.threshold
    if relax and item.step_in_block:
        rows = item.total_len - item.block_start
        threshold *= 1 - relax * (1 - (item.masks_left + item.total_len - item.block_end) / rows)
    anchor = np.inf if generation.anchor_threshold is None else generation.anchor_threshold
    return threshold, generation.factor or 0.0, anchor, generation.neighbor_threshold, generation.radius


def _learned(
    items: Sequence[PlanItem], at: Sequence[Sequence[int]], surest: Sequence[tuple[float, ...]]
) -> list[Learned]:
    """The ``Learned`` of each item, from the places in its block that it committed."""
    places = [tuple([item.block_start + offset for offset in offsets]) for item, offsets in zip(items, at, strict=True)]
    return [Learned(positions, *surest[i : i + 1]) for i, positions in enumerate(places)]


def _chosen_confidences(confidence: Tensor, chosen: Tensor) -> list[tuple[float, ...]]:
    """Confidences of the chosen places of each item, best first; both arguments are [n, B]."""
    rows = zip(confidence.tolist(), chosen.tolist(), strict=True)
    return [tuple(sorted(compress(values, flags), reverse=True)) for values, flags in rows]


class Commit:
    """Chooses the candidates that become tokens, and writes them; ``stop_ids`` end requests with ``stop_at_eos``."""

    def __init__(
        self,
        config: EngineConfig,
        state: RequestState,
        staging: Staging,
        stop_ids: Collection[int],
        *,
        ranked_span: RankedSpan = forwarded_span,
    ) -> None:
        self._decode, self._is_parity = config.decode, config.tie_policy == "parity"
        self._state, self._staging = state, staging
        self._stop_ids = torch.tensor(sorted(stop_ids), device=state.tokens.device)
        self._ranked_span = ranked_span

    def __call__(
        self,
        items: Sequence[PlanItem],
        block: BlockPlaces,
        block_tokens: BlockTokens,
        candidates: Candidates,
        reduced: Reduced,
    ) -> Committed:
        """Write this step's tokens into the state."""
        token, confidence = reduced

        def in_block(values: Tensor, fill: float) -> Tensor:
            """[n, B] values of the candidates, ``fill`` elsewhere."""
            values = values[: candidates.size]
            if candidates.size == block.positions.numel():
                return values.view(block.positions.shape)
            grid = torch.full((block.positions.numel(),), fill, dtype=values.dtype, device=values.device)
            return grid.index_copy_(0, candidates.cell[: candidates.size], values).view(block.positions.shape)

        confidence = in_block(confidence, -torch.inf).masked_fill_(block_tokens.fixed, -torch.inf)
        token = in_block(token, 0)
        tells, learns = self._decode.tells_confidences, self._decode.learns
        if learns == "attention":
            surest = list(map(tuple, confidence.tolist()))
        if any(item.chosen.weights for item in items):
            weights = self._staging.floats(self._weights(items, confidence.shape))
            confidence = (confidence * weights).masked_fill_((weights < 0) | block_tokens.fixed, -torch.inf)
        if self._commits_best(items):
            highest, index = confidence.max(dim=1, keepdim=True)  # max takes the first of equals, as documented
            self._state.check_finite(block.slot, highest.squeeze(1))
            self._state.commit(block, block.flat.gather(1, index), token.gather(1, index))
            committed = self._read_back(items, block, None, [1] * len(items))
            if learns != "nothing":
                places = [[place] for (place,) in index.tolist()]
                committed = committed._replace(learned=_learned(items, places, surest if learns == "attention" else ()))
            return committed._replace(confidences=[tuple(row) for row in highest.tolist()]) if tells else committed
        self._state.check_finite(block.slot, confidence.amax(dim=1))
        # NaN compares with nothing. A request with NaN is lost anyway, and goes on to its end as fast as any.
        confidence = confidence.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        ranked = confidence.clone() if tells else confidence  # choosing overwrites places in it
        chosen, counts = self._choose(items, confidence, block)
        self._state.commit_chosen(block, chosen, token, block_tokens)
        committed = self._read_back(items, block, chosen, counts)
        if learns != "nothing":
            places = [list(compress(range(len(row)), row)) for row in chosen.tolist()]
            committed = committed._replace(learned=_learned(items, places, surest if learns == "attention" else ()))
        return committed._replace(confidences=_chosen_confidences(ranked, chosen)) if tells else committed

    @staticmethod
    def _weights(items: Sequence[PlanItem], shape: Sequence[int]) -> NDArray[np.float64]:
        """Weights of confidences [n, B], 1 if a rule gives none."""
        weights = np.ones(tuple(shape))
        for item, row in zip(items, weights, strict=True):
            if item.chosen.weights:
                row[array_of(item.chosen.places) - item.block_start] = np.frombuffer(item.chosen.weights)
        return weights

    def _commits_best(self, items: Sequence[PlanItem]) -> bool:
        """Whether every request commits exactly its most confident masked position, as in most steps."""
        if self._decode.quota == "origin" or self._decode.first_step != "ranked" or self._is_parity:
            return False
        return not self._state.parallel and all(item.commit == 1 for item in items)

    def _choose(
        self, items: Sequence[PlanItem], confidence: Tensor, block: BlockPlaces
    ) -> tuple[Tensor, list[int] | None]:
        """Which positions to commit, and how many per item if that does not depend on the model."""
        decode, staging = self._decode, self._staging
        commit = [item.commit for item in items]
        if decode.quota == "origin":
            return self._choose_at_random(items, confidence, block), None
        if decode.first_step != "ranked":
            is_first = staging.ints([item.step_in_block == 0 for item in items]) != 0
            if decode.first_step == "first_position":
                confidence[:, 1:].masked_fill_(is_first.unsqueeze(1), -torch.inf)
            else:
                column = confidence[:, 0]
                confidence[:, 0] = torch.where(is_first & (column > -torch.inf), torch.inf, column)
        generations = self._state.generations(items)
        is_parallel = [generation.is_parallel for generation in generations]
        library_choice = None
        if self._is_parity:
            spans = [self._ranked_span(item, self._state.request(item)) for item in items]
            library_choice = choose_parity(confidence, commit, *map(list, zip(*spans, strict=True)))
            if not any(is_parallel):
                return library_choice, commit
        threshold = factor = leap = None
        if any(is_parallel):
            limits = np.array([_limits(*pair, relax=decode.relax) for pair in zip(generations, items, strict=True)])
            threshold, factor, *leap_values = staging.floats(limits.T).to(confidence.dtype)
            leap = tuple(leap_values) if any(g.anchor_threshold is not None for g in generations) else None
        quota = commit[0] if len(set(commit)) == 1 else staging.ints(commit)
        chosen = choose(confidence, quota, threshold, factor, leap)
        if library_choice is not None:
            chosen = torch.where((staging.ints(is_parallel) != 0).unsqueeze(1), chosen, library_choice)
        return chosen, None if any(is_parallel) else commit

    def _choose_at_random(self, items: Sequence[PlanItem], confidence: Tensor, block: BlockPlaces) -> Tensor:
        """Dream's ``origin``: each mask is committed with the schedule's probability."""
        probability = self._staging.floats(np.array([item.commit_probability for item in items])).unsqueeze(1)
        seeds = self._staging.ints([generation.seed for generation in self._state.generations(items)])
        steps = self._staging.ints([item.step_in_block for item in items])
        keys = ~row_keys(seeds.unsqueeze(1), steps.unsqueeze(1), block.positions)
        drawn = uniform(keys.flatten(), 1).view(confidence.shape)
        return (drawn < probability) & (confidence > -torch.inf)

    def _read_back(
        self, items: Sequence[PlanItem], block: BlockPlaces, chosen: Tensor | None, known: list[int] | None
    ) -> Committed:
        """Read what the host cannot know: how many tokens parallel decoding committed, and stop tokens of blocks that are, or may be,
        complete. All of it comes in one transfer, and the host waits for the device for nothing else."""
        state = self._state
        if known is not None and not state.stopping:
            return Committed(known, {})
        is_stopping = [item.request_id in state.stopping for item in items]
        if known is None:
            assert chosen is not None
            counted = chosen.sum(dim=1)
            if not any(is_stopping):
                return Committed(counted.tolist(), {})
        elif not any(a and count >= i.masks_left for a, i, count in zip(is_stopping, items, known, strict=True)):
            return Committed(known, {})
        else:
            counted = torch.zeros(len(items), dtype=torch.int64, device=state.tokens.device)
        # max_len, the position of a ragged block's padding, is not the position of any token.
        ids = state.tokens.take(block.flat)
        first_stop = torch.where(torch.isin(ids, self._stop_ids), block.positions, state.max_len).amin(dim=1)
        counts, positions = torch.stack((counted, first_stop)).tolist()
        committed = counts if known is None else known
        stops = {}
        for can_stop, item, count, position in zip(is_stopping, items, committed, positions, strict=True):
            if can_stop and count >= item.masks_left and position < state.max_len:
                stops[item.request_id] = position
                state.end_with(item)
        return Committed(committed, stops)


class Rollout:
    """Attention rollout of a step, for rules that choose rows: how much its rows attended to each position. It attends as ``attend`` does.

    Rollout (Abnar and Zuidema, arXiv:2005.00928): A is the mean of the heads' attention, with rows of the identity for positions that were
    not computed. Each layer passes (A + I) / 2 on. A position's importance is the sum of its column in the product over the layers. We need
    only sums of columns, so a vector goes back through the layers instead of a product of matrices: q x T per layer.
    """

    def __init__(self, attend: AttendFactory, pool: PoolTensors) -> None:
        self._attend, self._pool = attend, pool
        self._layers: list[list[Tensor]] = []

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        attend, runs = self._attend(items, rows, pad_to), rows.reuse_q_runs
        self._layers = []

        def keeping(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.clone()  # attention may overwrite q
            out = attend(layer, q, k, v)
            self._layers.append([self._mean_attention(queries, layer, *pair) for pair in zip(items, runs, strict=True)])
            return out

        return keeping

    def _mean_attention(self, q: Tensor, layer: int, item: PlanItem, run: Run) -> Tensor:
        """The heads' mean attention [rows, T] of an item."""
        queries, keys = q[slice(*run)], self._pool.k[layer][item.kv_start : item.kv_start + item.total_len]
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        scores = queries.transpose(0, 1) @ keys.permute(1, 2, 0) / queries.shape[-1] ** 0.5
        return torch.softmax(scores.float(), dim=-1).mean(dim=0)

    def importance(self, items: Sequence[PlanItem]) -> list[tuple[float, ...]]:
        """The importance of each position of each item, in the last step."""
        importances = []
        for index, item in enumerate(items):
            rows = torch.from_numpy(np.array(array_of(item.chosen.rows))).to(self._pool.k.device)
            sums = torch.ones(item.total_len, dtype=torch.float64, device=rows.device)
            for layer in reversed(self._layers):
                attention, passed = layer[index].double(), sums[rows]
                attention[torch.arange(len(rows), device=rows.device), rows] += 1
                sums[rows] = 0
                sums += passed @ (attention / attention.sum(dim=1, keepdim=True))
            importances.append(tuple(sums.tolist()))
        return importances
