"""One run of a cluster: sessions arrive, workers prefill their rounds one after the other, and decode workers generate the answers.

A session passes through its workers as in AMPD §3: bind, route, prefill, send K/V, decode, environment, and again. A system of
prefill instances alone (LAPS) uses the parts that need no decode worker. A ``Cluster`` is a serving system on hardware: it says which
workers a run has, and which policies decide for them.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engines.cluster.core import CoreRun
from engines.cluster.decode import DecodeWorker
from engines.cluster.hardware import NO_TIMES, Deployment, EngineTimes, Hardware, KvLinks, workers_of
from engines.cluster.policies import NEVER, Policies, StopRule
from engines.cluster.prefix import BlockKv, Prompt, prompt_of
from engines.cluster.record import (
    ClusterRun,
    RoundRow,
    SessionRow,
    Stay,
    TaskRow,
    TransferRow,
    WorkerRow,
    join_logs,
    prefill_load,
    table_of,
)
from engines.cluster.sessions import Arrivals, Clients, ClosedLoop, EventLoop, OpenArrivals, OpenLoop, Session
from engines.cluster.worker import CachingPrefillWorker, Home, Live, Parts, PrefillWorker
from engines.data import ask
from engines.errors import RunError, UserError, require
from engines.policies.batching import Owed, checked_decision
from engines.policies.routing import Binder, Estimator, PromptBinder, Router
from engines.policies.views import PrefillTask, TaskKind


class Simulation:
    """The base of every run: a clock, the ledger of prefills, and sessions whose rounds run one after the other."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.owed = Owed()
        self._lives: dict[int, Live] = {}
        """Sessions under way, by their rank of arrival."""
        self._num_arrived = 0
        self._streams: list[Clients | OpenArrivals[Session]] = []
        self.tasks: list[TaskRow] = []
        """A row for each prefill so far."""

    def break_cycles(self) -> None:
        """Break the reference cycle of the run and its workers, so that all are freed at once, without a garbage collection."""
        vars(self).clear()

    def _open(self, arrivals: Arrivals) -> None:
        """Add a stream of arrivals: its sessions come from now on."""
        begin = partial(self._begin, len(self._streams))
        if isinstance(arrivals, ClosedLoop):
            self._streams.append(Clients(self.loop, arrivals, begin))
        else:
            self._streams.append(OpenArrivals(self.loop, arrivals.sessions, begin))

    def _begin(self, stream: int, session: Session) -> None:
        live = Live(session, self._num_arrived, stream)
        self._num_arrived += 1
        self._lives[live.order] = live
        self._arrive(live)
        self._ready(live)

    def _arrive(self, live: Live) -> None:
        """A session has arrived."""

    def _ready(self, live: Live) -> None:
        """The next round of the session can start."""
        raise NotImplementedError

    def _new_task(
        self, session_id: int, order: int, round_index: int, kind: TaskKind, history: int, tokens: int
    ) -> PrefillTask:
        """Return a new prefill task of the session whose rank of arrival is ``order``. Its tokens are owed from now on."""
        now = self.loop.now
        task = PrefillTask(len(self.tasks), session_id, order, round_index, kind, history, tokens, now, now)
        self.owed.add(task)
        return task

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None:
        row = self.tasks[task.task_id]
        row.started_s = now
        row.postponed = task.postponed

    def _finish_task(self, task: PrefillTask) -> TaskRow:
        """The task's last token is computed now. Return its row."""
        self.owed.end(task)
        row = self.tasks[task.task_id]
        row.computed_tokens = task.tokens
        row.finished_s = self.loop.now
        return row

    def _go_on(self, live: Live, end_s: float) -> bool:
        """The round ends at ``end_s``. Return whether the session has another, which is ready after the environment's delay.

        Even without a delay the next round is a later event, because its worker is between two steps.
        """
        rounds = live.session.rounds
        delay_s = rounds[live.round_index].delay_s
        live.round_index += 1
        if live.round_index == len(rounds):
            return False
        self.loop.at(end_s + delay_s, self._ready, live)
        return True


