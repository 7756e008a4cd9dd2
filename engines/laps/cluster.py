"""Prefill instances fed by conversations, on the event loop of the AR cluster; decoding takes no time here.

The batching policies and routers are the ones a real engine runs; only the cost of a step is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from engines.ar.record import table_of
from engines.ar.session import Clients, ClosedLoop, EventLoop, OpenArrivals, OpenLoop, Session
from engines.errors import RunError, UserError, require
from engines.knobs import Checked, Count, Range, Tokens
from engines.laps.controller import PressureController, Signals
from engines.laps.instance import PrefillInstance
from engines.laps.record import InstanceRow, MoveRow, PrefillRun, RequestRow, StepRow
from engines.laps.system import PrefillSystem
from engines.named import asked
from engines.policies.instances import LengthClass
from engines.policies.owed import Owed
from engines.policies.step import StepTimes
from engines.policies.task import PrefillTask


class Turn(NamedTuple):
    arrival_s: float
    session_id: int
    turn: int
    """From 0."""
    history: int
    """H: tokens of the turns before, answers included."""
    tokens: int
    """L: new tokens."""
    answered: int = 0
    """Tokens of the history that the answer to the turn before generated."""


@dataclass(frozen=True, kw_only=True)
class OpenTurns:
    """Turns start at ``arrival_s`` whatever the system does; a Poisson process of turns, say."""

    turns: Iterable[Turn]
    """In rising order of ``arrival_s``."""


PrefillArrivals = OpenTurns | OpenLoop | ClosedLoop

Cache = Literal["shared", "instance"]
"""shared: any instance can read any history. instance: only what it prefilled itself; the rest is prefilled again."""


@dataclass(frozen=True, kw_only=True)
class PrefillCluster(Checked):
    system: PrefillSystem
    cost: StepTimes
    num_instances: Count = 1
    slo_s: Annotated[float, Range(above=0)] | None = 0.4
    """TTFT objective of every request; None: no deadlines."""
    boundary: Tokens = 256
    """Requests of fewer tokens are short, in the record and for pools."""
    cache: Cache = "shared"
    reprefills_answer: bool = False
    """Whether a turn prefills the answer before it, whose K/V a decode instance made (disaggregation without a way back)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        spatial = self.system.spatial
        if spatial is not None:
            require(
                spatial.num_short < self.num_instances,
                f"num_short={spatial.num_short} of {self.num_instances} instances leaves no long pool: lower it",
            )
            require(
                self.cache == "shared" or spatial.pooling == "each",
                "cache='instance' with pooling='global': a pulled request loses its history, use pooling='each'",
            )

    def class_of(self, tokens: int) -> LengthClass:
        return "short" if tokens < self.boundary else "long"

    def simulate(
        self, arrivals: PrefillArrivals | Sequence[PrefillArrivals], *, until_s: float = math.inf
    ) -> PrefillRun:
        """One run from empty instances, until ``until_s`` or until all have finished. No chance is involved: the same
        arrivals give the same record, to the last bit."""
        streams = [arrivals] if isinstance(arrivals, PrefillArrivals) else list(arrivals)
        require(bool(streams), "arrivals=(): give at least one stream")
        require(until_s > 0, f"until_s={until_s} must be above 0 s")
        spatial = self.system.spatial
        require(
            spatial is None or spatial.controller is None or until_s < math.inf,
            f"until_s={until_s}: a controller never stops by itself, give an end",
        )
        simulation = _PrefillSimulation(self)
        run = simulation.run(streams, until_s)
        # As of ``Cluster.simulate``: no rings.
        vars(simulation).clear()
        return run


