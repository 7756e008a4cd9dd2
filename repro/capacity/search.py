"""The search: plans that bounds leave are raced at rates of a lattice, (1 + resolution) to whole powers.

Whether a plan serves a rate is asked of simulations with the same sessions, in the same pattern of arrivals, at every rate and on every
plan, and is taken to be monotone in the rate. Then a plan that fails one step above the best so far cannot be better, which takes one
simulation of one seed in most cases, and only plans that pass are searched further. How far a run is from its limits says where to look
next, which is exact of the load; the answer does not hang on it. The end of each bracket is simulated with all seeds.
"""

import math
from bisect import bisect_left
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
"""Steps below a failure within which a search need not ask first whether anything is served at all, nor of another plan."""
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
        return round(math.log(min(max(rate, LEAST_RATE), MOST_RATE)) / math.log1p(self.resolution))

    def last(self, most: float) -> int:
        step = self.step(most)
        while self.rate(step) > most:
            step -= 1
        return step

    def steps(self, ratio: float) -> float:
        """About so many lie between rates of which one is ``ratio`` times the other."""
        if ratio == 0:
            return -math.inf
        return math.log(ratio) / math.log1p(self.resolution)

    def ends(self, start: float) -> tuple[int, int]:
        """The steps that a search from about this rate looks at."""
        return self.step(max(HOPELESS * start, LEAST_RATE)), self.step(MOST_RATE)


Margin = Callable[[P, int, bool], float]
"""About how many steps higher a plan serves too; negative where it does not serve this one. Of all seeds, or of the first alone."""


class LeastPlan(NamedTuple, Generic[P]):
    plan: P
    step: int
    """It serves the rate of this step, and not that of the next."""
    is_monotone: bool


def climb(margin: Callable[[int], float], start: int, ends: tuple[int, int]) -> int | None:
    """The step that is served where the next is not, near ``start``: where margins put it until it is passed, at strides that double,
    then between the two that are known. The last of ``ends`` where it is served, None where the first is not, which is asked for
    once ``NEAR`` steps down have failed."""
    lowest, highest = ends
    low, high = lowest - 1, highest + 1
    known: dict[int, float] = {}
    at, num_moves = min(max(start, lowest), highest), 0
    while high - low > 1:
        width = high - low if low in known and high in known else math.inf
        known[at] = found = margin(at)
        low, high = (at, high) if found >= 0 else (low, at)
        if low in known and high in known:
            at = (low + high) // 2 if 2 * (high - low) > width else _crossing(low, high, known)
        else:
            stride = 2 ** max(0, num_moves - 1)
            num_moves += 1
            # No further than there is: margins may be infinite.
            far = math.floor(min(max(found, lowest - highest), highest - lowest))
            if found >= 0:
                at += max(stride, far)
            else:
                at = lowest if stride >= NEAR else at + min(-stride, far)
        at = min(max(at, low + 1), high - 1)
    return None if low < lowest else low


def _crossing(low: int, high: int, known: Mapping[int, float]) -> int:
    """The last step that is served, were margins between the two on a line."""
    above, below = known[low], known[high]
    if not math.isfinite(above - below):
        return (low + high) // 2
    return low + math.floor((high - low) * above / (above - below))


def largest(
    plans: Sequence[P], most: Callable[[P], float], margin: Margin[P], lattice: Lattice, start: float
) -> LeastPlan[P] | None:
    """The plan that serves the largest rate; the first of equals. ``most`` is a rate that no run of a plan exceeds, ``start`` where
    it is looked for first. None where no plan serves any rate."""
    (lowest, highest), begin = lattice.ends(start), lattice.step(start)
    # Rates above a plan's own bound need no simulation.
    lasts = {plan: min(highest, lattice.last(most(plan))) for plan in plans}
    lasts = {plan: last for plan, last in lasts.items() if last >= lowest}

    def of_one(plan: P, step: int) -> float:
        return margin(plan, step, False)

    def of_all(plan: P, step: int) -> float:
        return margin(plan, step, True)

    best = _raced(lasts, begin, lowest, None, of_one)
    if best is not None:
        # Of all seeds it may be a little less, or more, whatever margins say, and what lost to it of one seed be more.
        plan, near = best
        step = climb(lambda at: min(max(of_all(plan, at), -1.0), 1.0), near, (lowest, lasts[plan]))
        best = None if step is None else (plan, step)
    best = _raced(lasts, begin, lowest, best, of_all)
    if best is None:
        return None
    plan, step = best
    below = lattice.step(GUARD * lattice.rate(step))
    return LeastPlan(plan, step, below < lowest or of_one(plan, below) >= 0)


def _raced(
    lasts: Mapping[P, int], start: int, lowest: int, best: tuple[P, int] | None, margin: Callable[[P, int], float]
) -> tuple[P, int] | None:
    """The best so far, or a plan that serves a step more, or stands before it and serves as much. ``lasts`` are the steps of plans
    above which they serve nothing."""
    known, is_before = None if best is None else best[0], True
    for plan, last in lasts.items():
        if plan is known:
            is_before = False
            continue
        above = start if best is None else best[1] + (0 if is_before else 1)
        if best is not None and (above > last or margin(plan, above) < 0):
            continue
        step = climb(partial(margin, plan), above, (lowest, last))
        if step is not None:
            best, is_before = (plan, step), False
    return best


def fewest(sizes: Sequence[int], serving: Callable[[int], P | None]) -> tuple[int, P] | None:
    """The smallest of ``sizes``, in rising order, that something serves, and what: by halving, the sizes below it taken to be too
    small and the next smaller one asked. None where the largest has nothing."""
    found: dict[int, P | None] = {}

    def is_served(place: int) -> bool:
        found[place] = serving(sizes[place])
        return found[place] is not None

    last = len(sizes) - 1
    if not sizes or not is_served(last):
        return None
    place = bisect_left(range(last), True, key=is_served)
    plan = found[place]
    assert plan is not None
    return sizes[place], plan
