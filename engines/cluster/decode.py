"""A worker that decodes, and prefills locally: a decode worker of a disaggregated system, or a co-located one.

Between two steps it takes in arrivals, asks its batching policy for the next step, and runs that. If the policy plans no prefill, the
decode batch runs, one token a step, until something interrupts it. While its members stay the same, such steps are no events: a run of
them is charged at once. Each member leaves at a known step. From its second token on, its gaps are those of the batch, which are
logged once.
"""

import math
import sys
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from typing import ClassVar, NamedTuple, Unpack

from engines.cluster.record import Stay, TokenLog, WorkerRow
from engines.cluster.worker import WINDOW_S, Hub, Live, Parts, TokenRun, TokenWindow, Worker, WorkerKv
from engines.cost.roofline import DecodeLine
from engines.data import ask
from engines.policies.views import IDLE, Load, NextStep, PrefillTask, Situation


class Run(NamedTuple):
    """Decode steps in which no member joins or leaves. Each takes ``growth_s`` longer than the one before, as the context grows."""

    start_s: float
    first_s: float
    growth_s: float
    steps: int

    def after_s(self, steps: int) -> float:
        """Duration of the first ``steps``."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_by(self, now: float) -> int:
        """Steps that have ended by ``now``."""
        elapsed = now - self.start_s
        if self.growth_s:
            linear = self.first_s / self.growth_s - 0.5
            guess = math.floor(math.sqrt(linear * linear + 2 * elapsed / self.growth_s) - linear)
        else:
            guess = math.floor(elapsed / self.first_s)
        while guess < self.steps and self.after_s(guess + 1) <= elapsed:
            guess += 1
        while guess > 0 and self.after_s(guess) > elapsed:
            guess -= 1
        return min(guess, self.steps)

    def cut_at(self, now: float) -> "Run":
        """Return the same run up to the next token boundary: a step that has begun is finished."""
        done = self.steps_by(now)
        if done == 0 or self.start_s + self.after_s(done) < now:
            done += 1
        return Run(self.start_s, self.first_s, self.growth_s, min(done, self.steps))


@dataclass(slots=True, eq=False)
class DecodeBatch:
    size: int = 0
    steps: int = 0
    """Steps so far, over all runs."""
    context: int = 0
    """Context tokens of all members together."""
    token_s: float = 0.0
    """End of the last step."""
    log: TokenLog = field(default_factory=TokenLog)
    _members: dict[int, Live] = field(default_factory=dict)
    finish: list[tuple[int, int]] = field(default_factory=list)
    """A heap of members, by their last step."""
    _joined: list[Live] = field(default_factory=list)

    def join(self, live: Live) -> None:
        """Add ``live``, which has a newest token and at least one to come."""
        live.joined_step = self.steps
        live.finish_step = self.steps + live.left
        live.stay_start = -1
        self._members[live.order] = live
        heappush(self.finish, (live.finish_step, live.order))
        self._joined.append(live)
        self.context += live.context
        self.size += 1

    def pop_finished(self) -> list[Live]:
        """Remove and return the members that have all their tokens, by their last step, and the older first."""
        members = []
        while self.finish and self.finish[0][0] <= self.steps:
            live = self._members[heappop(self.finish)[1]]
            self.leave(live)
            members.append(live)
        return members

    def youngest(self) -> Live:
        return self._members[max(self._members)]

    def leave(self, live: Live) -> None:
        """Update the member's state and remove it from the batch."""
        del self._members[live.order]
        if live.finish_step > self.steps:
            self.finish.remove((live.finish_step, live.order))
            heapify(self.finish)
        steps = self.steps - live.joined_step
        live.context += steps
        live.left -= steps
        self.context -= live.context
        self.size -= 1
        if live.stay_start < 0:
            self._joined.remove(live)  # it had no token here
        else:
            live.token_s = self.token_s
            self.log.stays.append(Stay(live.row, live.first_gap_s, live.stay_start, len(self.log.gaps)))

    def run(self, start_s: float, steps: int, line: DecodeLine) -> Run:
        """Return a run of at most ``steps`` steps, or of fewer if the context outgrows the line's floor on the way."""
        base, slope, floor_s = line
        first_s = base + slope * self.context
        growth = slope * self.size
        if first_s >= floor_s or growth == 0:
            return Run(start_s, max(first_s, floor_s), growth if first_s >= floor_s else 0.0, steps)
        return Run(start_s, floor_s, 0.0, min(steps, math.ceil((floor_s - first_s) / growth)))

    def advance(self, run: Run, end_s: float) -> tuple[TokenRun, ...]:
        """Log the run, and return its tokens for the windowed ITL."""
        gaps, counts = self.log.gaps, self.log.counts
        runs = even_runs = self.token_runs(run, run.steps)
        if self._joined or run.start_s != self.token_s:
            first_end = run.start_s + run.first_s
            gaps.append(first_end - self.token_s)
            counts.append(1)
            for live in self._joined:
                live.first_gap_s = first_end - live.token_s
                live.stay_start = len(gaps)
            self._joined.clear()
            even_runs = runs[1:]
        for part in even_runs:
            gaps.append(part.gap_s)
            counts.append(part.steps)
        self.steps += run.steps
        self.context += run.steps * self.size
        self.token_s = end_s
        return runs

    def token_runs(self, run: Run, steps: int) -> tuple[TokenRun, ...]:
        """Return the tokens of the run's first ``steps`` for a windowed mean. The first step is apart if a member joined or the batch
        stood still: then its gap differs from the later ones, or between members."""
        first_end = run.start_s + run.first_s
        if not self._joined and run.start_s == self.token_s:
            gap_s = run.after_s(steps) / steps
            return (TokenRun(run.start_s, gap_s, steps, self.size, gap_s),)
        wait_s = (self.size - len(self._joined)) * (first_end - self.token_s)
        wait_s += math.fsum([first_end - live.token_s for live in self._joined])
        first = TokenRun(run.start_s, run.first_s, 1, self.size, wait_s / self.size)
        if steps == 1:
            return (first,)
        gap_s = (run.after_s(steps) - run.first_s) / (steps - 1)
        return first, TokenRun(first_end, gap_s, steps - 1, self.size, gap_s)


