"""Which waiting prefills can all be on time, which are given up so that the others are, and when one that was given up has its turn.

The most jobs that end by their due times, one after the other, are Moore's and Hodgson's (Moore, Management Science 1968;
1 || sum U_j): by due time, and where one would be late the longest so far is given up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from engines.knobs import Checked, Needs, Range
from engines.policies.views import OpenQueue, PrefillTask


@dataclass(frozen=True, kw_only=True)
class LateShare(Checked):
    """What those given up get: a share of the work that goes by arrival, once they have waited some times as long as first come,
    first served. None of it and they wait until nothing else does; all of it at once, and all go by due time."""

    share: Annotated[float, Range(0, 1)] = 0.25
    """Share of the work that goes by arrival, late or not, while one given up has waited so long; 0 forgets them."""
    patience: Annotated[float, Range(0, 1e6), Needs(share=Range(above=0))] = 2.0
    """Times its wait first come, first served, and as many objectives at least, that one given up waits before the share is paid."""

    def is_owed(self, waited_s: float, slo_s: float, first_come_s: float) -> bool:
        return waited_s >= self.patience * max(slo_s, first_come_s)

    def from_s(self, slo_s: float, first_come_s: float) -> float:
        """Seconds of waiting after which a prefill has the share paid at the latest: it is late by then, and so given up."""
        return max(slo_s, self.patience * max(slo_s, first_come_s))


_ROUNDING_S = 1e-9


def kept(works_s: Sequence[float], limits_s: Sequence[float]) -> list[bool]:
    """Say of jobs in rising order of their limits which are kept, such that the work of each and of those kept before it is
    within its limit, up to rounding, and as many as possible are. O(n log n)."""
    done_s, longest = 0.0, list[tuple[float, int]]()
    found = [True] * len(works_s)
    for index, (work_s, limit_s) in enumerate(zip(works_s, limits_s, strict=True)):
        latest_s = limit_s + _ROUNDING_S
        if work_s > latest_s and not longest:
            found[index] = False
            continue
        done_s += work_s
        # Of equals the one that came last goes.
        heapq.heappush(longest, (-work_s, -index))
        if done_s > latest_s:
            negative_s, which = heapq.heappop(longest)
            done_s += negative_s
            found[-which] = False
    return found


class Split(NamedTuple):
    kept: list[PrefillTask]
    """By due time."""
    given_up: list[PrefillTask]
    """By arrival."""

    @staticmethod
    def of(tasks: Sequence[PrefillTask], works_s: Sequence[float], limits_s: Sequence[float]) -> Split:
        flags = kept(works_s, limits_s)
        pairs = list(zip(tasks, flags, strict=True))
        return Split([task for task, is_kept in pairs if is_kept], [task for task, is_kept in pairs if not is_kept])

    def owes(self, late: LateShare, slo_s: float, first_come_s: Mapping[int, float], now: float) -> bool:
        """Whether one given up has waited long enough for the share to be paid; ``first_come_s`` is each one's wait, first come,
        first served."""
        return late.share > 0 and any(
            late.is_owed(now - task.ready_s, slo_s, first_come_s[task.task_id]) for task in self.given_up
        )


def by_arrival(task: PrefillTask) -> tuple[float, int]:
    """With one objective for all, the order of due times too."""
    return task.ready_s, task.task_id


class OnTimeQueue(OpenQueue):
    """Prefills run whole, one after the other (AMPD §3): the first by due time of those that can all be on time, or the oldest,
    as often as its share of the work is due.

    One that comes to ``A`` seconds of work, its own included, of prefills that came no later, starts and ends within

        max(objective, patience max(objective, A)) + A / share + 3 / share E

    where E is the longest prefill: by then it is given up, and one may run. Let V be the work then taken by arrival, ``A`` at most,
    and U the work of others meanwhile. ``_owed_s`` grows by share x work of these, falls by (1 - share) x work of those, and
    its sign decides whose turn it is, so it stays between -E and E, and share U <= (1 - share) V + 2 E.
    Work counts as estimated.
    """

    def __init__(self, *, ttft_s: float, late: LateShare) -> None:
        super().__init__()
        self.ttft_s, self.late = ttft_s, late
        self._peeked: tuple[float, list[PrefillTask], PrefillTask, float] | None = None
        self._owed_s = 0.0
        """Work that the oldest are owed; nothing is saved up while none of them is."""
        self._first_come_s: dict[int, float] = {}
        """Work that waited when each came, its own included."""

    def push(self, task: PrefillTask) -> None:
        super().push(task)
        self._first_come_s[task.task_id] = self.backlog_s

    def pull(self, task: PrefillTask) -> PrefillTask:
        del self._first_come_s[task.task_id]
        return super().pull(task)

    def peek(self, now: float) -> PrefillTask:
        """Not chosen again where the same was asked before."""
        waiting = list(self)
        if self._peeked is None or self._peeked[:2] != (now, waiting):
            self._peeked = now, waiting, *self._next(now)
        return self._peeked[2]

    def take(self, now: float) -> PrefillTask:
        self.peek(now)
        assert self._peeked is not None
        (_, _, task, self._owed_s), self._peeked = self._peeked, None
        for other in self:
            if other is task:
                break
            other.postponed += 1
        return self.pull(task)

    def _next(self, now: float) -> tuple[PrefillTask, float]:
        """The task, and what is owed when it is taken."""
        tasks = sorted(self, key=by_arrival)
        split, share = self._split(tasks, now, 1.0), self.late.share
        owes = split.owes(self.late, self.ttft_s, self._first_come_s, now)
        if owes and share < 1:
            # What is on time with the share paid.
            split = self._split(tasks, now, 1 - share)
        if owes and self._owed_s >= 0:
            return tasks[0], self._owed_s - (1 - share) * tasks[0].estimate_s
        if not split.kept:
            return split.given_up[0], self._owed_s
        task = split.kept[0]
        owed_s = self._owed_s + share * task.estimate_s
        return task, owed_s if owes else min(owed_s, 0.0)

    def _split(self, tasks: Sequence[PrefillTask], now: float, rate: float) -> Split:
        limits_s = [rate * (task.ready_s + self.ttft_s - now) for task in tasks]
        return Split.of(tasks, [task.estimate_s for task in tasks], limits_s)


def whole_steps_s(work_s: float, budget_s: float, overhead_s: float) -> float:
    """How long steps take that do all of the work, full ones but the last."""
    return work_s + math.ceil(work_s / budget_s - 1e-9) * overhead_s


def work_by(slacks_s: Sequence[float], *, budget_s: float, overhead_s: float, rate: float, all_s: float) -> list[float]:
    """Most work, in its order, that ends within each of the slacks: that of whole steps, as a prefill ends with its step. ``all_s``
    of work are there in all, and make the last step a shorter one."""
    whole_s = whole_steps_s(all_s, budget_s, overhead_s) if rate == 1 else math.inf
    paid_s, step_s, floor = rate * budget_s, budget_s + overhead_s, math.floor
    return [math.inf if whole_s <= slack_s else paid_s * floor(slack_s / step_s + 1e-9) for slack_s in slacks_s]
