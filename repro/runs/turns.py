"""Which run a worker makes next, and what becomes of the runs of one that is lost."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from repro.runs.cell import BASIS
from repro.runs.experiment import Experiment

MOST_LOSSES = 2
"""Workers that a run may be known to have taken with it: it is tried once more, and then given up."""


class Turns(Protocol):
    """Runs are named by their place in a list, workers by a number."""

    @property
    def is_left(self) -> bool:
        """Whether there is something that nobody has taken."""

    def take(self, worker: int) -> int | None:
        """Its next run; None where there is none for it."""

    def lost(self, worker: int, numbers: Sequence[int], culprit: int | None) -> list[int]:
        """The worker is gone, and with it these, of which it was making the ``culprit``, where that can be told. They will
        be taken again, but for those that are given up."""


class KinTurns:
    """A worker takes the first run that is kin to those it had, or, up to its share of all kins, to none that anyone had.
    One with nothing left takes over what has most left to do."""

    def __init__(self, kins: Iterable[Hashable], num_workers: int) -> None:
        # As numbers, which are looked up for every run that is left whenever one is taken.
        known: dict[Hashable, int] = {}
        self._kins = [known.setdefault(kin, len(known)) for kin in kins]
        self._left = dict(enumerate(self._kins))
        self._owner: dict[int, int] = {}
        self._share = math.ceil(len(known) / num_workers)
        self._losses: Counter[int] = Counter()

    @property
    def is_left(self) -> bool:
        return bool(self._left)

    def take(self, worker: int) -> int | None:
        if not self._left:
            return None
        may_begin = sum(owner == worker for owner in self._owner.values()) < self._share
        nobody = worker if may_begin else None
        number = next((n for n, kin in self._left.items() if self._owner.get(kin, nobody) == worker), None)
        if number is None:
            ((kin, _),) = Counter(self._left.values()).most_common(1)
            number = next(n for n, other in self._left.items() if other == kin)
        self._owner[self._left.pop(number)] = worker
        return number

    def lost(self, worker: int, numbers: Sequence[int], culprit: int | None) -> list[int]:
        given_up = []
        if culprit is not None:
            self._losses[culprit] += 1
            if self._losses[culprit] == MOST_LOSSES:
                given_up.append(culprit)
        again = {number: self._kins[number] for number in numbers if number not in given_up}
        self._left = {**again, **self._left}
        return given_up


class UnitTurns:
    """A worker takes the runs of a unit one by one, each when the one before is done, and then another unit. A unit whose
    worker is lost is made again, whole: its runs belong to one session of one machine."""

    def __init__(self, units: Iterable[Sequence[int]], claim: Callable[[Sequence[int]], ExitStack | None]) -> None:
        """``claim`` gives what ends the claim on a unit; None for one that is not to be made."""
        self._left = deque(tuple(unit) for unit in units)
        self._claim = claim
        self._current: dict[int, tuple[tuple[int, ...], deque[int], ExitStack]] = {}
        self._losses: Counter[tuple[int, ...]] = Counter()

    @property
    def is_left(self) -> bool:
        return bool(self._left) or any(waiting for _, waiting, _ in self._current.values())

    def take(self, worker: int) -> int | None:
        if worker in self._current:
            _, waiting, claim = self._current[worker]
            if waiting:
                return waiting.popleft()
            del self._current[worker]
            claim.close()
        while self._left:
            unit = self._left.popleft()
            if (claimed := self._claim(unit)) is not None:
                self._current[worker] = unit, deque(unit[1:]), claimed
                return unit[0]
        return None

    def lost(self, worker: int, numbers: Sequence[int], culprit: int | None) -> list[int]:
        if worker not in self._current:
            return []
        unit, waiting, claim = self._current.pop(worker)
        claim.close()
        if culprit is not None:
            self._losses[unit] += 1
        if self._losses[unit] == MOST_LOSSES:
            return [*numbers, *waiting]
        self._left.appendleft(unit)
        return []

    def close(self) -> None:
        """Give up every claim."""
        while self._current:
            self._current.popitem()[1][2].close()


def repeated(experiment: Experiment) -> Hashable:
    """What the repeats of a cell share, whose seeds differ, and so their requests: what a deployment finds out before it
    runs (AMPD's search simulates a dozen runs), it keeps for the next."""
    cell = experiment.cell
    return replace(cell, figure=None, seed=0, knobs=tuple(knob for knob in cell.knobs if knob[0] != BASIS))
