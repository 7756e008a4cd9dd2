"""Workers that only prefill: with the history of the decode worker, or with a prefix cache of their own."""

from __future__ import annotations

from math import fsum
from typing import Unpack

from engines.ar.cluster.worker import Hub, Parts, Worker
from engines.ar.kv import KvPool
from engines.ar.window import WINDOW_S, Window
from engines.policies.step import Share, Situation, StepPlan
from engines.policies.task import PrefillTask


class PrefillWorker(Worker):
    """A worker that only prefills: history in, increment out.

    The next step is chosen when the current one begins to compute, so that its history is read meanwhile
    (AMPD §6); what arrives in between waits for the step after. Without that overlap the read delays the step.
    """

    def __init__(self, hub: Hub, *, overlaps: bool = True, window_s: float = WINDOW_S, **parts: Unpack[Parts]) -> None:
        super().__init__(hub, **parts)
        self._hub, self._overlaps = hub, overlaps
        self.ttft = Window(window_s)
        """TTFT of the prefills that it ran."""
        self.windowed_ttft_s = self.ttft.mean
        self._next: StepPlan | None = None
        """The step after this one."""
        self._ready_s = 0.0
        """When the history of the step that was planned last is here."""

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """What is chosen to run next has not begun: it still counts as queued."""
        chosen = fsum([task.estimate_s for task, _ in self._next.shares]) if self._next else 0.0
        return self.queue.backlog_s + chosen

    @property
    def backlog_tokens(self) -> int:
        chosen = sum(share.tokens for share in self._next.shares) if self._next else 0
        return super().backlog_tokens + chosen

    def cached_tokens(self, order: int) -> int:
        """None: what it has read and computed is the decode worker's alone."""
        return 0

    # ---- steps -----------------------------------------------------------------------------------------

    def poke(self) -> None:
        """While a step runs, the next one is chosen, as of when it can start."""
        if self.is_busy and self._overlaps and self._next is None and (self.queue or self.begun):
            plan = self._planned(max(self._end_s, self._loop.now))
            self._next = plan if plan.shares else None
        super().poke()

    def _planned(self, start_s: float) -> StepPlan:
        """What was chosen before, or is now: then all history that it needs is read from now on, and what its home has lost is
        prefilled again."""
        if self._next is not None:
            plan, self._next = self._next, None
            return plan
        plan = super()._planned(start_s)
        self._ready_s = self._loop.now
        if not plan.shares:
            return plan
        return StepPlan([self._read(share) for share in plan.shares], plan.decodes, plan.wake_s, plan.mode)

    def _read(self, share: Share) -> Share:
        task, tokens = share
        if task.computed or task.history <= 0:
            return share
        is_whole = tokens == task.tokens
        self._ready_s = self._hub.read_history(task, self.worker_id, self._ready_s)
        return Share(task, task.tokens) if is_whole else share

    def _start(self, plan: StepPlan, ready_s: float | None = None) -> None:
        """When its history is here, which is at ``ready_s``: while this one waits, the next may be planned."""
        ready_s = self._ready_s if ready_s is None else ready_s
        self.is_busy = True
        if ready_s > self._loop.now:
            self._end_s = ready_s
            self._loop.at(ready_s, self._start, plan, ready_s)
        else:
            super()._start(plan)
            self.poke()


class CachingPrefillWorker(PrefillWorker):
    """A prefill worker with a prefix cache of its own, which reads nothing from decode workers (vLLM's, behind Dynamo).

    It keeps the K/V of all it prefilled: the prompts of a session, and the answers that it computed again. It prefills the rest of
    a history with the increment: answers that were decoded elsewhere, and what was evicted.
    """

    kv: KvPool

    def __init__(self, hub: Hub, *, kv_capacity: int, window_s: float = WINDOW_S, **parts: Unpack[Parts]) -> None:
        super().__init__(hub, overlaps=False, window_s=window_s, **parts)
        self.kv, self.kv_capacity = KvPool(kv_capacity), kv_capacity

    def cached_tokens(self, order: int) -> int:
        return self.kv.cached(order)

    def sent(self, task: PrefillTask) -> None:
        """The home has the K/V: it may be evicted here, the least recently used session's first."""
        self.kv.park(task.order, task.history + task.tokens)
        self.poke()

    def _situation(self, start_s: float) -> Situation:
        return Situation(self.queue, self.begun, 0, self.kv.capacity - self.kv.held, _need)

    def _read(self, share: Share) -> Share:
        """From its own memory: what is missing is prefilled again, and what it has of a recomputation's tokens is not."""
        task, tokens = share
        if task.computed:
            return share
        is_whole = tokens == task.tokens
        self._hub.owed.more(task, task.history - self.kv.resume(task.order))
        self.kv.make_room(task.tokens, self._loop.now)
        self.kv.hold(task.tokens)
        return Share(task, task.tokens if is_whole else min(tokens, task.tokens))


def _need(task: PrefillTask) -> int:
    return task.history + task.tokens
