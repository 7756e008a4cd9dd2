"""A worker that only prefills: history in, increment out.

The next step is chosen when the current one begins to compute, so that its history is read meanwhile
(AMPD §6); what arrives in between waits for the step after. Without that overlap the read delays the step.
"""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, NamedTuple, Unpack

from engines.ar.cluster.worker import Parts, Worker
from engines.ar.window import WINDOW_S, Window
from engines.policies.step import Share, StepPlan

if TYPE_CHECKING:
    from engines.ar.cluster.simulation import Simulation


class _Staged(NamedTuple):
    plan: StepPlan
    ready_s: float
    """When its history is here."""
    estimate_s: float


class PrefillWorker(Worker):
    def __init__(
        self, hub: Simulation, *, overlaps: bool = True, window_s: float = WINDOW_S, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(hub, **parts)
        self._hub, self._overlaps = hub, overlaps
        self.ttft = Window(window_s)
        """TTFT of the prefills that it ran."""
        self._staged: _Staged | None = None
        """The step after this one."""

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """What is chosen to run next has not begun: it still counts as queued."""
        return self.queue.backlog_s + (self._staged.estimate_s if self._staged else 0.0)

    @property
    def backlog_tokens(self) -> int:
        staged = sum(share.tokens for share in self._staged.plan.shares) if self._staged else 0
        return super().backlog_tokens + staged

    def windowed_ttft_s(self, now: float) -> float:
        return self.ttft.mean(now)

    def poke(self) -> None:
        if self.is_busy and self._staged is None and self._overlaps:
            self._stage()
        super().poke()

    # ---- steps -----------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        if self._staged is None:
            super()._boundary()
            return
        (plan, ready_s, _), self._staged = self._staged, None
        self._start(plan, ready_s)

    def _start(self, plan: StepPlan, ready_s: float | None = None) -> None:
        """``ready_s`` of a staged step is when its history is here."""
        if ready_s is None:
            plan, ready_s = self._with_history(plan)
        self.is_busy = True
        if ready_s > self._loop.now:
            self._end_s = ready_s
            self._loop.at(ready_s, self._run, plan)
        else:
            self._run(plan)

    def _stage(self) -> None:
        """Choose the next step now, as of when it can start, and have its history read."""
        plan = self._planned(max(self._end_s, self._loop.now))
        if plan.shares:
            ready, ready_s = self._with_history(plan)
            self._staged = _Staged(ready, ready_s, fsum([task.estimate_s for task, _ in ready.shares]))

    def _with_history(self, plan: StepPlan) -> tuple[StepPlan, float]:
        """The step and the time all history it needs is here; what its home has lost is prefilled again."""
        ready_s = self._loop.now
        shares = []
        for task, tokens in plan.shares:
            if task.computed == 0 and task.history > 0:
                is_whole = tokens == task.tokens
                ready_s = self._hub.read_history(task, self.worker_id, ready_s)
                tokens = task.tokens if is_whole else tokens
            shares.append(Share(task, tokens))
        return StepPlan(shares, plan.decodes, plan.wake_s, plan.mode), ready_s

    def _run(self, plan: StepPlan) -> None:
        super()._start(plan)
        if self._overlaps and self._staged is None and (self.queue or self.begun):
            self._stage()
