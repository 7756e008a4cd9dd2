"""Graphs of prefill steps: which shapes to capture, the grid of LAPS §3.1, a ladder of packed sizes and what a memory budget leaves of
them; and which captured one a step replays, if any, as a last stage behind any batching policy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engines.errors import require
from engines.policies.step import FALLBACK, Batching, Bucket, Chunk, Rung, Situation, StepMode, StepPlan, StepTimes

Graphs = Literal["none", "nearest", "cheapest", "ladder"]
"""nearest: the covering bucket, whatever it costs. cheapest: only where predicted faster. ladder: packed sizes, ditto."""
LENGTHS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID: tuple[Bucket, ...] = tuple(Bucket(length, batch) for length in LENGTHS for batch in BATCHES)
"""All 42 shapes."""

LADDER: tuple[Rung, ...] = tuple(
    Rung(tokens) for tokens in (*range(16, 257, 16), *range(320, 1025, 64), *range(1152, 2049, 128))
)
"""Packed sizes, finer where a padded token costs a larger share."""

GRAPH_MB = {"Qwen2.5-7B": 228, "Qwen2.5-14B": 240, "Qwen2.5-32B": 277}
"""Memory of one captured prefill graph as the paper prints it (LAPS §4.2)."""


def graph_bytes(model: str, num_layers: int) -> int:
    """Memory of one graph: the paper's number, else a line through its 7B and 32B."""
    megabytes = GRAPH_MB.get(model)
    return round((190 + 1.36 * num_layers) * 1e6) if megabytes is None else megabytes * 10**6


def shapes_of(
    graphs: Graphs, budget_bytes: int | None = None, bytes_per_graph: int = 240 * 10**6
) -> tuple[Bucket | Rung, ...]:
    """What to capture for a way to choose: what a budget of graph memory holds (None: all), those of fewest tokens first, as only
    they are bound by launches.

    Of equal size the deeper one is kept: it also serves shorter batches of its length. All rungs share one pool, in which the
    largest bounds the memory of each.
    """
    require(bytes_per_graph > 0, f"bytes_per_graph={bytes_per_graph} must be above 0")
    require(budget_bytes is None or budget_bytes >= 0, f"budget_bytes={budget_bytes} must not be negative")
    if graphs == "none":
        return ()
    shapes = LADDER if graphs == "ladder" else sorted(GRID, key=lambda shape: (shape.tokens, -shape.batch))
    return tuple(shapes if budget_bytes is None else shapes[: budget_bytes // bytes_per_graph])


class GraphChoice(Protocol):
    def choose(self, chunks: Sequence[Chunk]) -> StepMode: ...


class Nearest:
    """The smallest captured (L, B) that covers the step: whatever it costs (LAPS §3.1 as printed), or by ``times`` only where it is
    predicted to be faster than the standard kernels."""

    def __init__(self, captured: Iterable[Bucket], times: StepTimes | None = None) -> None:
        shapes, self._times = tuple(captured), times
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
        row = bisect_left(self.lengths, max(chunk.tokens for chunk in chunks))
        column = bisect_left(self.batches, len(chunks))
        if row == len(self.lengths) or column == len(self.batches):
            return FALLBACK
        bucket, times = self._cover[row][column], self._times
        if bucket is None:
            return FALLBACK
        return bucket if times is None else _faster(bucket, times, chunks)


class Ladder:
    """The next rung where it is predicted to be faster than the standard kernels."""

    def __init__(self, captured: Iterable[Rung], times: StepTimes) -> None:
        self._rungs, self._times = sorted(captured), times

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        index = bisect_left(self._rungs, Rung(sum(chunk.tokens for chunk in chunks)))
        if index == len(self._rungs):
            return FALLBACK
        return _faster(self._rungs[index], self._times, chunks)


def _faster(graph: Bucket | Rung, times: StepTimes, chunks: Sequence[Chunk]) -> StepMode:
    """The graph, where it is predicted to be faster than the standard kernels."""
    return graph if times.step_s(chunks, 0, 0, graph) < times.step_s(chunks, 0, 0, FALLBACK) else FALLBACK


def graph_choice(graphs: Graphs, times: StepTimes, captured: tuple[Bucket | Rung, ...]) -> GraphChoice | None:
    if graphs == "none":
        return None
    buckets = [shape for shape in captured if isinstance(shape, Bucket)]
    rungs = [shape for shape in captured if isinstance(shape, Rung)]
    if graphs == "ladder":
        return Ladder(rungs, times)
    return Nearest(buckets, None if graphs == "nearest" else times)


@dataclass(frozen=True, slots=True)
class WithGraphs:
    """A batching policy whose steps replay graphs where ``choice`` says so; without one there are none."""

    batching: Batching
    choice: GraphChoice | None

    def next_step(self, at: Situation, now: float) -> StepPlan:
        plan = self.batching.next_step(at, now)
        if self.choice is None or not plan.shares or (at.decoding and plan.decodes):
            return plan
        require(plan.mode is None, f"mode={plan.mode!r}: the policy has already chosen one")
        chunks = [Chunk(task.history + task.computed, tokens) for task, tokens in plan.shares]
        return StepPlan(plan.shares, plan.decodes, plan.wake_s, self.choice.choose(chunks))
