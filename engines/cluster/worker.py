"""A worker of the simulated cluster: one step after the other, as its batching policy plans them.

``Worker`` itself only prefills, and expects the history to be in place. A prefill worker of a disaggregated cluster reads history and
plans one step ahead, or has its own prefix cache. A decode worker (``engines.cluster.decode``) decodes between its prefills.

K/V is counted in tokens. A session's K/V is *held* (it runs, or a prefill elsewhere reads it) or *idle*: the prefix cache of sessions
that wait for their environment. If room is needed, a worker evicts the idle K/V of the least recently used session first, from its
tail: the rest is still a prefix. Means are over a window (AMPD §3: 10 s by default). An empty window counts as 0: no sign of load.
"""

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import ClassVar, NamedTuple, NotRequired, Protocol, TypedDict, Unpack

from engines.cluster.hardware import StepCost
from engines.cluster.record import TokenLog, WorkerRow
from engines.cluster.sessions import EventLoop, Session
from engines.data import ask
from engines.policies.batching import ONE_BY_ONE, Owed
from engines.policies.views import (
    Batching,
    Chunk,
    DecodeView,
    Load,
    NextStep,
    PrefillQueue,
    PrefillTask,
    Share,
    Situation,
    StepTimes,
)


class Idle(NamedTuple):
    """The K/V that a waiting session left."""

    tokens: int
    keep_until_s: float


@dataclass(slots=True, eq=False)
class WorkerKv:
    shares: ClassVar[bool] = False
    """Whether sessions share the K/V of a common prefix."""
    capacity: int
    held: int = 0
    idle: int = 0
    peak: int = 0
    evicted: int = 0
    """Tokens evicted so far."""
    _idle: OrderedDict[int, Idle] = field(default_factory=OrderedDict)
    _last_keep_s: float = 0.0
    """The latest time until which any session's K/V is protected."""

    @property
    def free(self) -> int:
        return self.capacity - self.held - self.idle

    def evictable(self, now: float) -> int:
        """Idle tokens that no time-to-live protects."""
        if now >= self._last_keep_s:
            return self.idle
        return self.idle - sum(entry.tokens for entry in self._idle.values() if entry.keep_until_s > now)

    def cached(self, session: int) -> int:
        entry = self._idle.get(session)
        return entry.tokens if entry is not None else 0

    def protected(self, session: int, now: float) -> int:
        """How many of its cached tokens a time-to-live protects."""
        entry = self._idle.get(session)
        return entry.tokens if entry is not None and entry.keep_until_s > now else 0

    def hold(self, tokens: int) -> None:
        """Take free tokens; the caller has made room."""
        self.held += tokens
        used = self.held + self.idle
        if used > self.peak:
            self.peak = used

    def release(self, tokens: int) -> None:
        self.held -= tokens

    def drop(self, session: int, tokens: int) -> None:
        """The session has no more use for the tokens that it holds."""
        self.held -= tokens

    def fill(self, session: int, tokens: int) -> None:
        """The first ``tokens`` of the session are computed."""

    def park(self, session: int, tokens: int, keep_until_s: float = 0.0) -> None:
        """Held tokens become the session's idle prefix, protected until ``keep_until_s``."""
        self.held -= tokens
        self.idle += tokens
        self._idle[session] = Idle(tokens, keep_until_s)
        self._last_keep_s = max(self._last_keep_s, keep_until_s)

    def resume(self, session: int) -> int:
        """Hold the session's idle prefix again, and return how many tokens of it were not evicted."""
        entry = self._idle.pop(session, None)
        if entry is None:
            return 0
        self.idle -= entry.tokens
        self.held += entry.tokens
        return entry.tokens

    def make_room(self, tokens: int, now: float, *, force: bool = False) -> bool:
        """Evict until ``tokens`` are free, and return whether they are. With ``force`` protected prefixes go too, after all others."""
        missing = tokens - self.free
        if missing > 0:
            missing = self._evict(missing, lambda entry: entry.keep_until_s <= now)
        if missing > 0 and force:
            missing = self._evict(missing, lambda entry: True)
        return missing <= 0

    def _evict(self, tokens: int, may_go: Callable[[Idle], bool]) -> int:
        """Evict up to ``tokens``, and return how many are still missing."""
        for session in list(self._idle):
            if tokens <= 0:
                break
            entry = self._idle[session]
            if not may_go(entry):
                continue
            taken = min(tokens, entry.tokens)
            if taken == entry.tokens:
                del self._idle[session]
            else:
                self._idle[session] = entry._replace(tokens=entry.tokens - taken)
            self.idle -= taken
            self.evicted += taken
            tokens -= taken
        return tokens


