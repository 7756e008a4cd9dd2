"""The search: plans that bounds leave are raced at rates of a lattice, (1 + resolution) to whole powers.

Whether a plan serves a rate is asked of simulations with the same sessions, in the same pattern of arrivals, at every rate and on every
plan, and is taken to be monotone in the rate. Then a plan that fails one step above the best so far cannot be better, which takes one
simulation of one seed in most cases, and only plans that pass are searched further, by doubling and halving steps. The end of each
bracket is simulated with all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")
LEAST_RATE, MOST_RATE = 1e-4, 1e6
"""Requests/s that are looked at."""
HOPELESS = 0.01
"""Share of the rate where a search begins: a plan that does not serve so much less, at which hardly anything waits, serves nothing."""
NEAR = 4
"""Steps below a failure within which a search need not ask first whether anything is served at all."""
GUARD = 0.8
"""Share of the rate that was found: a plan that does not serve so much less is not monotone, which is said."""


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Rates a step apart: ``resolution`` 0.05 makes each 1.05 times the last."""

    resolution: float

    def rate(self, step: int) -> float:
        """Four digits, so that what is printed is what was simulated."""
        return float(f"{(1 + self.resolution) ** step:.4g}")

    def step(self, rate: float) -> int:
        """Step of the rate nearest to it."""
        return round(math.log(min(max(rate, LEAST_RATE), MOST_RATE)) / math.log1p(self.resolution))

    def last(self, most: float) -> int:
        """The last step whose rate is not above ``most``."""
        step = self.step(most)
        while self.rate(step) > most:
            step -= 1
        return step

    def ends(self, start: float) -> tuple[int, int]:
        """The steps that a search from about this rate looks at."""
        return self.step(max(HOPELESS * start, LEAST_RATE)), self.step(MOST_RATE)


Serves = Callable[[P, int, bool], bool]
"""Whether a plan serves the rate of a step; of all seeds, or of the first alone."""


class Found(NamedTuple, Generic[P]):
    plan: P
    step: int
    """It serves the rate of this step, and not that of the next."""
    is_monotone: bool


def climb(serves: Callable[[int], bool], start: int, ends: tuple[int, int]) -> int | None:
    """The step that is served where the next is not, near ``start``: steps are doubled until they pass it, then halved. The last
    of ``ends`` where it is served, None where the first is not, which is asked for once ``NEAR`` steps down have failed."""
    lowest, highest = ends
    if highest < lowest:
        return None
    low = high = min(max(start, lowest), highest)
    stride = 1
    if serves(low):
        while high == low:
            if low == highest:
                return low
            high = min(low + stride, highest)
            if serves(high):
                low, stride = high, 2 * stride
    else:
        is_hopeful = False
        while high == low:
            if high == lowest or (stride > NEAR and not is_hopeful and not serves(lowest)):
                return None
            is_hopeful = is_hopeful or stride > NEAR
            low = max(high - stride, lowest)
            if not (is_hopeful and low == lowest) and not serves(low):
                high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        if serves(middle):
            low = middle
        else:
            high = middle
    return low


def largest(
    plans: Sequence[P], most: Callable[[P], float], serves: Serves[P], lattice: Lattice, start: float
) -> Found[P] | None:
    """The plan that serves the largest rate; the first of equals. ``most`` is a rate that no run of a plan exceeds, ``start`` where
    it is looked for first. None where no plan serves any rate."""
    ends, begin = lattice.ends(start), lattice.step(start)
    # Rates above a plan's own bound need no simulation.
    lasts = {plan: min(ends[1], lattice.last(most(plan))) for plan in plans}
    race = partial(_raced, lasts, begin, ends[0])
    best = race(None, partial(_asked, serves, False))
    if best is not None:
        # Of all seeds it may be less, and what lost to it of one seed be more.
        plan, near = best
        step = climb(lambda at: serves(plan, at, True), near, (ends[0], lasts[plan]))
        best = None if step is None else (plan, step)
    best = race(best, partial(_asked, serves, True))
    if best is None:
        return None
    plan, step = best
    below = lattice.step(GUARD * lattice.rate(step))
    return Found(plan, step, below < ends[0] or serves(plan, below, False))


def _asked(serves: Serves[P], is_whole: bool, plan: P, step: int) -> bool:
    return serves(plan, step, is_whole)


def _raced(
    lasts: Mapping[P, int], start: int, lowest: int, best: tuple[P, int] | None, serves: Callable[[P, int], bool]
) -> tuple[P, int] | None:
    """The best so far, or a plan that serves a step more. ``lasts`` are the steps of plans above which they serve nothing."""
    for plan, last in lasts.items():
        above = start if best is None else best[1] + 1
        if best is not None and (plan is best[0] or above > last or not serves(plan, above)):
            continue
        step = climb(partial(serves, plan), above, (lowest, last))
        if step is not None:
            best = plan, step
    return best


def fewest(sizes: Sequence[int], serving: Callable[[int], P | None]) -> tuple[int, P] | None:
    """The smallest of ``sizes``, in rising order, that something serves, and what: by halving, the sizes below it taken to be too
    small and the next smaller one asked. None where the largest has nothing."""
    if not sizes:
        return None
    found: dict[int, P | None] = {}

    def at(place: int) -> P | None:
        if place not in found:
            found[place] = serving(sizes[place])
        return found[place]

    low, high = -1, len(sizes) - 1
    if at(high) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle) is None:
            low = middle
        else:
            high = middle
    plan = at(high)
    assert plan is not None
    return sizes[high], plan
