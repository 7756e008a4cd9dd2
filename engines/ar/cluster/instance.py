"""A worker that decodes, and prefills locally: a decode worker of a disaggregated system, or a co-located one.

Between two steps it takes in what arrived, asks its batching policy for the next step, and runs that.
Where the policy names no prefill, the decode batch runs until something interrupts it.
"""

from __future__ import annotations

import sys
from math import fsum

from engines.ar.cluster.decode_batch import DecodeBatch, Run
from engines.ar.cluster.hub import Hub
from engines.ar.cluster.live import Live
from engines.ar.cluster.record import WorkerRow
from engines.ar.cost import StepCost
from engines.ar.kv import KvPool
from engines.ar.window import WINDOW_S, TokenWindow
from engines.named import asked
from engines.policies.queue import PrefillQueue
from engines.policies.step import IDLE, Batching, Chunk, Share, Situation, StepPlan
from engines.policies.task import PrefillTask


class Instance:
    def __init__(
        self,
        hub: Hub,
        *,
        worker_id: int,
        degree: int,
        cost: StepCost,
        queue: PrefillQueue,
        batching: Batching,
        kv_capacity: int,
        server: int = 0,
        keep_s: float = 0.0,
        window_s: float = WINDOW_S,
        max_run_steps: int = sys.maxsize,
    ) -> None:
        """``keep_s`` protects a session's K/V from eviction that long after each round (Continuum's time-to-live)."""
        self.worker_id, self.degree, self.server = worker_id, degree, server
        self.queue = queue
        self.kv, self.kv_capacity = KvPool(kv_capacity), kv_capacity
        self.batch = DecodeBatch()
        self.num_sessions = 0
        self.busy_prefill_s = 0.0
        """Steps with a prefill in them."""
        self.busy_decode_s = 0.0
        self.num_prefills = 0
        self.prefilled_tokens = 0
        self.num_preemptions = 0
        self._hub, self._loop = hub, hub.loop
        self._cost, self._batching = cost, batching
        self._keep_s, self._max_run_steps = keep_s, max_run_steps
        self._itl = TokenWindow(window_s)
        self._begun: list[PrefillTask] = []
        self._landed: list[tuple[Live, int]] = []
        self._run: Run | None = None
        """The decode run in progress."""
        self._is_stepping = False
        """Whether a step with prefills is in progress, or the worker is between steps."""
        self._running: tuple[float, float, int] = (0.0, 0.0, 0)
        self._version = 0

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        return self.queue.backlog_s

    @property
    def backlog_tokens(self) -> int:
        return self.queue.backlog_tokens + (self._running[2] if self._is_stepping else 0)

    @property
    def kv_tokens(self) -> int:
        run = self._run
        ahead = run.steps - run.steps_by(self._loop.now) if run is not None else 0
        return self.kv.used - ahead * self.batch.size

    def busy_s(self, now: float) -> float:
        start_s, estimate_s, _ = self._running
        return max(0.0, start_s + estimate_s - now) if self._is_stepping else 0.0

    def oldest_wait_s(self, now: float) -> float:
        oldest = self.queue.oldest_ready_s()
        return 0.0 if oldest is None else now - oldest

    def windowed_itl_s(self, now: float) -> float:
        run = self._run
        done = run.steps_by(now) if run is not None else 0
        if run is None or done == 0:
            return self._itl.mean(now)
        return self._itl.mean(now, self.batch.token_runs(run._replace(steps=done)))

    def token_age_s(self, now: float) -> float:
        if not self.batch.size:
            return 0.0
        run = self._run
        done = run.steps_by(now) if run is not None else 0
        return now - (run.start_s + run.after_s(done) if run is not None and done else self.batch.token_s)

    @property
    def log(self) -> tuple[list[float], list[int]]:
        return self.batch.gaps, self.batch.counts

    def row(self) -> WorkerRow:
        return WorkerRow(
            self.worker_id,
            "decode",
            self.degree,
            self.server,
            self.busy_prefill_s,
            self.busy_decode_s,
            self.num_prefills,
            self.prefilled_tokens,
            self.kv_capacity,
            self.kv.peak,
            self.kv.evicted,
            self.num_preemptions,
        )

    # ---- what the hub tells it ---------------------------------------------------------------------

    def bind(self, live: Live) -> None:
        self.num_sessions += 1

    def enqueue(self, task: PrefillTask) -> None:
        asked(self.queue.push, task)
        self._interrupt()

    def lend(self, live: Live) -> int:
        live.lent = self.kv.resume(live.order)
        return live.lent

    def land(self, live: Live, tokens: int) -> None:
        if live.left:
            self._landed.append((live, tokens))
            self._interrupt()
        else:
            self._land_complete(live, tokens)

    def end(self, live: Live) -> None:
        self.num_sessions -= 1
        self.kv.drop(live.order)

    # ---- between steps ------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        if self._run is not None:
            run = self._run.cut_at(self._loop.now)
            if run.steps < self._run.steps:
                self.kv.release((self._run.steps - run.steps) * self.batch.size)
                self._schedule_run(run)
        elif not self._is_stepping:
            self._boundary()

    def _boundary(self) -> None:
        """Start what comes next; called between steps only."""
        now = self._loop.now
        self._is_stepping = True  # what happens below interrupts nothing
        self._version += 1
        self._running = now, 0.0, 0
        while True:
            if self._landed:
                for live, tokens in self._landed:
                    self._join_landed(live, tokens)
                self._landed.clear()
            plan = IDLE
            if self.queue or self._begun:
                plan = asked(self._batching.next_step, self._situation(now), now)
                self._hub.owed.check(plan, self._batching)
            if plan.shares:
                self._begin_step(plan)
                return
            if not self.batch.size:
                break
            steps = self._reserve(min(self.batch.next_finish(), self._max_run_steps))
            if steps:
                self._schedule_run(self.batch.run(now, steps, self._cost.decode_line(self.batch.size)), steps)
                break
        self._is_stepping = False
        if plan.wake_s is not None:
            self._loop.at(max(plan.wake_s, now), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version == self._version:
            self._hub.owed.woken()
            self._interrupt()

    def _situation(self, now: float) -> Situation:
        if self.batch.size or self._begun:
            room, need_of = self.kv.free + self.kv.evictable(now), self._need
        else:
            room, need_of = self.kv.capacity - self.kv.held, _whole_need  # nothing runs: protected prefixes may go
        return Situation(self.queue, self._begun, self.batch.size, room, need_of)

    def _need(self, task: PrefillTask) -> int:
        """A prefix that counts as evictable is part of the room: the task takes it from there."""
        return _whole_need(task) - self.kv.protected(task.order, self._loop.now)

    # ---- steps with prefills --------------------------------------------------------------------------

    def _begin_step(self, plan: StepPlan) -> None:
        now = self._loop.now
        shares = [self._admitted(share, now) for share in plan.shares]
        self._hub.owed.run(shares, self.worker_id)
        decoding = self.batch.size if plan.decodes and self._reserve(1) else 0
        chunks = []
        tokens = 0
        for task, share in shares:
            chunks.append(Chunk(task.history + task.computed, share))
            if task.computed == 0:
                self._begun.append(task)
            task.computed += share
            tokens += share
        self._begun = [task for task in self._begun if task.left]
        duration = self._cost.step_s(chunks, decoding, self.batch.context if decoding else 0, plan.mode)
        self.busy_prefill_s += duration
        self.prefilled_tokens += tokens
        self._running = now, fsum(task.estimate_s for task, _ in shares), tokens
        self._loop.at(now + duration, self._end_step, shares, Run(now, duration, 0.0, 1) if decoding else None)

    def _admitted(self, share: Share, now: float) -> Share:
        """Take the K/V of a task that begins; what the cache has lost of its history is prefilled again."""
        task, tokens = share
        if task.computed:
            return share
        self._hub.task_started(task, now)
        is_whole = tokens == task.tokens
        missing = task.history - self.kv.resume(task.order)
        task.history -= missing
        task.tokens += missing
        self._hub.owed.more(task, missing)
        need = task.tokens + 1
        self.kv.make_room(need, now, force=True)
        self.kv.hold(need)
        return Share(task, task.tokens if is_whole else tokens)

    def _end_step(self, shares: list[Share], decoded: Run | None) -> None:
        if decoded is not None:
            self._advance(decoded)
        for task, _ in shares:
            if task.left == 0:
                self.num_prefills += 1
                self._join(self._hub.prefilled(task, self.worker_id))
        self._boundary()

    # ---- decoding ---------------------------------------------------------------------------------------

    def _join(self, live: Live) -> None:
        """``live`` has a new token and holds its K/V."""
        if live.left:
            self.batch.join(live)
        else:
            self._round_done(live)

    def _join_landed(self, live: Live, tokens: int) -> None:
        """Its K/V needs room: idle prefixes go first, then younger sequences, then it gives up its own."""
        now = self._loop.now
        need = tokens + 1
        while not self.kv.make_room(need, now, force=True):
            if self.batch.size and self.batch.youngest().order > live.order:
                self._preempt(self.batch.youngest())
            else:
                self.kv.release(live.lent)
                live.lent = 0
                self.num_preemptions += 1
                self._hub.preempted(live)
                return
        self.kv.hold(need)
        live.lent = 0
        self._join(live)

    def _land_complete(self, live: Live, tokens: int) -> None:
        """A round of one token never joins the batch: its K/V is cached if there is room."""
        if self.kv.make_room(tokens + 1, self._loop.now, force=True):
            self.kv.hold(tokens + 1)
            self._round_done(live)
        else:
            self.kv.release(live.lent)
            self._hub.round_done(live)
        live.lent = 0

    def _reserve(self, steps: int) -> int:
        """Take K/V for up to ``steps`` steps of the batch, at least one, preempting the youngest where it must.

        0 where that left no batch.
        """
        now = self._loop.now
        while self.batch.size:
            size = self.batch.size
            if self.kv.make_room(steps * size, now) or self.kv.make_room(size, now, force=True):
                steps = min(steps, self.kv.free // size)
                self.kv.hold(steps * size)
                return steps
            self._preempt(self.batch.youngest())
        return 0

    def _schedule_run(self, run: Run, reserved: int | None = None) -> None:
        """``reserved`` steps hold K/V; a run that is cut by its cost line gives back the rest."""
        if reserved is not None and reserved > run.steps:
            self.kv.release((reserved - run.steps) * self.batch.size)
        self._run = run
        self._version += 1
        self._loop.at(run.end_s, self._end_run, self._version)

    def _end_run(self, version: int) -> None:
        if version != self._version or self._run is None:
            return
        run, self._run = self._run, None
        self._is_stepping = True
        self.busy_decode_s += self._loop.now - run.start_s
        self._advance(run)
        self._boundary()

    def _advance(self, run: Run) -> None:
        self._itl.extend(self.batch.advance(run, self._loop.now))
        for live in self.batch.finished():
            self._leave(live)
            self._round_done(live)

    def _leave(self, live: Live) -> None:
        stay = self.batch.leave(live)
        if stay is not None:
            self._hub.stayed(self.worker_id, stay)

    def _round_done(self, live: Live) -> None:
        if self._hub.round_done(live):
            self.kv.park(live.order, live.context, self._loop.now + self._keep_s)
        else:
            self.kv.release(live.context)

    def _preempt(self, live: Live) -> None:
        """Recompute later: the sequence's K/V is dropped (vLLM's preemption)."""
        self.num_preemptions += 1
        self._leave(live)
        self.kv.release(live.context)
        self._hub.preempted(live)


def _whole_need(task: PrefillTask) -> int:
    return task.history + task.tokens + 1