WINDOW_S = 10.0


@dataclass(slots=True, eq=False)
class Window:
    """Mean of the values added in the last ``length_s`` seconds; used for TTFT."""

    length_s: float = WINDOW_S
    _entries: deque[tuple[float, float]] = field(default_factory=deque)
    _total: float = 0.0

    def add(self, now: float, value: float) -> None:
        self._entries.append((now, value))
        self._total += value

    def mean(self, now: float) -> float:
        entries = self._entries
        oldest = now - self.length_s
        while entries and entries[0][0] <= oldest:
            self._total -= entries.popleft()[1]
        if not entries:
            self._total = 0.0  # sheds the rounding of the sums before
            return 0.0
        return self._total / len(entries)


class TokenRun(NamedTuple):
    """Steps of a decode batch. Step i (1..``steps``) ends at ``start_s`` + i x ``period_s``, and yields ``tokens`` tokens."""

    start_s: float
    period_s: float
    steps: int
    tokens: int
    gap_s: float
    """Mean gap between each of these tokens and the one before it."""

    def tokens_after(self, oldest: float) -> int:
        if self.start_s >= oldest:
            return self.steps * self.tokens
        return max(0, self.steps - math.floor((oldest - self.start_s) / self.period_s)) * self.tokens


@dataclass(slots=True, eq=False)
class TokenWindow:
    """Mean gap between the tokens in the window; used for ITL. Runs follow each other, so only the first can lie partly outside it."""

    length_s: float = WINDOW_S
    _runs: deque[TokenRun] = field(default_factory=deque)
    _new: list[TokenRun] = field(default_factory=list)
    """Runs that are not in the sums yet: most policies never ask for a mean."""
    _total: float = 0.0
    _count: int = 0

    def extend(self, runs: Sequence[TokenRun]) -> None:
        self._new.extend(runs)

    def mean(self, now: float, current: Sequence[TokenRun] = ()) -> float:
        """``current`` holds the steps of a run in progress that have ended by ``now``."""
        runs = self._runs
        for run in self._new:
            tokens = run.steps * run.tokens
            self._total += tokens * run.gap_s
            self._count += tokens
        runs.extend(self._new)
        self._new.clear()
        oldest = now - self.length_s
        while runs and runs[0].start_s + runs[0].steps * runs[0].period_s <= oldest:
            expired = runs.popleft()
            tokens = expired.steps * expired.tokens
            self._total -= tokens * expired.gap_s
            self._count -= tokens
        if not runs:
            self._total = 0.0  # sheds the rounding of the sums before
        total, count = self._total, self._count
        if runs:
            outside = runs[0].steps * runs[0].tokens - runs[0].tokens_after(oldest)
            total -= outside * runs[0].gap_s
            count -= outside
        for run in current:
            inside = run.tokens_after(oldest)
            total += inside * run.gap_s
            count += inside
        return total / count if count else 0.0


@dataclass(slots=True, eq=False)
class Live:
    """Mutable state of one session."""

    session: Session
    order: int
    """Rank by arrival."""
    stream: int = 0
    """Index of the stream of arrivals that it came from."""
    home: "Home" = field(init=False)
    """The worker that decodes it."""
    round_index: int = 0
    row: int = -1
    """Index of the current round's row in the record."""
    context: int = 0
    """Tokens so far: prompts and answers, including the newest token. Not updated while the session decodes."""
    left: int = 0
    """Tokens of the current round still to come. Not updated while the session decodes."""
    lent: int = 0
    """Tokens of its history that its home holds while a prefill runs elsewhere."""
    token_s: float = 0.0
    """When its newest token came."""
    joined_step: int = -1
    finish_step: int = -1
    stay_start: int = -1
    first_gap_s: float = 0.0


