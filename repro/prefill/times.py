"""Times of single steps by prompt length L, batch B and history H, eager and in a captured shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from engines.ar.torch.measured import MeasuredSteps
from engines.policies.step import Bucket, Rung

WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Measured: seconds of a step of ``batch`` prompts of ``length`` tokens over ``history`` each."""

    length: int
    batch: int
    history: int
    mode: str
    """'eager', 'bucket LxB' or 'rung N'."""
    min_s: float
    median_s: float
    p90_s: float
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    length: int
    batch: int = 1
    history: int = 0
    mode: Bucket | Rung | None = None

    @property
    def mode_name(self) -> str:
        if self.mode is None:
            return "eager"
        if isinstance(self.mode, Bucket):
            return f"bucket {self.mode.length}x{self.mode.batch}"
        return f"rung {self.mode.tokens}"


def step_shapes(
    lengths: Sequence[int], batches: Iterable[tuple[int, int]], histories: Sequence[int]
) -> tuple[Shape, ...]:
    """Lone prompts of every length over every history, and ``batches`` (prompts, tokens of each) of equal ones."""
    lone = [Shape(length=length, history=history) for history, length in product(histories, lengths)]
    return (*lone, *(Shape(length=length, batch=batch) for batch, length in batches))


def step_times(steps: MeasuredSteps, shapes: Sequence[Shape], *, repeats: int) -> Iterator[StepTime]:
    """One row after the other, as they are measured."""
    for shape in shapes:
        parts = [(shape.history, shape.length)] * shape.batch
        for _ in range(WARMUP):
            steps.timed(parts, shape.mode)
        times = np.array([steps.timed(parts, shape.mode)[0] for _ in range(repeats)])
        yield StepTime(
            length=shape.length,
            batch=shape.batch,
            history=shape.history,
            mode=shape.mode_name,
            min_s=float(times.min()),
            median_s=float(np.median(times)),
            p90_s=float(np.quantile(times, 0.9)),
            repeats=repeats,
        )
