"""Which run a worker makes next, and what becomes of the runs of one that is lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from repro.runs.cell import BASIS
from repro.runs.experiment import Experiment

MOST_LOSSES = 2
"""Workers that a run may take with it: it is tried once more, and then given up."""

Lock = Callable[[Sequence[Experiment]], ExitStack | None]
"""What unlocks a group that was locked; None for one that is not to be made."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    members: Sequence[Experiment]
    left: deque[Experiment]
    locked: ExitStack


class Assignment:
    """A worker makes the runs of a group one by one, and then another group. Workers are known by a number.

    Groups of repeats may be divided: a worker that finds none takes half of the longest. A unit is made whole by one worker, and
    again where that is lost: its runs belong to one sitting of one machine.
    """

    def __init__(self, groups: Iterable[Sequence[Experiment]], lock: Lock | None = None) -> None:
        """``lock`` is of units; groups without one may be divided."""
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
        if worker in self._groups and not self._groups[worker].left:
            self._groups.pop(worker).locked.close()
        if worker not in self._groups and not (self._begin(worker) or self._divide(worker)):
            return None
        return self._groups[worker].left.popleft()

    def _begin(self, worker: int) -> bool:
        while self._waiting:
            members = self._waiting.popleft()
            locked = ExitStack() if self._lock is None else self._lock(members)
            if locked is not None:
                self._groups[worker] = _Group(members=members, left=deque(members), locked=locked)
                return True
        return False

    def _divide(self, worker: int) -> bool:
        longest = max((group.left for group in self._groups.values()), key=len, default=None)
        if self._lock is not None or not longest:
            return False
        half = [longest.pop() for _ in range((len(longest) + 1) // 2)][::-1]
        self._groups[worker] = _Group(members=half, left=deque(half), locked=ExitStack())
        return True

    def lost(self, worker: int, culprit: Experiment) -> list[Experiment]:
        """The worker is gone while it made the culprit. What was its will be taken again, but for the runs that are
        returned, which are given up."""
        group = self._groups.pop(worker)
        group.locked.close()
        name = culprit.cell.key if self._lock is None else group.members[0].cell.key
        self._losses[name] += 1
        is_given_up = self._losses[name] == MOST_LOSSES
        if self._lock is None:
            if again := [*([] if is_given_up else [culprit]), *group.left]:
                self._waiting.appendleft(again)
            return [culprit] if is_given_up else []
        if is_given_up:
            return [culprit, *group.left]
        self._waiting.appendleft(group.members)
        return []

    def close(self) -> None:
        """Unlock every unit."""
        while self._groups:
            self._groups.popitem()[1].locked.close()


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