class Home(DecodeView, Protocol):
    """A worker that holds the K/V of its sessions and decodes them."""

    num_sessions: int
    coming_tokens: int
    """Tokens of prompts that prefill workers prefill for it, histories included."""
    expected_tokens: int
    """Tokens of prompts that are bound to it but in no queue yet, without those that its cache spares."""
    log: TokenLog

    @property
    def server(self) -> int: ...

    def enqueue(self, task: PrefillTask) -> None: ...

    def cached_of(self, order: int) -> int: ...

    def join(self, live: Live) -> None:
        """A prefill that ran here has ended: decode the rest of the round."""

    def lend(self, live: Live) -> int:
        """Hold the session's history for a prefill elsewhere, and return how many of its tokens were not evicted."""

    def land(self, live: Live, tokens: int) -> None:
        """The K/V of the ``tokens`` tokens that follow the lent history has arrived."""

    def row(self) -> WorkerRow: ...


class Host(Protocol):
    """The run that any worker is part of."""

    loop: EventLoop
    owed: Owed

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None: ...

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        """The task's last token is computed."""


class Hub(Host, Protocol):
    """A run whose sessions also decode."""

    def read_history(self, task: PrefillTask, worker_id: int, start_s: float) -> float:
        """Return the time in seconds when a prefill away from its home has its history."""

    def round_done(self, live: Live) -> bool:
        """All tokens of the round are out. Return whether the session goes on, so that its K/V is worth keeping."""

    def preempted(self, live: Live) -> None:
        """The session's K/V is gone: it needs a prefill of all its tokens."""


class Parts(TypedDict):
    """The arguments that a worker of any role takes."""

    worker_id: int
    cost: StepCost
    queue: NotRequired[PrefillQueue]
    batching: NotRequired[Batching]
    degree: NotRequired[int]
    server: NotRequired[int]