class DecodeWorker(Worker):
    role: ClassVar[str] = "decode"
    kv: WorkerKv
    kv_capacity: int

    def __init__(
        self,
        hub: Hub,
        *,
        kv_capacity: int,
        kv: WorkerKv | None = None,
        keeps: bool = True,
        keep_s: float = 0.0,
        window_s: float = WINDOW_S,
        max_run_steps: int = sys.maxsize,
        schedules_ahead: bool = False,
        **parts: Unpack[Parts],
    ) -> None:
        """``kv`` is a memory of ``kv_capacity`` tokens in which sessions share blocks. Without ``keeps`` nothing is kept after a round.
        ``keep_s`` protects a session's K/V from eviction so long after each round (Continuum's time-to-live). With ``schedules_ahead``
        the next step is planned before a request comes, which waits for the step after (vLLM's asynchronous scheduling)."""
        super().__init__(hub, **parts)
        self.kv, self.kv_capacity = kv or WorkerKv(kv_capacity), kv_capacity
        self._keeps = keeps
        self.batch = DecodeBatch()
        self.log = self.batch.log
        self.num_sessions = 0
        self._hub = hub
        self._decode_line = cache(parts["cost"].decode_line)
        self._keep_s, self._max_run_steps = keep_s, max_run_steps
        self._itl = TokenWindow(window_s)
        self._landed: list[tuple[Live, int]] = []
        self._schedules_ahead = schedules_ahead
        self._unseen: list[PrefillTask] = []
        """Tasks that came after the next step was planned."""
        self._run: Run | None = None
        """The decode run in progress, without prefills."""
        self._ran: Run | None = None
        """The decode step that runs along with the current prefills; None if the batch waits."""

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """K/V in use. Shared blocks that are idle do not count, because they fill the memory of every worker in time."""
        return self._kv_in_use + (0 if self.kv.shares else self.kv.idle)

    @property
    def _kv_in_use(self) -> int:
        run = self._run
        steps_left = run.steps - run.steps_by(self._loop.now) if run is not None else 0
        return self.kv.held - steps_left * self.batch.size

    def windowed_itl_s(self, now: float) -> float:
        run = self._run
        done = run.steps_by(now) if run is not None else 0
        if run is None or done == 0:
            return self._itl.mean(now)
        return self._itl.mean(now, self.batch.token_runs(run, done))

    def token_age_s(self, now: float) -> float:
        if not self.batch.size:
            return 0.0
        run = self._run
        done = run.steps_by(now) if run is not None else 0
        return now - (run.start_s + run.after_s(done) if run is not None and done else self.batch.token_s)

    # ---- what the hub tells it ---------------------------------------------------------------------

    def enqueue(self, task: PrefillTask) -> None:
        if self._schedules_ahead and (self.is_busy or self._run is not None):
            self._unseen.append(task)
            self.expected_tokens += task.tokens
            self.poke()
        else:
            super().enqueue(task)

    def lend(self, live: Live) -> int:
        """Hold the session's cached history for a prefill elsewhere, and return how many of its tokens were not evicted."""
        live.lent = self.kv.resume(live.order)
        return live.lent

    def land(self, live: Live, tokens: int) -> None:
        """The K/V of the ``tokens`` tokens that follow the lent history has arrived: decoding can go on."""
        if live.left:
            self._landed.append((live, tokens))
            self.poke()
        else:
            self._land_complete(live, tokens)

    # ---- between steps ------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something may have changed: end the decode run at the next token, or plan a step if none runs."""
        if self._run is None:
            super().poke()
            return
        run = self._run.cut_at(self._loop.now)
        if run.steps < self._run.steps:
            self._schedule_run(run, self._run.steps)

    def _boundary(self) -> None:
        now = self._loop.now
        self.is_busy = True  # so that nothing below pokes the worker into a new step
        self._version += 1
        self._start_s, self._shares, self._tokens = now, (), 0
        while True:
            if self._landed:
                for live, tokens in self._landed:
                    self._join_landed(live, tokens)
                self._landed.clear()
            plan = self._plan(now) if self.queue or self.begun else IDLE
            if plan.shares:
                self._start(plan)
                self._queue_unseen()
                return
            if not self.batch.size and not self._unseen:
                break
            if not self.batch.size:
                self._queue_unseen()
                continue
            max_steps = 1 if self._unseen else self._max_run_steps
            steps = self._reserve(min(self.batch.finish[0][0] - self.batch.steps, max_steps))
            if steps:
                self._schedule_run(self.batch.run(now, steps, self._decode_line(self.batch.size)), steps)
                break
        self._queue_unseen()
        self.is_busy = False
        self._wait(plan)

    def _queue_unseen(self) -> None:
        """Queue the tasks that came meanwhile, so that the next plan can hold them."""
        unseen, self._unseen = self._unseen, []
        for task in unseen:
            self.expected_tokens -= task.tokens
            ask(self.queue.push, task)
            self._recount(task)

    def _situation(self, start_s: float) -> Situation:
        if self.batch.size or self.begun:
            room, need_of = self.kv.free + self.kv.evictable(start_s), self._need
        else:
            # Nothing runs: protected prefixes may go.
            room, need_of = self.kv.capacity - self.kv.held, self._need if self.kv.shares else _whole_need
        return Situation(self.queue, self.begun, self.batch.size, room, need_of)

    def _need(self, task: PrefillTask) -> int:
        """Tokens that a task takes of the room. The room contains the task's own prefix if that is evictable, so it counts."""
        self._recount(task)
        return _whole_need(task) - self.kv.protected(task.order, self._loop.now)

    # ---- steps with prefills --------------------------------------------------------------------------

    def _start(self, plan: NextStep) -> None:
        shares = [self._hold(share, spare=1, force=True) for share in plan.shares]
        plan = NextStep(shares, plan.decodes, plan.wake_s, plan.mode)
        self._decoding = self.batch.size if plan.decodes and self._reserve(1) else 0
        self._context = self.batch.context if self._decoding else 0
        super()._start(plan)
        self._ran = Run(self._start_s, self._step_s, 0.0, 1) if self._decoding else None

    def _finish(self, plan: NextStep) -> None:
        if self._ran is not None:
            self._book_run(self._ran)
        super()._finish(plan)

    # ---- decoding ---------------------------------------------------------------------------------------

    def join(self, live: Live) -> None:
        """Decode ``live`` further, which has a new token and holds its K/V, or end its round."""
        if live.left:
            self.batch.join(live)
        else:
            self._round_done(live)

    def _join_landed(self, live: Live, tokens: int) -> None:
        """Make room for K/V that landed: idle prefixes go first, then younger sequences. If both do not suffice, preempt ``live``."""
        now = self._loop.now
        need = tokens + 1
        while not self.kv.make_room(need, now, force=True):
            if self.batch.size and self.batch.youngest().order > live.order:
                self._preempt(self.batch.youngest())
            else:
                self.kv.drop(live.order, live.lent)
                live.lent = 0
                self.num_preemptions += 1
                self._hub.preempted(live)
                return
        self.kv.hold(need)
        self.kv.fill(live.order, live.context - 1)
        live.lent = 0
        self.join(live)

    def _land_complete(self, live: Live, tokens: int) -> None:
        """A round of one token never joins the batch: its K/V is cached if there is room."""
        if self.kv.make_room(tokens + 1, self._loop.now, force=True):
            self.kv.hold(tokens + 1)
            self.kv.fill(live.order, live.context - 1)
            self._round_done(live)
        else:
            self.kv.drop(live.order, live.lent)
            self._hub.round_done(live)
        live.lent = 0

    def _reserve(self, steps: int) -> int:
        """Take K/V for up to ``steps`` steps of the batch, at least one, and return for how many. Preempts the youngest if it must.

        Returns 0 if that left no batch.
        """
        now, kv = self._loop.now, self.kv
        while self.batch.size:
            size = self.batch.size
            if kv.make_room(steps * size, now):
                kv.hold(steps * size)
                return steps
            if kv.make_room(size, now, force=True):
                steps = min(steps, kv.free // size)
                kv.hold(steps * size)
                return steps
            self._preempt(self.batch.youngest())
        return 0

    def _schedule_run(self, run: Run, reserved: int) -> None:
        """Schedule the end of a run. K/V is held for ``reserved`` steps, and a shorter run gives back the rest."""
        if run.steps < reserved:
            self.kv.release((reserved - run.steps) * self.batch.size)
        self._run = run
        self._version += 1
        self._loop.at(run.start_s + run.after_s(run.steps), self._end_run, self._version)

    def _end_run(self, version: int) -> None:
        if version != self._version or self._run is None:
            return
        run, self._run = self._run, None
        self.busy_decode_s += self._loop.now - run.start_s
        self._book_run(run)
        self._boundary()

    def _book_run(self, ran: Run) -> None:
        self._itl.extend(self.batch.advance(ran, self._loop.now))
        for live in self.batch.pop_finished():
            self._round_done(live)

    def _round_done(self, live: Live) -> None:
        if self._hub.round_done(live) and self._keeps:
            self.kv.park(live.order, live.context, self._loop.now + self._keep_s)
        else:
            self.kv.drop(live.order, live.context)

    def _preempt(self, live: Live) -> None:
        """Drop the sequence's K/V, to recompute it later (vLLM's preemption)."""
        self.num_preemptions += 1
        self.batch.leave(live)
        self.kv.drop(live.order, live.context)
        self._hub.preempted(live)


def _whole_need(task: PrefillTask) -> int:
    return task.history + task.tokens + 1


@dataclass(slots=True, eq=False)
class Sink:
    """A decode worker without contention: every sequence gets its tokens at a fixed pace, and memory is unlimited.

    It serves to study the prefill side alone: prefill-only instances, queues with a closed form, planning.
    """

    hub: Hub
    worker_id: int
    degree: int = 1
    itl_s: float = 0.0
    server: int = 0
    num_sessions: int = 0
    coming_tokens: int = 0
    expected_tokens: int = 0
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    kv_tokens: int = 0
    kv_capacity: int = sys.maxsize
    log: TokenLog = field(default_factory=TokenLog)

    def busy_s(self, now: float) -> float:
        return 0.0

    def oldest_wait_s(self, now: float) -> float:
        return 0.0

    def load_with(self, order: int, tokens: int) -> Load:
        return Load(tokens, self.kv_tokens + tokens)

    def windowed_itl_s(self, now: float) -> float:
        return self.itl_s

    def token_age_s(self, now: float) -> float:
        return 0.0

    def row(self) -> WorkerRow:
        return WorkerRow(self.worker_id, "sink", self.degree, self.server)

    def cached_of(self, order: int) -> int:
        return 0

    def enqueue(self, task: PrefillTask) -> None:
        raise AssertionError("a sink prefills nothing: route every task to a prefill worker")

    def join(self, live: Live) -> None:
        raise AssertionError("a sink prefills nothing")

    def lend(self, live: Live) -> int:
        return live.context

    def land(self, live: Live, tokens: int) -> None:
        self.kv_tokens += tokens + 1
        now = self.hub.loop.now
        if live.left:
            self.hub.loop.at(now + live.left * self.itl_s, self._finish, live)
        else:
            self._finish(live)

    def _finish(self, live: Live) -> None:
        if live.left:
            live.token_s = self.hub.loop.now
            self.kv_tokens += live.left
            live.context += live.left
            gaps, counts, start = self.log.gaps, self.log.counts, len(self.log.gaps)
            if live.left > 1:
                gaps.append(self.itl_s)
                counts.append(live.left - 1)
            self.log.stays.append(Stay(live.row, self.itl_s, start, len(gaps)))
            live.left = 0
        if not self.hub.round_done(live):
            self.kv_tokens -= live.context