class DecodeSimulation(Simulation):
    """A run that also decodes its sessions, on workers built for it. Only its ``ClusterRun`` remains."""

    def __init__(
        self,
        *,
        binder: Binder | PromptBinder,
        router: Router,
        estimator: Estimator | None = None,
        links: KvLinks | None = None,
        stop: StopRule = NEVER,
        most_tokens: float = math.inf,
        engine: EngineTimes = NO_TIMES,
    ) -> None:
        """Without ``links`` K/V moves in no time. ``estimator`` fills the tasks' estimates, for policies that read them. A session of
        more than ``most_tokens`` fits no worker and raises UserError. ``engine`` has the times between clients and workers."""
        super().__init__()
        self._homes: list[Home] = []
        self._prefills: list[PrefillWorker] = []
        self._home_of: dict[int, Home] = {}
        self._prefill_of: dict[int, PrefillWorker] = {}
        self._binder, self._router, self._estimator, self._links, self._stop = binder, router, estimator, links, stop
        self._most_tokens, self._engine = most_tokens, engine
        self._stop_reason: str | None = None
        self._prompts: dict[int, tuple[int, Prompt]] = {}
        """For each session under way its current round, and the blocks of that round's prompt."""
        self._sessions: list[SessionRow] = []
        self._rounds: list[RoundRow] = []
        self._transfers: list[TransferRow] = []

    def shared_kv(self, capacity: int, size: int) -> BlockKv:
        """A memory for a worker of this run, in which sessions share blocks of ``size`` tokens."""
        return BlockKv(
            capacity, size=size, prompt_of=partial(self._prompt, size), keeps_answers=self._engine.keeps_answers
        )

    def _prompt(self, size: int, order: int) -> Prompt | None:
        """The prompt blocks of the session's current round; None if the session has no names of blocks, or is over."""
        live = self._lives[order]
        prefix, index, rounds = live.session.prefix, live.round_index, live.session.rounds
        if prefix is None or index == len(rounds):
            return None
        entry = self._prompts.get(order)
        if entry is None or entry[0] != index:
            entry = index, prompt_of(prefix, index, live.context + rounds[index].prefill_tokens, size)
            self._prompts[order] = entry
        return entry[1]

    def add(self, worker: Home | PrefillWorker) -> None:
        """Add a worker. Add the homes first."""
        if isinstance(worker, PrefillWorker):
            self._prefills.append(worker)
            self._prefill_of[worker.worker_id] = worker
        else:
            self._homes.append(worker)
            self._home_of[worker.worker_id] = worker

    def run(self, arrivals: Arrivals) -> ClusterRun:
        """Run until every session has ended, or the stop rule ends the run."""
        require(bool(self._homes), "no decode workers: add at least one")
        self._open(arrivals)
        self.loop.run(math.inf if self._stop.until_s is None else self._stop.until_s)
        is_open = isinstance(arrivals, OpenLoop)
        if self._stop_reason is None and (self._lives or (is_open and not self._streams[0].is_over)):
            self._stop_reason = f"stopped at {self.loop.now:g} s with {len(self._lives)} sessions unfinished"
        workers = [*(home.row() for home in self._homes), *(worker.row() for worker in self._prefills)]
        span_s = self._sessions[-1].arrival_s if self._sessions and is_open else 0.0
        return ClusterRun(
            sessions=table_of(SessionRow, self._sessions),
            rounds=table_of(RoundRow, self._rounds),
            tasks=table_of(TaskRow, self.tasks),
            transfers=table_of(TransferRow, self._transfers),
            workers=table_of(WorkerRow, workers),
            gaps=join_logs([home.log for home in self._homes]),
            facts={
                "num_events": self.loop.num_events,
                "end_s": self.loop.now,
                "stop_reason": self._stop_reason,
                **prefill_load(((row.role, row.busy_prefill_s) for row in workers), span_s),
            },
        )

    # ---- sessions --------------------------------------------------------------------------------------

    def _arrive(self, live: Live) -> None:
        limit, session = self._stop.max_live_sessions, live.session
        if limit is not None and len(self._lives) > limit:
            self._stop_reason = f"unstable: over {limit} sessions at once at {self.loop.now:g} s"
            self.loop.is_stopped = True
        prefill, decode = session.prefill_tokens, session.decode_tokens
        if prefill + decode > self._most_tokens:
            raise UserError(
                f"session {session.session_id} grows to {prefill + decode} tokens of K/V and a worker holds "
                f"{self._most_tokens}: shorten it or raise the degree"
            )
        if isinstance(self._binder, PromptBinder):
            worker_id = self._binder.bind_prompt(live.order, session.rounds[0].prefill_tokens, self._homes)
        else:
            worker_id = ask(self._binder.bind, self._homes, self.loop.now)
        home = self._home_of.get(worker_id)
        if home is None:
            raise RunError(
                f"binder {type(self._binder).__name__} binds a session to {worker_id!r}, which is no decode worker"
            )
        live.home = home
        home.num_sessions += 1
        self._sessions.append(
            SessionRow(session.session_id, self.loop.now, len(session.rounds), prefill, decode, home.worker_id)
        )

    def _ready(self, live: Live) -> None:
        prefill, decode, _ = live.session.rounds[live.round_index]
        live.row = len(self._rounds)
        live.left = decode
        self._rounds.append(
            RoundRow(live.session.session_id, live.round_index, self.loop.now, live.context, prefill, decode)
        )
        kind: TaskKind = "incremental" if live.round_index else "initial"
        if not self._engine.request_s:
            self._route(live, kind, live.context, prefill)
            return
        # The next binding already counts these tokens, as a router does that counts what it has sent.
        expected = live.context + prefill - live.home.cached_of(live.order)
        live.home.expected_tokens += expected
        received_s = self.loop.now + self._engine.request_s
        self.loop.at(received_s, self._route_received, expected, live, kind, live.context, prefill)

    def _route_received(self, expected: int, live: Live, kind: TaskKind, history: int, tokens: int) -> None:
        live.home.expected_tokens -= expected
        self._route(live, kind, history, tokens)

    def _route(self, live: Live, kind: TaskKind, history: int, tokens: int) -> None:
        now, home = self.loop.now, live.home
        task = self._new_task(live.session.session_id, live.order, live.round_index, kind, history, tokens)
        decision = checked_decision(
            ask(self._router.route, task, home, self._prefills, now), self._router, home.worker_id, self._prefill_of
        )
        worker = home if decision.is_local else self._prefill_of[decision.worker_id]
        home.coming_tokens += 0 if decision.is_local else history + tokens
        if self._estimator is not None:
            cached = worker.cached_tokens(live.order) if isinstance(worker, CachingPrefillWorker) else history
            task.estimate_s = self._estimator.prefill_s(cached, history + tokens - cached, worker.degree)
        identity = task.task_id, task.session_id, task.round_index, kind
        row = TaskRow(*identity, *decision, history, tokens, estimate_s=task.estimate_s, ready_s=now)
        self.tasks.append(row)
        if kind != "recompute":
            self._rounds[live.row].is_local = decision.is_local
        worker.enqueue(task)

    # ---- what workers tell -------------------------------------------------------------------------

    def read_history(self, task: PrefillTask, worker_id: int, start_s: float) -> float:
        """Return when the history has arrived. The read is lazy (AMPD §6): the home holds the history until the increment is back.
        Tokens that it has evicted are prefilled again."""
        live, worker = self._lives[task.order], self._prefill_of[worker_id]
        cached = live.home.lend(live)
        self.owed.recompute(task, task.history - cached)
        return self._send("history", task, live.home, worker, cached, start_s)

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        self._finish_task(task)
        now, live = self.loop.now, self._lives[task.order]
        worker, missing, end_s = self._prefill_of.get(worker_id), task.tokens, now
        if worker is not None:
            if isinstance(worker, CachingPrefillWorker):
                missing = task.history + task.tokens - live.home.lend(live)
            end_s = self._send("increment", task, worker, live.home, missing, now)
        if end_s > now:
            self.loop.at(end_s, self._land, live, task, worker, missing)
        else:
            self._land(live, task, worker, missing)

    def round_done(self, live: Live) -> bool:
        """All tokens of the round are out. Return whether the session goes on, so that its K/V is worth keeping."""
        end_s = self.loop.now + self._engine.response_s
        self._rounds[live.row].finished_s = end_s
        if self._go_on(live, end_s):
            return True
        self.loop.at(end_s, self._end, live)
        return False

    def preempted(self, live: Live) -> None:
        """The session's K/V is gone: it needs a prefill of all its tokens."""
        self._route(live, "recompute", 0, live.context)

    # ---- in between ----------------------------------------------------------------------------------------

    def _land(self, live: Live, task: PrefillTask, worker: PrefillWorker | None, missing: int) -> None:
        """The prefill's token is out: the first of its round, except after a preemption. Without a ``worker`` the prefill ran at
        home; otherwise the home has received the ``missing`` tokens."""
        now = self.loop.now
        self.tasks[task.task_id].landed_s = now
        live.context = task.history + task.tokens + 1
        live.left -= 1
        if task.kind == "recompute":
            # The home logs the gap before this token, which is the last gap of a round that ends here.
            live.home.log.stays.append(Stay(live.row, now - live.token_s, 0, 0))
        else:
            self._rounds[live.row].first_token_s = now + self._engine.response_s
        live.token_s = now
        if worker is None:
            live.home.join(live)
            return
        if task.kind != "recompute":
            worker.ttft.add(now, now - task.ready_s)
        live.home.coming_tokens -= task.history + task.tokens
        live.home.land(live, missing)
        if isinstance(worker, CachingPrefillWorker):
            worker.release_sent(task)

    def _end(self, live: Live) -> None:
        row = self._sessions[live.order]
        row.finished_s = self.loop.now
        row.status = "ok"
        live.home.num_sessions -= 1
        del self._lives[live.order]
        self._prompts.pop(live.order, None)
        stream = self._streams[live.stream]
        if isinstance(stream, Clients) and stream.go_on(self.loop.now):
            return
        if not self._lives and stream.is_over:
            self.loop.is_stopped = True

    def _send(
        self,
        content: str,
        task: PrefillTask,
        source: Home | PrefillWorker,
        target: Home | PrefillWorker,
        tokens: int,
        start_s: float,
    ) -> float:
        """Log a transfer of ``tokens`` tokens of K/V, and return when it has arrived."""
        links = self._links
        if links is None or tokens == 0:
            return start_s
        link = links.between(source.server, target.server)
        end_s = start_s + links.transfer_s(tokens, link, source.degree, target.degree)
        num_bytes = tokens * links.kv_bytes_per_token
        self._transfers.append(
            TransferRow(
                task.task_id, content, source.worker_id, target.worker_id, link.name, tokens, num_bytes, start_s, end_s
            )
        )
        return end_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    hardware: Hardware
    deployment: Deployment
    policies: Policies

    def __post_init__(self) -> None:
        hardware = self.hardware
        for pool in (*self.deployment.prefill, *self.deployment.decode):
            require(
                hardware.kv_capacity(pool.degree) >= 1,
                f"deployment={self.deployment}: {hardware.shape.name} does not fit {pool.degree} x {hardware.gpu.name}, "
                f"use a degree of {min(hardware.degrees())} or more",
            )

    def simulate(
        self, arrivals: Arrivals, *, seed: int = 0, stop: StopRule = NEVER, max_run_steps: int = sys.maxsize
    ) -> ClusterRun:
        """Simulate one run that starts with empty workers. The same arguments give the same record, to the last bit.

        With ``max_run_steps`` 1 every decode step is an event of its own: that changes only rounding, and how long a simulation takes.
        """
        policies, workers = self.policies, workers_of(self.deployment)
        binder, router = policies.make_binder(), policies.make_router(seed)
        if isinstance(arrivals, OpenLoop) and isinstance(arrivals.sessions, Sequence):
            core = CoreRun(self.hardware, workers, policies, binder, router, stop, max_run_steps)
            if (core_run := core.simulate(arrivals.sessions)) is not None:
                return core_run
        simulation = DecodeSimulation(
            binder=binder,
            router=router,
            estimator=policies.estimator,
            links=self.hardware.links,
            stop=stop,
            most_tokens=min(self.hardware.kv_capacity(worker.degree) for worker in workers),
            engine=self.hardware.constants.engine,
        )
        shared = policies.make_prefill_queue() if policies.shares_prefill_queue else None
        for index, (degree, server, is_decode) in enumerate(workers):
            batching = policies.local_batching if is_decode else policies.prefill_batching
            cost = self.hardware.run_cost(degree, batching, is_remote=not is_decode)
            parts = Parts(worker_id=index, cost=cost, batching=batching, degree=degree, server=server)
            if is_decode:
                parts["queue"] = policies.make_local_queue()
            else:
                parts["queue"] = policies.make_prefill_queue() if shared is None else shared
            simulation.add(self._worker(simulation, parts, self.hardware.kv_capacity(degree), is_decode, max_run_steps))
        run = simulation.run(arrivals)
        simulation.break_cycles()
        return run

    def _worker(
        self, simulation: DecodeSimulation, parts: Parts, kv_capacity: int, is_decode: bool, max_run_steps: int
    ) -> Home | PrefillWorker:
        policies, window_s, size = self.policies, self.policies.window_s, self.policies.block_size
        if not is_decode and policies.history != "own-cache":
            return PrefillWorker(simulation, overlaps=policies.history == "overlapped", window_s=window_s, **parts)
        kv = None if size is None else simulation.shared_kv(kv_capacity, size)
        if not is_decode:
            return CachingPrefillWorker(
                simulation, kv_capacity=kv_capacity, kv=kv, keeps=policies.keeps, window_s=window_s, **parts
            )
        return DecodeWorker(
            simulation,
            kv_capacity=kv_capacity,
            kv=kv,
            keeps=policies.keeps,
            keep_s=policies.keep_s,
            window_s=window_s,
            max_run_steps=max_run_steps,
            schedules_ahead=self.hardware.constants.engine.schedules_ahead,
            **parts,
        )
