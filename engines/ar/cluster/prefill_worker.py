"""A worker that only prefills: history in, increment out.

The next step is chosen when the current one begins to compute, so that its history is read meanwhile
(AMPD §6); what arrives in between waits for the step after. Without that overlap the read delays the step.
"""

from __future__ import annotations

import sys
from math import fsum

from engines.ar.cluster.hub import Hub
from engines.ar.cluster.record import WorkerRow
from engines.ar.cost import StepCost
from engines.ar.window import WINDOW_S, Window
from engines.named import asked
from engines.policies.queue import PrefillQueue
from engines.policies.step import Batching, Chunk, Share, Situation, StepPlan
from engines.policies.task import PrefillTask


class PrefillWorker:
    def __init__(
        self,
        hub: Hub,
        *,
        worker_id: int,
        degree: int,
        cost: StepCost,
        queue: PrefillQueue,
        batching: Batching,
        server: int = 0,
        overlaps: bool = True,
        window_s: float = WINDOW_S,
    ) -> None:
        self.worker_id, self.degree, self.server = worker_id, degree, server
        self.queue = queue
        self.busy_total_s = 0.0
        self.num_prefills = 0
        self.prefilled_tokens = 0
        self._hub, self._loop = hub, hub.loop
        self._cost, self._batching, self._overlaps = cost, batching, overlaps
        self._ttft = Window(window_s)
        self._begun: list[PrefillTask] = []
        self._staged: tuple[StepPlan, float] | None = None
        self._staged_s = 0.0
        self._is_busy = False
        self._running: tuple[float, float, int] = (0.0, 0.0, 0)
        self._end_s = 0.0
        self._version = 0

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """What is chosen to run next has not begun: it still counts as queued."""
        return self.queue.backlog_s + self._staged_s

    @property
    def backlog_tokens(self) -> int:
        staged = sum(share.tokens for share in self._staged[0].shares) if self._staged else 0
        return self.queue.backlog_tokens + staged + (self._running[2] if self._is_busy else 0)

    def busy_s(self, now: float) -> float:
        start_s, estimate_s, _ = self._running
        return max(0.0, start_s + estimate_s - now) if self._is_busy else 0.0

    def oldest_wait_s(self, now: float) -> float:
        oldest = self.queue.oldest_ready_s()
        return 0.0 if oldest is None else now - oldest

    def windowed_ttft_s(self, now: float) -> float:
        return self._ttft.mean(now)

    def row(self) -> WorkerRow:
        return WorkerRow(
            self.worker_id,
            "prefill",
            self.degree,
            self.server,
            busy_prefill_s=self.busy_total_s,
            num_prefills=self.num_prefills,
            prefilled_tokens=self.prefilled_tokens,
        )

    # ---- events ------------------------------------------------------------------------------------

    def enqueue(self, task: PrefillTask) -> None:
        asked(self.queue.push, task)
        if not self._is_busy:
            self._begin()
        elif self._staged is None and self._overlaps:
            self._stage()

    def record_ttft(self, now: float, ttft_s: float) -> None:
        self._ttft.add(now, ttft_s)

    def _begin(self) -> None:
        self._version += 1
        plan, ready_s = self._next_step(self._loop.now)
        if plan.shares:
            self._is_busy = True
            self._start_at(plan, ready_s)
        elif plan.wake_s is not None:
            self._loop.at(max(plan.wake_s, self._loop.now), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version == self._version and not self._is_busy:
            self._hub.owed.woken()
            self._begin()

    def _stage(self) -> None:
        """Choose the next step now, as of when it can start, and have its history read."""
        plan, ready_s = self._next_step(max(self._end_s, self._loop.now))
        if plan.shares:
            self._staged = plan, ready_s
            self._staged_s = fsum(share.task.estimate_s for share in plan.shares)

    def _next_step(self, start_s: float) -> tuple[StepPlan, float]:
        """The step and the time all history it needs is here."""
        at = Situation(self.queue, self._begun, 0, sys.maxsize, _needs_none)
        plan = asked(self._batching.next_step, at, start_s)
        self._hub.owed.check(plan, self._batching)
        ready_s = self._loop.now
        shares = []
        for task, tokens in plan.shares:
            if task.computed == 0 and task.history > 0:
                missing, ready_s = self._hub.read_history(task, self, ready_s)
                if missing:
                    tokens += missing if tokens == task.tokens else 0
                    task.history -= missing
                    task.tokens += missing
                    self._hub.owed.more(task, missing)
            shares.append(Share(task, tokens))
        return plan._replace(shares=shares), ready_s

    def _start_at(self, plan: StepPlan, ready_s: float) -> None:
        if ready_s > self._loop.now:
            self._end_s = ready_s
            self._loop.at(ready_s, self._start, plan)
        else:
            self._start(plan)

    def _start(self, plan: StepPlan) -> None:
        now = self._loop.now
        chunks = []
        tokens = 0
        estimate_s = 0.0
        self._hub.owed.run(plan.shares, self.worker_id)
        for task, share in plan.shares:
            if task.computed == 0:
                self._hub.task_started(task, now)
                self._begun.append(task)
            chunks.append(Chunk(task.history + task.computed, share))
            task.computed += share
            tokens += share
            estimate_s += task.estimate_s
        self._begun = [task for task in self._begun if task.left]
        duration = self._cost.step_s(chunks, 0, 0, plan.mode)
        self._running = now, estimate_s, tokens
        self._end_s = now + duration
        self.busy_total_s += duration
        self.prefilled_tokens += tokens
        self._loop.at(self._end_s, self._finish, plan)
        if self._overlaps and self._staged is None and (self.queue or self._begun):
            self._stage()

    def _finish(self, plan: StepPlan) -> None:
        for task, _ in plan.shares:
            if task.left == 0:
                self.num_prefills += 1
                self._hub.prefilled(task, self.worker_id)
        if self._staged is not None:
            (staged, ready_s), self._staged, self._staged_s = self._staged, None, 0.0
            self._start_at(staged, ready_s)
        else:
            self._is_busy = False
            self._begin()


def _needs_none(task: PrefillTask) -> int:
    return 0