class _PrefillSimulation:
    """One run."""

    def __init__(self, cluster: PrefillCluster) -> None:
        self.loop = EventLoop()
        self.owed = Owed()
        self._cluster = cluster
        system, spatial = cluster.system, cluster.system.spatial
        self._router = system.make_router()
        self._requests: list[RequestRow] = []
        self._turns: dict[int, tuple[_Talk, int]] = {}
        """Unfinished requests of sessions, by request id."""
        self._clients: dict[int, Clients] = {}
        """Clients of the streams that are closed loops."""
        self._work_s = system.work_s
        self._moves: list[MoveRow] = []
        self._is_global = spatial is not None and spatial.pooling == "global"
        pools: dict[LengthClass, Any] = {}
        if self._is_global:
            pools = {"short": system.make_queue(), "long": system.make_queue()}
        self._pool_queues = pools
        self.instances = []
        for index in range(cluster.num_instances):
            pool: LengthClass | None = None
            if spatial is not None:
                pool = "short" if index < spatial.num_short else "long"
            self.instances.append(
                PrefillInstance(
                    self,
                    worker_id=index,
                    cost=cluster.cost,
                    queue=pools[pool] if pool is not None and self._is_global else system.make_queue(),
                    batching=system.make_batching(),
                    boundary=cluster.boundary,
                    pool=pool,
                    pulls=self._is_global,
                    shares_cache=cluster.cache == "shared",
                )
            )
        self._controller = None
        if spatial is not None and spatial.controller is not None:
            self._controller = PressureController(spatial.controller)

    def run(self, streams: Sequence[PrefillArrivals], until_s: float) -> PrefillRun:
        """Until all have finished or ``until_s``, and what is left of it."""
        for place, stream in enumerate(streams):
            begin = partial(self._begin, place)
            if isinstance(stream, ClosedLoop):
                self._clients[place] = Clients(self.loop, stream, begin)
            elif isinstance(stream, OpenLoop):
                OpenArrivals(self.loop, stream.sessions, begin)
            else:
                OpenArrivals(self.loop, stream.turns, self._arrive)
        if self._controller is not None:
            self.loop.at(self._controller.config.period_s, self._control)
        self.loop.run(until_s)
        now = self.loop.now
        for row in self._requests:
            if row.finished_s is None and row.deadline_s is not None and row.deadline_s < now:
                row.violated = True
        steps = sorted(
            (step for each in self.instances for step in each.steps), key=lambda step: (step.start_s, step.instance)
        )
        return PrefillRun(
            requests=table_of(RequestRow, self._requests),
            steps=table_of(StepRow, steps),
            moves=table_of(MoveRow, self._moves),
            instances=table_of(InstanceRow, [each.summary(now) for each in self.instances]),
            facts={"end_s": now, "num_events": self.loop.num_events},
        )

    # ---- arrivals ------------------------------------------------------------------------------------------

    def _begin(self, stream: int, session: Session) -> None:
        self._next_round(_Talk(session, self._clients.get(stream)))

    def _next_round(self, talk: _Talk) -> None:
        turn = talk.turn
        tokens = talk.session.rounds[turn].prefill_tokens
        talk.turn += 1
        request_id = len(self._requests)
        self._turns[request_id] = talk, tokens
        self._arrive(Turn(self.loop.now, talk.session.session_id, turn, talk.history, tokens, talk.answered))

    def _arrive(self, due: Turn) -> None:
        cluster, now = self._cluster, self.loop.now
        _, session_id, turn, history, tokens, answered = due
        if tokens < 1 or history < 0 or not 0 <= answered <= history:
            raise UserError(
                f"session {session_id} turn {turn}: tokens={tokens}, history={history}, answered={answered}: a turn has at least "
                "one token, and its answer is part of the history"
            )
        if cluster.reprefills_answer:
            history, tokens = history - answered, tokens + answered
        task = PrefillTask(
            len(self._requests),
            session_id,
            len(self._requests),
            turn,
            "incremental" if turn else "initial",
            history,
            tokens,
            now,
            now,
        )
        self.owed.add(task)
        row = RequestRow(task.task_id, session_id, turn, cluster.class_of(task.tokens), history, tokens, now)
        self._requests.append(row)
        if cluster.slo_s is not None:
            row.deadline_s = now + cluster.slo_s
        if self._is_global:
            if self._work_s is not None:
                task.estimate_s = self._work_s(task.history, task.tokens)
            asked(self._pool_queues[row.length_class].push, task)
            for instance in self.instances:
                if instance.pool == row.length_class and not instance.is_busy:
                    instance.poke()
                    if instance.is_busy:
                        break
        else:
            self._send(task)

    def _send(self, task: PrefillTask) -> None:
        picked = asked(self._router.pick, task, self.instances, self.loop.now)
        if not isinstance(picked, int) or not 0 <= picked < len(self.instances):
            raise RunError(
                f"router {type(self._router).__name__} picks instance {picked!r} of 0 to {len(self.instances) - 1}"
            )
        instance = self.instances[picked]
        if instance.cached is not None:
            missing = task.history - instance.cached_tokens(task)
            self.owed.more(task, missing)
            row = self._requests[task.task_id]
            row.history, row.tokens, row.length_class = task.history, task.tokens, self._cluster.class_of(task.tokens)
        if self._work_s is not None:
            task.estimate_s = self._work_s(task.history, task.tokens)
        instance.enqueue(task)

    # ---- what instances tell ----------------------------------------------------------------------------------

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None:
        row = self._requests[task.task_id]
        row.started_s, row.instance = now, worker_id

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        now = self.loop.now
        self.owed.ended(task)
        row = self._requests[task.task_id]
        row.finished_s = now
        row.violated = row.deadline_s is not None and now > row.deadline_s
        instance = self.instances[worker_id]
        instance.late.append(row.violated)
        if instance.cached is not None:
            instance.cached[task.session_id] = task.history + task.tokens
        going = self._turns.pop(task.task_id, None)
        if going is not None:
            self._go_on(*going, instance)

    def _go_on(self, talk: _Talk, tokens: int, instance: PrefillInstance) -> None:
        entry = talk.session.rounds[talk.turn - 1]
        talk.history += tokens + entry.decode_tokens
        talk.answered = entry.decode_tokens
        session_id = talk.session.session_id
        if instance.cached is not None and not self._cluster.reprefills_answer:
            instance.cached[session_id] += entry.decode_tokens
        now = self.loop.now
        if talk.turn < len(talk.session.rounds):
            self.loop.at(now + entry.delay_s, self._next_round, talk)
            return
        for each in self.instances:
            if each.cached is not None:
                each.cached.pop(session_id, None)
        if talk.clients is not None and not talk.clients.go_on(now):
            self.loop.at(now + talk.clients.think_s, lambda: None)  # the run lasts until all have thought

    # ---- spatial disaggregation ---------------------------------------------------------------------------------

    def _control(self) -> None:
        assert self._controller is not None
        now = self.loop.now
        pools: dict[str | None, list[PrefillInstance]] = {"short": [], "long": []}
        for instance in self.instances:
            pools[instance.pool].append(instance)
        signals: dict[str | None, list[Signals]] = {
            name: [each.signals(now, len(members) if self._is_global else 1) for each in members]
            for name, members in pools.items()
        }
        made = self._controller.decide(signals["short"], signals["long"], now)
        if made.grows is not None:
            giving = pools["long" if made.grows == "short" else "short"]
            # The one with the least begun is free the soonest.
            mover = min(giving, key=lambda each: (sum(task.left for task in each.begun), each.is_busy, each.worker_id))
            num_short = len(pools["short"]) + (1 if made.grows == "short" else -1)
            self._moves.append(
                MoveRow(now, mover.worker_id, made.grows, made.short_pressure, made.long_pressure, num_short)
            )
            self._migrate(mover, made.grows)
        self.loop.at(now + self._controller.config.period_s, self._control)

    def _migrate(self, mover: PrefillInstance, to: LengthClass) -> None:
        """It takes the other class from now on; what it has begun it finishes itself."""
        mover.pool = to
        if self._is_global:
            mover.queue = self._pool_queues[to]
            mover.poke()
            return
        waiting = list(mover.queue)
        for task in waiting:
            mover.withdraw(task)
        for task in waiting:
            self._send(task)


@dataclass(slots=True)
class _Talk:
    """A session under way."""

    session: Session
    clients: Clients | None
    turn: int = 0
    history: int = 0
    answered: int = 0
