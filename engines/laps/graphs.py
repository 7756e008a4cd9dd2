"""Which captured graph a step replays, if any (LAPS §3.1, NearestGraph), as a last stage behind any batching policy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from engines.errors import require
from engines.policies.step import FALLBACK, Batching, Bucket, Chunk, Rung, Situation, StepMode, StepPlan, StepTimes


class GraphChoice(Protocol):
    def choose(self, chunks: Sequence[Chunk]) -> StepMode: ...


class Nearest:
    """The smallest captured (L, B) that covers the step, whatever it costs (LAPS §3.1 as printed)."""

    def __init__(self, captured: Iterable[Bucket]) -> None:
        shapes = tuple(captured)
        self.lengths = sorted({shape.length for shape in shapes})
        self.batches = sorted({shape.batch for shape in shapes})
        # cover[i][j]: fewest tokens among the shapes at least as long as lengths[i] and as deep as batches[j].
        self._cover = [
            [
                min(
                    (shape for shape in shapes if shape.length >= length and shape.batch >= batch),
                    key=lambda shape: (shape.tokens, shape.length),
                    default=None,
                )
                for batch in self.batches
            ]
            for length in self.lengths
        ]

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        return self.cover(chunks) or FALLBACK

    def cover(self, chunks: Sequence[Chunk]) -> Bucket | None:
        row = bisect_left(self.lengths, max(chunk.tokens for chunk in chunks))
        column = bisect_left(self.batches, len(chunks))
        if row == len(self.lengths) or column == len(self.batches):
            return None
        return self._cover[row][column]


class Cheapest:
    """The nearest graph where it is predicted to be faster than the standard kernels."""

    def __init__(self, captured: Iterable[Bucket], times: StepTimes) -> None:
        self._nearest, self._times = Nearest(captured), times

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        bucket = self._nearest.cover(chunks)
        return FALLBACK if bucket is None else _faster(self._times, chunks, bucket)


class Ladder:
    """The next rung where it is predicted to be faster than the standard kernels."""

    def __init__(self, captured: Iterable[Rung], times: StepTimes) -> None:
        self._rungs, self._times = sorted(captured), times

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        index = bisect_left(self._rungs, Rung(sum(chunk.tokens for chunk in chunks)))
        return FALLBACK if index == len(self._rungs) else _faster(self._times, chunks, self._rungs[index])


def _faster(times: StepTimes, chunks: Sequence[Chunk], graph: Bucket | Rung) -> StepMode:
    return graph if times.step_s(chunks, 0, 0, graph) < times.step_s(chunks, 0, 0, FALLBACK) else FALLBACK


class WithGraphs:
    """A batching policy whose steps replay graphs where ``choice`` says so."""

    def __init__(self, batching: Batching, choice: GraphChoice) -> None:
        self.batching, self.choice = batching, choice

    def next_step(self, at: Situation, now: float) -> StepPlan:
        plan = self.batching.next_step(at, now)
        if not plan.shares or (at.decoding and plan.decodes):
            return plan
        require(plan.mode is None, f"mode={plan.mode!r}: the policy has already chosen one")
        chunks = [Chunk(task.history + task.computed, tokens) for task, tokens in plan.shares]
        return StepPlan(plan.shares, plan.decodes, plan.wake_s, self.choice.choose(chunks))
