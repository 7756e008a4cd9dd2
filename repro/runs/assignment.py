"""Which run a worker makes next, and what becomes of the runs of one that is lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack

from repro.runs.cell import BASIS
from repro.runs.experiment import Experiment

MOST_LOSSES = 2
"""Workers that a run may take with it: it is tried once more, and then given up."""

Lock = Callable[[Sequence[Experiment]], ExitStack | None]
"""What unlocks a group that was locked; None for one that is not to be made."""


class _Group:
    def __init__(self, members: Sequence[Experiment], unlock: ExitStack) -> None:
        self.members = members
        self.left = deque(members)
        self.unlock = unlock


class Assignment:
    """A worker makes the runs of a group one by one, and then another group. Workers are known by a number.

    A worker that finds no group more joins another one in the largest. A unit, which is a group with a lock, is made whole by one
    worker, and again where that is lost: its runs belong to one sitting of one machine.
    """

    def __init__(self, groups: Iterable[Sequence[Experiment]], lock: Lock | None = None) -> None:
        """``lock`` is of units."""
        self._waiting = deque(groups)
        self._lock = lock
        self._groups: dict[int, _Group] = {}
        self._losses: Counter[str] = Counter()

    @property
    def is_left(self) -> bool:
        """Whether there is something that nobody has taken."""
        return bool(self._waiting) or any(group.left for group in self._groups.values())

    def take(self, worker: int) -> Experiment | None:
        """Its next run; None where there is none for it."""
        group = self._groups.pop(worker, None)
        if group is not None and not group.left:
            group.unlock.close()
            group = None
        group = group or self._next() or self._largest()
        if group is None:
            return None
        self._groups[worker] = group
        return group.left.popleft()

    def _next(self) -> _Group | None:
        while self._waiting:
            members = self._waiting.popleft()
            unlock = ExitStack() if self._lock is None else self._lock(members)
            if unlock is not None:
                return _Group(members, unlock)
        return None

    def _largest(self) -> _Group | None:
        shared = [group for group in self._groups.values() if group.left and self._lock is None]
        return max(shared, key=lambda group: len(group.left), default=None)

    def lost(self, worker: int, culprit: Experiment) -> list[Experiment]:
        """The worker is gone while it made the culprit. What was its will be taken again, but for the runs that are
        returned, which are given up."""
        group = self._groups.pop(worker)
        group.unlock.close()
        self._losses[culprit.cell.key] += 1
        is_given_up = self._losses[culprit.cell.key] == MOST_LOSSES
        if self._lock is not None:
            if is_given_up:
                return [culprit, *group.left]
            self._waiting.appendleft(group.members)
            return []
        again = [] if is_given_up else [culprit]
        if group not in self._groups.values():
            again += group.left
        if again:
            self._waiting.appendleft(again)
        return [culprit] if is_given_up else []

    def close(self) -> None:
        """Unlock every unit."""
        while self._groups:
            self._groups.popitem()[1].unlock.close()


def by_repeats(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Groups of the repeats of a cell, whose seeds differ, and so their requests: what a deployment finds out before it runs
    (AMPD's search simulates a dozen runs), its process keeps for the next."""
    groups: dict[Hashable, list[Experiment]] = {}
    for experiment in experiments:
        cell = experiment.cell
        knobs = tuple(knob for knob in cell.knobs if knob[0] != BASIS)
        repeated = (cell.system, cell.dataset, cell.platform, cell.executor, cell.rate, knobs)
        groups.setdefault(repeated, []).append(experiment)
    return list(groups.values())