class Worker:
    role: ClassVar[str] = "prefill"
    coming_tokens = expected_tokens = 0
    kv: WorkerKv | None = None
    """The K/V of its sessions; None for a worker that neither decodes nor caches."""
    kv_capacity: int | None = None
    busy_decode_s = 0.0
    num_preemptions = 0
    _decoding = _context = 0
    """Sequences that decode in the step with prefills, and their tokens."""

    def __init__(
        self,
        host: Host,
        *,
        worker_id: int,
        cost: StepTimes,
        queue: PrefillQueue | None = None,
        batching: Batching = ONE_BY_ONE,
        degree: int = 1,
        server: int = 0,
    ) -> None:
        """Without a ``queue`` the worker makes its own, first come, first served."""
        self.worker_id, self.degree, self.server = worker_id, degree, server
        self.queue = PrefillQueue() if queue is None else queue
        self.begun: list[PrefillTask] = []
        self.is_busy = False
        """Whether a step with prefills is under way, or about to be."""
        self.num_prefills = 0
        self.prefilled_tokens = 0
        self._host, self._loop = host, host.loop
        self._cost, self._batching = cost, batching
        # The last step with prefills: it runs while ``is_busy``, unless the next one waits for its history.
        self._shares: Sequence[Share] = ()
        self._tokens = 0
        self._start_s = self._end_s = self._step_s = 0.0
        self._busy_s = 0.0
        """Seconds in the steps before that one."""
        self._version = 0

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        return self.queue.backlog_s

    @property
    def backlog_tokens(self) -> int:
        return self.queue.backlog_tokens + (self._tokens if self.is_busy else 0)

    @property
    def _kv_in_use(self) -> int:
        return 0 if self.kv is None else self.kv.held

    def cached_of(self, order: int) -> int:
        """Tokens from the start of the session with this rank of arrival that the worker caches itself. A prefill worker without a
        cache keeps none: it reads and computes only for the decode worker."""
        return 0 if self.kv is None else self.kv.cached(order)

    def load_with(self, order: int, tokens: int) -> Load:
        """The load of the worker if it got a prompt of ``tokens`` tokens of the session whose rank of arrival is ``order``."""
        cached = self.cached_of(order)
        protected = 0 if self.kv is None else self.kv.protected(order, self._loop.now)
        queued_tokens = self.backlog_tokens + self.expected_tokens
        to_prefill = queued_tokens + sum([task.left for task in self.begun]) + tokens - cached
        coming_tokens = self.queue.backlog_tokens + self.coming_tokens + self.expected_tokens
        return Load(to_prefill, self._kv_in_use + coming_tokens + tokens - protected)

    def busy_s(self, now: float) -> float:
        if not self.is_busy:
            return 0.0
        return max(0.0, self._start_s + fsum([task.estimate_s for task, _ in self._shares]) - now)

    def oldest_wait_s(self, now: float) -> float:
        return now - min((task.ready_s for task in self.queue), default=now)

    # ---- what the host tells it ---------------------------------------------------------------------

    def enqueue(self, task: PrefillTask) -> None:
        ask(self.queue.push, task)
        self._recount(task)
        self.poke()

    def _recount(self, task: PrefillTask) -> None:
        """Set the tokens of a waiting task to those of its prompt that the shared cache does not hold by now."""
        if self.kv is not None and self.kv.shares:
            missing = task.history - self.kv.cached(task.order)
            self._host.owed.recompute(task, missing)
            self.queue.backlog_tokens += missing

    def poke(self) -> None:
        """Something may have changed: plan a step if none runs."""
        if not self.is_busy:
            self._boundary()

    def row(self) -> WorkerRow:
        """The worker's row of the workers table. A step that still runs counts in full."""
        work = self._busy_s + self._step_s, self.busy_decode_s, self.num_prefills, self.prefilled_tokens
        peak, evicted = (None, None) if self.kv is None else (self.kv.peak, self.kv.evicted)
        identity = self.worker_id, self.role, self.degree, self.server
        return WorkerRow(*identity, *work, self.kv_capacity, peak, evicted, self.num_preemptions)

    # ---- between steps --------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Start the next step, or wait. Called between steps only."""
        self._version += 1
        plan = self._plan(self._loop.now)
        if plan.shares:
            self._start(plan)
        else:
            self._wait(plan)

    def _plan(self, start_s: float) -> NextStep:
        """The policy's plan for a step that can start at ``start_s``."""
        plan = ask(self._batching.next_step, self._situation(start_s), start_s)
        self._host.owed.check(plan, self._batching)
        return plan

    def _situation(self, start_s: float) -> Situation:
        return Situation(self.queue, self.begun, 0, sys.maxsize, lambda task: 0)

    def _wait(self, plan: NextStep) -> None:
        """Wait until something changes, or until the policy wants to be asked again."""
        if plan.wake_s is not None:
            self._loop.at(max(plan.wake_s, self._loop.now), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version == self._version:
            self._host.owed.count_wake()
            self.poke()

    # ---- a step ------------------------------------------------------------------------------------------

    def _hold(self, share: Share, *, spare: int = 0, force: bool = False) -> Share:
        """Take the K/V of a task that begins, and of ``spare`` more tokens. History that the cache has evicted is prefilled again, and the
        cached part of a recomputation is skipped."""
        kv, (task, tokens) = self.kv, share
        assert kv is not None
        if not task.computed:
            is_whole = tokens == task.tokens
            self._host.owed.recompute(task, task.history - kv.resume(task.order))
            kv.make_room(task.tokens + spare, self._loop.now, force=force)
            kv.hold(task.tokens + spare)
            share = Share(task, task.tokens if is_whole else min(tokens, task.tokens))
        kv.fill(task.order, task.history + task.computed + share.tokens)
        return share

    def _start(self, plan: NextStep) -> None:
        """Run the planned prefills until ``_end_s``, with the sequences that decode in the same step."""
        host, worker_id, now, shares = self._host, self.worker_id, self._loop.now, plan.shares
        host.owed.run(shares, worker_id)
        chunks = []
        tokens = 0
        had_begun = bool(self.begun)
        for task, share in shares:
            computed = task.computed
            chunks.append(Chunk(task.history + computed, share))
            if computed == 0:
                host.task_started(task, worker_id, now)
                if share < task.tokens:
                    self.begun.append(task)
            task.computed = computed + share
            tokens += share
        if had_begun:
            self.begun = [task for task in self.begun if task.tokens > task.computed]
        self._busy_s += self._step_s
        self._step_s = self._cost.step_s(chunks, self._decoding, self._context, plan.mode)
        self._start_s, self._end_s = now, now + self._step_s
        self._shares, self._tokens = shares, tokens
        self.prefilled_tokens += tokens
        self.is_busy = True
        self._loop.at(self._end_s, self._finish, plan)

    def _finish(self, plan: NextStep) -> None:
        for task, _ in plan.shares:
            if task.computed == task.tokens:
                self.num_prefills += 1
                self._host.prefilled(task, self.worker_id)
        self.is_busy = False
        self._boundary()


class PrefillWorker(Worker):
    """A worker that only prefills: history in, increment out.

    It chooses the next step when the current one begins to compute, so that it reads the history meanwhile (AMPD §6).
    Tasks that arrive in between wait for the step after. Without that overlap the read delays the step.
    """

    def __init__(self, hub: Hub, *, overlaps: bool = True, window_s: float = WINDOW_S, **parts: Unpack[Parts]) -> None:
        super().__init__(hub, **parts)
        self._hub, self._overlaps = hub, overlaps
        self.ttft = Window(window_s)
        """TTFT of the prefills that it ran."""
        self.windowed_ttft_s = self.ttft.mean
        self._next: NextStep | None = None
        """The plan of the step after the current one."""
        self._waits = False
        """Whether the current step waits for its history."""
        self._ready_s = 0.0
        """When the step that was planned last has its history."""

    # ---- what policies see -----------------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """Tasks chosen for the next step have not begun, so they still count as queued."""
        chosen_s = fsum([task.estimate_s for task, _ in self._next.shares]) if self._next else 0.0
        return self.queue.backlog_s + chosen_s

    @property
    def backlog_tokens(self) -> int:
        chosen_tokens = sum(share.tokens for share in self._next.shares) if self._next else 0
        return super().backlog_tokens + chosen_tokens

    cached_tokens = Worker.cached_of

    # ---- steps -----------------------------------------------------------------------------------------

    def poke(self) -> None:
        """While a step runs, choose the next one, unless the step waits for history and may hold shares of the begun tasks."""
        may_choose = self._overlaps and self._next is None and not (self._waits and self.begun)
        if self.is_busy and may_choose and (self.queue or self.begun):
            plan = self._plan(max(self._end_s, self._loop.now))
            self._next = plan if plan.shares else None
        super().poke()

    def _plan(self, start_s: float) -> NextStep:
        """Return the plan that was chosen before, or choose one now. For a new plan the worker reads the histories from now on, and
        prefills again what their homes have evicted."""
        if self._next is not None:
            plan, self._next = self._next, None
            return plan
        plan = super()._plan(start_s)
        self._ready_s = self._loop.now
        if not plan.shares:
            return plan
        return NextStep([self._read(share) for share in plan.shares], plan.decodes, plan.wake_s, plan.mode)

    def _read(self, share: Share) -> Share:
        task, tokens = share
        if task.computed or task.history <= 0:
            return share
        is_whole = tokens == task.tokens
        self._ready_s = self._hub.read_history(task, self.worker_id, self._ready_s)
        return Share(task, task.tokens) if is_whole else share

    def _start(self, plan: NextStep, ready_s: float | None = None) -> None:
        """Start the step when its history has arrived, at ``ready_s``. While it waits, the next step may be planned."""
        ready_s = self._ready_s if ready_s is None else ready_s
        self.is_busy = True
        self._waits = ready_s > self._loop.now
        if self._waits:
            self._end_s = ready_s
            self._loop.at(ready_s, self._start, plan, ready_s)
        else:
            super()._start(plan)
            self.poke()


class CachingPrefillWorker(PrefillWorker):
    """A prefill worker that has its own prefix cache, and reads nothing from decode workers (as a vLLM worker behind Dynamo).

    It keeps the K/V of all it prefilled: a session's prompts, and the answers that it computed again. It prefills the rest of a
    history with the increment: answers that were decoded elsewhere, and K/V that was evicted.
    """

    kv: WorkerKv

    def __init__(
        self,
        hub: Hub,
        *,
        kv_capacity: int,
        kv: WorkerKv | None = None,
        keeps: bool = True,
        window_s: float = WINDOW_S,
        **parts: Unpack[Parts],
    ) -> None:
        """``kv`` is a memory whose sessions share blocks. Without ``keeps`` the worker keeps no prompt after it has sent the K/V."""
        super().__init__(hub, overlaps=False, window_s=window_s, **parts)
        self.kv, self.kv_capacity = kv or WorkerKv(kv_capacity), kv_capacity
        self._keeps = keeps

    def release_sent(self, task: PrefillTask) -> None:
        """The home has the K/V, so it may be evicted here, that of the least recently used session first."""
        leave = self.kv.park if self._keeps else self.kv.drop
        leave(task.order, task.history + task.tokens)
        self.poke()

    def _situation(self, start_s: float) -> Situation:
        return Situation(self.queue, self.begun, 0, self.kv.capacity - self.kv.held, self._need)

    def _need(self, task: PrefillTask) -> int:
        self._recount(task)
        in_use = self.kv.protected(task.order, self._loop.now)
        return task.history + task.tokens - in_use

    def _read(self, share: Share) -> Share:
        """Take history from the worker's own memory."""
        return self._hold(share)
