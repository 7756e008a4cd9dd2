"""What routing and ordering policies see: a prefill that waits, the objectives, and the queue it waits in (AMPD §3, §6).

How a queue is ordered, and whether a task may leave out of turn, is a policy: a subclass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from engines.knobs import Checked, Range

TaskKind = Literal["initial", "incremental", "recompute"]
"""recompute: the K/V of a decoding sequence was given up for lack of memory and is built again."""


@dataclass(slots=True)
class PrefillTask:
    task_id: int
    session_id: int
    order: int
    """Rank of the session by arrival; the lower is the older."""
    round_index: int
    kind: TaskKind
    history: int
    """l_hist: tokens whose K/V the decode worker holds, as far as the router knows."""
    tokens: int
    """l_incr: tokens to prefill."""
    ready_s: float
    """When the round could have started; TTFT counts from here."""
    enqueued_s: float = 0.0
    """T_enq of AMPD eq. (4)."""
    estimate_s: float = 0.0
    """t_pre of AMPD eqs. (1)-(3): the performance model's time on the worker it is queued at."""
    postponed: int = 0
    """Times it was overtaken by reordering (AMPD §4.2)."""
    computed: int = 0
    """Tokens prefilled in chunks so far."""

    @property
    def left(self) -> int:
        return self.tokens - self.computed


NO_OBJECTIVE_S = 1e6
"""All the time that an objective may allow: what policies know of one that is absent."""


@dataclass(frozen=True, kw_only=True)
class Slo(Checked):
    """What a service is held to."""

    ttft_s: Annotated[float, Range(above=0)]
    itl_s: Annotated[float, Range(above=0)]


@dataclass(slots=True, eq=False)
class PrefillQueue:
    """First come, first served."""

    backlog_s: float = 0.0
    """Sum of the estimates of the waiting tasks: the queuing time of AMPD eqs. (1) and (2)."""
    backlog_tokens: int = 0
    _tasks: deque[PrefillTask] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._tasks)

    def push(self, task: PrefillTask) -> None:
        self._tasks.append(task)
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        """The task ``take`` would return; changes nothing."""
        return self._tasks[0]

    def take(self, now: float) -> PrefillTask:
        """Remove the next task. ``now`` is when it can start."""
        return self._taken(self._tasks.popleft())

    def _count(self, task: PrefillTask) -> None:
        self.backlog_s += task.estimate_s
        self.backlog_tokens += task.tokens

    def _taken(self, task: PrefillTask) -> PrefillTask:
        self.backlog_tokens -= task.tokens
        # An empty queue sheds the rounding of the sums before.
        self.backlog_s = self.backlog_s - task.estimate_s if len(self) else 0.0
        return task


@dataclass(slots=True, eq=False)
class OpenQueue(PrefillQueue):
    """First come, first served; any task can be taken out of turn."""

    _waiting: dict[int, PrefillTask] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._waiting.values())

    def push(self, task: PrefillTask) -> None:
        self._waiting[task.task_id] = task
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        return next(iter(self._waiting.values()))

    def take(self, now: float) -> PrefillTask:
        return self.pull(self.peek(now))

    def pull(self, task: PrefillTask) -> PrefillTask:
        """Remove this very task."""
        del self._waiting[task.task_id]
        return self._taken(task)
