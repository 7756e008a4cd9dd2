"""A prefill-only instance of the simulated cluster: one step after the other, as its batching policy plans them."""

from __future__ import annotations

import sys
from math import fsum
from typing import Protocol

from engines.ar.cluster.events import EventLoop
from engines.laps.controller import Signals
from engines.laps.record import StepRow, mode_label
from engines.named import asked
from engines.policies.instances import LengthClass
from engines.policies.owed import Owed
from engines.policies.queue import OpenQueue, PrefillQueue
from engines.policies.step import Batching, Chunk, Situation, StepPlan, StepTimes, padded_tokens
from engines.policies.task import PrefillTask


class Host(Protocol):
    """What an instance tells the run it is part of."""

    loop: EventLoop
    owed: Owed

    def cached_tokens(self, task: PrefillTask, instance: int) -> int: ...

    def started(self, task: PrefillTask, instance: int, now: float) -> None: ...

    def finished(self, task: PrefillTask, instance: int) -> bool:
        """Whether it missed its deadline."""
        ...


class PrefillInstance:
    """Satisfies ``InstanceView``."""

    def __init__(
        self,
        host: Host,
        *,
        worker_id: int,
        cost: StepTimes,
        queue: PrefillQueue,
        batching: Batching,
        boundary: int,
        pool: LengthClass | None = None,
        pulls: bool = False,
    ) -> None:
        """``pulls``: its queue is shared, and requests become its own when it starts them."""
        self.worker_id, self.queue, self.pool = worker_id, queue, pool
        self.is_busy = False
        self.begun: list[PrefillTask] = []
        self.steps: list[StepRow] = []
        self.num_finished = 0
        self.num_requests = 0
        self.backlog_tokens = 0
        self._host, self._loop = host, host.loop
        self._cost, self._batching, self._boundary, self._pulls = cost, batching, boundary, pulls
        self._version = 0
        self._step_start_s = 0.0
        self._step_end_s = 0.0
        self._busy_s = 0.0
        self._finished_late: list[bool] = []
        self._signals_s = 0.0
        self._busy_before_s = 0.0

    # ---- what others see -----------------------------------------------------------------------------

    def cached_tokens(self, task: PrefillTask) -> int:
        return self._host.cached_tokens(task, self.worker_id)

    def busy_until(self, now: float) -> float:
        """Busy time so far; the step in progress counts up to ``now``."""
        return self._busy_s + (min(now, self._step_end_s) - self._step_start_s if self.is_busy else 0.0)

    def signals(self, now: float, num_sharing: int) -> Signals:
        """Since the call before. A queue that ``num_sharing`` instances pull from counts for each in part."""
        busy_s, late = self.busy_until(now), self._finished_late
        passed_s = now - self._signals_s
        utilisation = (busy_s - self._busy_before_s) / passed_s if passed_s > 0 else 0.0
        backlog_s = self.queue.backlog_s / num_sharing
        backlog_s += fsum(task.estimate_s * task.left / task.tokens for task in self.begun)
        found = Signals(backlog_s, sum(late) / len(late) if late else 0.0, utilisation)
        self._finished_late, self._signals_s, self._busy_before_s = [], now, busy_s
        return found

    # ---- events -----------------------------------------------------------------------------------------

    def add(self, task: PrefillTask) -> None:
        """Put a request into this instance's own queue."""
        self._own(task)
        asked(self.queue.push, task)
        if not self.is_busy:
            self.poke()

    def withdraw(self, task: PrefillTask) -> None:
        """Give a queued request away."""
        assert isinstance(self.queue, OpenQueue)
        self.queue.pull(task)
        self.num_requests -= 1
        self.backlog_tokens -= task.tokens

    def _own(self, task: PrefillTask) -> None:
        self.num_requests += 1
        self.backlog_tokens += task.tokens

    def poke(self) -> None:
        """Something may have changed: plan a step if none runs."""
        if self.is_busy:
            return
        self._version += 1
        now = self._loop.now
        plan = asked(self._batching.next_step, Situation(self.queue, self.begun, 0, sys.maxsize, _needs_none), now)
        self._host.owed.check(plan, self._batching)
        if plan.shares:
            self._start(plan)
        elif plan.wake_s is not None:
            self._loop.at(max(plan.wake_s, now), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version == self._version:
            self._host.owed.woken()
            self.poke()

    def _start(self, plan: StepPlan) -> None:
        now, boundary, started, worker_id = self._loop.now, self._boundary, self._host.started, self.worker_id
        chunks = []
        tokens = num_short = 0
        self._host.owed.run(plan.shares, worker_id)
        left = {task.task_id: task for task in self.begun}
        for task, share in plan.shares:
            computed = task.computed
            chunks.append(Chunk(task.history + computed, share))
            computed += share
            if computed == share:
                if self._pulls:
                    self._own(task)
                started(task, worker_id, now)
                if computed < task.tokens:
                    left[task.task_id] = task
            elif computed == task.tokens:
                del left[task.task_id]
            task.computed = computed
            tokens += share
            num_short += task.tokens < boundary
        self.begun = list(left.values())
        duration_s = self._cost.step_s(chunks, 0, 0, plan.mode)
        self.is_busy = True
        self._step_start_s, self._step_end_s = now, now + duration_s
        row = StepRow(
            self.worker_id,
            now,
            duration_s,
            tokens,
            padded_tokens(chunks, plan.mode),
            num_short,
            len(chunks) - num_short,
            0,
            mode_label(plan.mode),
        )
        self._loop.at(self._step_end_s, self._finish, plan, row)

    def _finish(self, plan: StepPlan, row: StepRow) -> None:
        self._busy_s += row.duration_s
        self.is_busy = False
        finished = [task for task, _ in plan.shares if task.computed == task.tokens]
        row.num_finished = len(finished)
        self.steps.append(row)
        self.num_finished += len(finished)
        self.num_requests -= len(finished)
        self.backlog_tokens -= row.tokens
        for task in finished:
            self._finished_late.append(self._host.finished(task, self.worker_id))
        self.poke()


def _needs_none(task: PrefillTask) -> int:
    return 0
