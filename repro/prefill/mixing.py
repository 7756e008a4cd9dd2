"""The mixing penalty: is a step that holds short and long prompts slower than its parts?

LAPS's throughput gains at high concurrency need a penalty of 0.20 to 0.25; a roofline gives none or less. Two readings,
both from rounds in which all steps are timed one behind the other, so that a slow moment of the machine hits all alike:

    kappa_sum   T(mixed) / (T(long) + T(shorts)) - 1                what running the classes apart would cost or gain
    kappa_work  T(mixed) / (T(long) + T(shorts) - T(1 token)) - 1   the same with the fixed cost of a step counted once,
                                                                    as in a mixed step: interference alone

Exclusive steps pay where kappa_sum is above 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from engines.ar.torch.measured import MeasuredSteps
from engines.errors import require

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Mix:
    """One long prompt and ``shorts`` short ones in a step."""

    long: int
    short: int
    shorts: int

    @property
    def parts(self) -> list[tuple[int, int]]:
        return [(0, self.long), *self.short_parts]

    @property
    def short_parts(self) -> list[tuple[int, int]]:
        return [(0, self.short)] * self.shorts


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Measured: medians over ``rounds`` rounds; intervals are 95 % bootstrap intervals of the median."""

    long: int
    short: int
    shorts: int
    mixed_s: float
    long_s: float
    shorts_s: float
    floor_s: float
    kappa_sum: float
    kappa_sum_low: float
    kappa_sum_high: float
    kappa_work: float
    kappa_work_low: float
    kappa_work_high: float
    noise: float
    """Half the 95 % interval of T(long) against itself, first repeat to second: what no effect looks like."""
    rounds: int


def mixes(longs: Sequence[int], shorts: Sequence[int], numbers: Sequence[int]) -> tuple[Mix, ...]:
    return tuple(Mix(long=long, short=short, shorts=number) for long, short, number in product(longs, shorts, numbers))


def penalties(steps: MeasuredSteps, asked: Sequence[Mix], *, rounds: int, seed: int = 0) -> Iterator[Penalty]:
    """One row after the other, as they are measured; the order of the steps is drawn anew in every round."""
    require(rounds >= 2, f"rounds={rounds} must be at least 2 for an interval")
    random = np.random.default_rng(seed)
    for mix in asked:
        kinds = {
            "mixed": mix.parts,
            "long": [(0, mix.long)],
            "shorts": mix.short_parts,
            "floor": [(0, 1)],
            "again": [(0, mix.long)],
        }
        for parts in kinds.values():
            steps.timed(parts)
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name in random.permutation(list(kinds)):
                taken[name].append(steps.timed(kinds[name])[0])
        times = {name: np.array(values) for name, values in taken.items()}
        apart = times["long"] + times["shorts"]
        by_sum = interval(times["mixed"] / apart - 1, random)
        by_work = interval(times["mixed"] / (apart - times["floor"]) - 1, random)
        idle = interval(times["again"] / times["long"] - 1, random)
        yield Penalty(
            long=mix.long,
            short=mix.short,
            shorts=mix.shorts,
            mixed_s=float(np.median(times["mixed"])),
            long_s=float(np.median(times["long"])),
            shorts_s=float(np.median(times["shorts"])),
            floor_s=float(np.median(times["floor"])),
            kappa_sum=by_sum[0],
            kappa_sum_low=by_sum[1],
            kappa_sum_high=by_sum[2],
            kappa_work=by_work[0],
            kappa_work_low=by_work[1],
            kappa_work_high=by_work[2],
            noise=(idle[2] - idle[1]) / 2,
            rounds=rounds,
        )


def interval(values: np.ndarray, random: np.random.Generator) -> tuple[float, float, float]:
    """The median, and its percentile bootstrap interval."""
    draws = np.median(random.choice(values, size=(RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(np.median(values)), float(low), float(high)
