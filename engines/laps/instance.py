"""A prefill-only instance of the simulated cluster: a worker that logs its steps and reports its pressure."""

from __future__ import annotations

from math import fsum

from engines.ar.cluster.worker import Host, Worker
from engines.laps.controller import Signals
from engines.laps.record import InstanceRow, StepRow
from engines.policies.instances import LengthClass
from engines.policies.step import Batching, Bucket, Fallback, Rung, StepPlan, StepTimes, padded_tokens
from engines.policies.task import OpenQueue, PrefillQueue, PrefillTask


class PrefillInstance(Worker):
    """Satisfies ``InstanceView``."""

    backlog_tokens: int = 0

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
        shares_cache: bool = True,
    ) -> None:
        """``pulls``: its queue is shared, and requests become its own when it starts them."""
        super().__init__(host, worker_id=worker_id, cost=cost, queue=queue, batching=batching)
        self.pool = pool
        self.steps: list[StepRow] = []
        self.num_requests = 0
        self.late: list[bool] = []
        """For each request finished since the last signals, whether it missed its deadline."""
        self.cached: dict[int, int] | None = None if shares_cache else {}
        """Session -> tokens of K/V, where caches are apart."""
        self._boundary_tokens, self._pulls = boundary, pulls
        self._signals_s = 0.0
        self._busy_before_s = 0.0

    # ---- what others see -----------------------------------------------------------------------------

    def cached_tokens(self, task: PrefillTask) -> int:
        return task.history if self.cached is None else min(task.history, self.cached.get(task.session_id, 0))

    def busy_until(self, now: float) -> float:
        """Busy time so far; the step in progress counts up to ``now``."""
        return self._busy_s + (min(now, self._end_s) - self._start_s if self.is_busy else self._step_s)

    def signals(self, now: float, num_sharing: int) -> Signals:
        """Since the call before. A queue that ``num_sharing`` instances pull from counts for each in part."""
        busy_s, late = self.busy_until(now), self.late
        passed_s = now - self._signals_s
        utilisation = (busy_s - self._busy_before_s) / passed_s if passed_s > 0 else 0.0
        backlog_s = self.queue.backlog_s / num_sharing
        backlog_s += fsum(task.estimate_s * task.left / task.tokens for task in self.begun)
        self.late, self._signals_s, self._busy_before_s = [], now, busy_s
        return Signals(backlog_s, sum(late) / len(late) if late else 0.0, utilisation)

    def summary(self, now: float) -> InstanceRow:
        return InstanceRow(
            self.worker_id,
            self.pool,
            self.busy_until(now),
            len(self.steps),
            self.num_prefills,
            sum(step.tokens for step in self.steps),
            sum(step.padded_tokens for step in self.steps),
        )

    # ---- events -----------------------------------------------------------------------------------------

    def enqueue(self, task: PrefillTask) -> None:
        self._own(task)
        super().enqueue(task)

    def _own(self, task: PrefillTask) -> None:
        self.num_requests += 1
        self.backlog_tokens += task.tokens

    def withdraw(self, task: PrefillTask) -> None:
        """Give a queued request away."""
        assert isinstance(self.queue, OpenQueue)
        self.queue.pull(task)
        self.num_requests -= 1
        self.backlog_tokens -= task.tokens

    def _start(self, plan: StepPlan) -> None:
        if self._pulls:
            for task, _ in plan.shares:
                if task.computed == 0:
                    self._own(task)
        super()._start(plan)

    def _finish(self, plan: StepPlan) -> None:
        num_short = sum([task.tokens < self._boundary_tokens for task, _ in plan.shares])
        num_finished = sum([task.tokens == task.computed for task, _ in plan.shares])
        row = StepRow(
            self.worker_id,
            self._start_s,
            self._step_s,
            self._tokens,
            padded_tokens(self._tokens, plan.mode),
            num_short,
            len(plan.shares) - num_short,
            num_finished,
            _label(plan.mode),
        )
        self.steps.append(row)
        self.num_requests -= num_finished
        self.backlog_tokens -= self._tokens
        super()._finish(plan)


def _label(mode: object) -> str:
    """As in the steps table: "eager", "fallback", "graph 64x8" or "rung 512"."""
    if mode is None:
        return "eager"
    if isinstance(mode, Fallback):
        return "fallback"
    if isinstance(mode, Bucket):
        return f"graph {mode.length}x{mode.batch}"
    if isinstance(mode, Rung):
        return f"rung {mode.tokens}"
    return str(mode)
