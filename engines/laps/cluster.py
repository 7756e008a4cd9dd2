"""Prefill instances that serve conversations: a cluster whose workers only prefill, unless it also decodes the answers (LAPS §3, §4).

A real engine runs the same batching policies and routers. Only the cost of a step is simulated: the price of its work, but at least the
time of its launches. An eager layer takes at least ``layer_launch_s`` to launch, which hides behind its work once a step holds some
hundreds of tokens. A captured graph has no such floor, but computes its padding. ``kappa`` makes steps that mix short and long chunks
slower than their parts (0 by default: a roofline gives no penalty).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from engines.cluster.core import ints_of
from engines.cluster.decode import DecodeWorker, Sink
from engines.cluster.hardware import StepCost, besides_attention_s
from engines.cluster.record import Table, TaskRow, rows_of, table_of
from engines.cluster.sessions import Clients, ClosedLoop, OpenArrivals, OpenLoop
from engines.cluster.simulation import DecodeSimulation, Simulation, StopRule
from engines.cluster.worker import Host, Live, Parts, PrefillWorker, Worker
from engines.cost.kernels import Composed, kernels_of
from engines.cost.roofline import DecodeLine, Gpu, Roofline, StepPrice, StepWork
from engines.data import ask
from engines.errors import RunError, UserError, require
from engines.knobs import Checked, Count, Fixed, Proportion, Range, Seconds, Tokens
from engines.laps import core
from engines.laps.system import LengthClass, PrefillSystem, PressureController, Signals
from engines.models.shape import ModelShape
from engines.policies.routing import FewestSessions, Local, RemoteOnly
from engines.policies.views import (
    Bucket,
    Chunk,
    Fallback,
    NextStep,
    OpenQueue,
    PrefillTask,
    Rung,
    StepTimes,
    TaskKind,
    padded_tokens,
)

Overlap = Literal["max", "add"]
NOWHERE = -1
"""The worker of a request that no instance has begun."""


@dataclass(frozen=True, kw_only=True)
class PrefillConstants(Checked):
    """Constants that no datasheet gives. All are assumed, until a card has been timed."""

    matmul_efficiency: Annotated[Proportion, Fixed] = 0.65
    attention_efficiency: Annotated[Proportion, Fixed] = 0.35
    bandwidth_efficiency: Annotated[Proportion, Fixed] = 0.8
    layer_launch_s: Annotated[float, Range(0, 1)] = 0.35e-3
    """Least seconds of a layer without a graph; public figures for SGLang give about 0.4 ms."""
    step_overhead_s: Annotated[Seconds, Fixed] = 3e-3
    """Scheduling and sampling of every step."""
    request_overhead_s: Annotated[Seconds, Fixed] = 0.1e-3
    """Added for each request in a step."""
    graph_launch_s: Annotated[Seconds, Fixed] = 0.6e-3
    graph_check_s: Annotated[Seconds, Fixed] = 0.15e-3
    """Time to look up whether a graph fits, found or not (LAPS §4.1)."""
    kappa: Annotated[float, Range(above=-1, most=1e3)] = 0.0
    """Mixing penalty: a step with short and long chunks takes 1 + kappa times its GPU time."""
    boundary: Tokens = 256
    """Prompts of fewer tokens are short: for kappa, for LAPS, and in tables."""
    overlap: Overlap = "max"
    """max: launches run ahead of the GPU, and the longer of the two counts. add: launches and the GPU take turns."""


def captured_size(chunks: Sequence[Chunk], rows: int, mode: object) -> tuple[int, int]:
    """Rows and prompts that a captured shape computes in place of ``rows`` rows of ``chunks``. Raises UserError if they do not fit."""
    if isinstance(mode, Bucket):
        fits = len(chunks) <= mode.batch and all(chunk.tokens <= mode.length for chunk in chunks)
        heads = mode.batch
    elif isinstance(mode, Rung):
        fits, heads = rows <= mode.tokens, len(chunks)
    else:
        raise UserError(f"mode={mode!r} is unknown: use None, Fallback, Bucket or Rung")
    if not fits:
        raise UserError(
            f"mode={mode!r} does not hold {[chunk.tokens for chunk in chunks]} tokens: ask for a larger shape"
        )
    return mode.tokens, heads


class PrefillCost:
    """The ``StepCost`` of one GPU, for all modes of ``StepMode``. If a system mixes, sequences decode in the same step.

    If composed of a framework's ``kernels``, only the overheads and ``kappa`` count among the constants. The products' times at a
    step's number of rows then say how much slower a mixed step is, and ``kappa`` adds to that.
    """

    def __init__(
        self, shape: ModelShape, gpu: Gpu, constants: PrefillConstants | None = None, kernels: str | None = None
    ) -> None:
        self.shape, self.gpu = shape, gpu
        self.constants = constants = constants or PrefillConstants()
        require(
            shape.weight_bytes < gpu.memory_bytes,
            f"model={shape.name!r} has {shape.weight_bytes / 1e9:.0f} GB of weights and {gpu.name} "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use a smaller model",
        )
        self.price: StepPrice
        if kernels is None:
            self.price = Roofline(shape, gpu, shares=constants, is_coarse=True)
        else:
            self.price = Composed(kernels_of(shape, gpu, kernels))
        self.launch_s = shape.n_layers * constants.layer_launch_s

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        constants = self.constants
        fixed_s = constants.step_overhead_s + constants.request_overhead_s * len(chunks)
        if mode is None or isinstance(mode, Fallback):
            gpu_s = self.gpu_s(chunks, decoding, context)
            if mode is not None:
                fixed_s += constants.graph_check_s
            busy_s = gpu_s + self.launch_s if constants.overlap == "add" else max(gpu_s, self.launch_s)
            return fixed_s + busy_s
        require(not decoding, f"mode={mode!r}: graphs are captured for prefills alone, {decoding} sequences decode")
        return fixed_s + constants.graph_check_s + constants.graph_launch_s + self.gpu_s(chunks, 0, 0, mode)

    def gpu_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        """The GPU's part: matrices, attention and LM head."""
        linear_s, attention_s, logits_s = self.price.parts(work_of(chunks, decoding, context, mode))
        gpu_s = linear_s + attention_s + logits_s
        kappa, boundary = self.constants.kappa, self.constants.boundary
        is_mixed = kappa and len({chunk.tokens < boundary for chunk in chunks}) == 2
        return gpu_s * (1 + kappa) if is_mixed else gpu_s

    def decode_line(self, decoding: int) -> DecodeLine:
        # Decode steps replay graphs in every system, so no floor of launches.
        else_s = besides_attention_s(self.price, decoding)
        else_s += self.constants.step_overhead_s + self.constants.graph_launch_s
        attention = self.price.decode_line(decoding)
        return DecodeLine(else_s + attention.base_s, attention.slope_s, else_s + attention.floor_s)


def work_of(chunks: Sequence[Chunk], decoding: int, context: int, mode: object) -> StepWork:
    """Return the work of a step: these ``chunks``, the padding of a captured shape, and the sequences that decode."""
    if mode is None or isinstance(mode, Fallback):
        return StepWork(prompts=chunks, decoding=decoding, context=context)
    rows = sum([tokens for _, tokens in chunks])
    padded_rows, heads = captured_size(chunks, rows, mode)
    if not isinstance(mode, Bucket):
        return StepWork(query_rows=padded_rows - rows, prompts=chunks)
    prompts = [(history, mode.length) for history, _ in chunks]
    return StepWork(prompts=prompts, padding=(heads - len(chunks), mode.length))


@lru_cache(maxsize=64)
def cost_of(shape: ModelShape, gpu: Gpu, constants: PrefillConstants, kernels: str | None) -> PrefillCost:
    """The cost of one GPU, by a roofline if ``kernels`` names no framework."""
    return PrefillCost(shape, gpu, constants, kernels)


def requests_of(prefills: Sequence[TaskRow], cluster: "PrefillCluster", end_s: float) -> Table:
    """Return the columns of the requests, which are these prefills without recomputations."""
    rows = [row for row in prefills if row.kind != "recompute"]
    names = {"turn": "round", "worker": "worker_id"}
    ints = {name: ints_of(getattr(row, names.get(name, name)) for row in rows) for name in core.REQUEST_INTS}
    times = {name: np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in core.REQUEST_TIMES}
    return core.request_table(ints, times, boundary=cluster.boundary, slo_s=cluster.slo_s, end_s=end_s)


@dataclass(slots=True)
class StepRow:
    instance: int
    start_s: float
    duration_s: float
    tokens: int
    padded_tokens: int
    num_short: int
    num_long: int
    num_finished: int
    mode: str


@dataclass(slots=True)
class MoveRow:
    """A decision of the controller that moved an instance."""

    time_s: float
    instance: int
    to: LengthClass
    short_pressure: float
    long_pressure: float
    num_short: int


@dataclass(slots=True)
class InstanceRow:
    """The work of an instance. A step that the run's end cuts off counts up to that end."""

    instance: int
    pool: LengthClass | None
    busy_s: float
    num_steps: int
    num_finished: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    requests: Table
    steps: Table
    moves: Table
    instances: Table
    facts: Mapping[str, Any]
    """end_s and num_events."""


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
    """Tokens of the history that are the answer to the turn before."""


@dataclass(frozen=True, kw_only=True)
class OpenTurns:
    """Turns start at their ``arrival_s``, whatever the system does: a Poisson process of turns, for example."""

    turns: Iterable[Turn]
    """In rising order of ``arrival_s``."""


PrefillArrivals = OpenTurns | OpenLoop | ClosedLoop

Cache = Literal["shared", "instance"]
"""shared: any instance can read any history. instance: an instance reads only what it prefilled, and prefills the rest again."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decodes answers too: on other GPUs (apart), or on the instances between their prefills (mixed) (LAPS Figure 8, Table 2).

    The next turn of a conversation then comes after the whole answer. If mixed, a conversation stays with one instance. If apart, each
    turn goes to the instance with the fewest queued tokens. The system's router and pools have no effect.
    """

    where: Literal["apart", "mixed"]
    cost: StepCost
    kv_capacity: int
    """Tokens of K/V beside the weights on one GPU."""

    def pace_s(self, loop: ClosedLoop, num_gpus: int) -> float:
        """Seconds of a decode step of all clients' conversations at their mean context, spread over ``num_gpus`` GPUs."""
        context = sum(session.context_tokens for session in loop.sessions) / len(loop.sessions) / 2
        batch = max(1, round(loop.num_clients / num_gpus))
        require(
            batch * context <= self.kv_capacity,
            f"clients: {batch} conversations a GPU of {context:.0f} tokens need more than the {self.kv_capacity} it holds: ask for fewer",
        )
        base_s, slope_s, floor_s = self.cost.decode_line(batch)
        return max(base_s + slope_s * batch * context, floor_s)


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
    decoding: Decoding | None = None
    """None: a turn ends with its first token."""
    reprefills_answer: bool = False
    """Whether a turn prefills the answer before it, because its K/V stays on a decode instance (disaggregation without a way back)."""

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

    def simulate(
        self, arrivals: PrefillArrivals | Sequence[PrefillArrivals], *, until_s: float = math.inf
    ) -> PrefillRun:
        """Simulate one run that starts with empty instances, until ``until_s`` or until all have finished. Nothing is random: the same
        arrivals give the same record, to the last bit."""
        streams = [arrivals] if isinstance(arrivals, PrefillArrivals) else list(arrivals)
        require(bool(streams), "arrivals=(): give at least one stream")
        require(until_s > 0, f"until_s={until_s} must be above 0 s")
        spatial = self.system.spatial
        require(
            spatial is None or spatial.controller is None or until_s < math.inf,
            f"until_s={until_s}: a controller never stops by itself, give an end",
        )
        if self.decoding is not None:
            (loop,) = streams
            assert isinstance(loop, ClosedLoop), "answers are decoded for clients in a closed loop alone"
            return self._simulate_answers(self.decoding, loop, until_s)
        if (compiled := self._compiled(streams, until_s)) is not None:
            return compiled
        simulation = _PrefillSimulation(self)
        run = simulation.run(streams, until_s)
        simulation.break_cycles()
        return run

    def _compiled(self, streams: Sequence[PrefillArrivals], until_s: float) -> PrefillRun | None:
        if type(self.cost) is not PrefillCost:
            return None
        tables = core.simulate(self, streams, until_s)
        return None if tables is None else PrefillRun(**tables)

    def _simulate_answers(self, decoding: Decoding, loop: ClosedLoop, until_s: float) -> PrefillRun:
        system, num = self.system, self.num_instances
        stop = StopRule(until_s=None if until_s == math.inf else until_s)

        def parts(worker_id: int) -> Parts:
            queue, batching = system.make_queue(), system.make_batching()
            return Parts(worker_id=worker_id, cost=decoding.cost, queue=queue, batching=batching)

        if decoding.where == "mixed":
            simulation = DecodeSimulation(binder=FewestSessions(), router=Local(), stop=stop)
            for index in range(num):
                simulation.add(DecodeWorker(simulation, kv_capacity=decoding.kv_capacity, **parts(index)))
        else:
            simulation = DecodeSimulation(binder=FewestSessions(), router=RemoteOnly("shared"), stop=stop)
            simulation.add(Sink(simulation, worker_id=0, itl_s=decoding.pace_s(loop, num)))
            for index in range(num):
                simulation.add(PrefillWorker(simulation, overlaps=False, **parts(1 + index)))
        run = simulation.run(loop)
        workers = rows_of(
            run.workers, "worker_id", "role", "busy_prefill_s", "busy_decode_s", "num_prefills", "prefilled_tokens"
        )
        instances = [
            InstanceRow(worker, None, prefill_s + decode_s, 0, num, tokens, tokens)
            for worker, role, prefill_s, decode_s, num, tokens in workers
            if role != "sink"
        ]
        requests = requests_of(simulation.tasks, self, run.facts["end_s"])
        simulation.break_cycles()
        return PrefillRun(
            requests=requests,
            steps=table_of(StepRow, []),
            moves=table_of(MoveRow, []),
            instances=table_of(InstanceRow, instances),
            facts={"end_s": run.facts["end_s"], "num_events": run.facts["num_events"]},
        )


class PrefillInstance(Worker):
    """A worker that logs its steps and reports its pressure; an ``InstanceView``."""

    backlog_tokens: int = 0

    def __init__(
        self, host: Host, *, boundary: int, pool: LengthClass | None = None, shares_cache: bool = True, **parts: Any
    ) -> None:
        """``parts`` are ``Worker``'s arguments."""
        super().__init__(host, **parts)
        self.pool = pool
        self.steps: list[StepRow] = []
        self.num_requests = 0
        self.late: list[bool] = []
        """For each request finished since the last signals, whether it missed its deadline."""
        self.cached: dict[int, int] | None = None if shares_cache else {}
        """Tokens of K/V by session; None if the instances share a cache."""
        self._boundary_tokens = boundary
        self._signals_s = 0.0
        self._busy_before_s = 0.0

    # ---- what others see -----------------------------------------------------------------------------

    def cached_tokens(self, task: PrefillTask) -> int:
        return task.history if self.cached is None else min(task.history, self.cached.get(task.session_id, 0))

    def busy_until(self, now: float) -> float:
        """Busy time so far; the step in progress counts up to ``now``."""
        return self._busy_s + (min(now, self._end_s) - self._start_s if self.is_busy else self._step_s)

    def signals(self, now: float, num_sharing: int) -> Signals:
        """The signals since the last call. A queue that ``num_sharing`` instances share counts for each in equal part."""
        busy_s, late_flags = self.busy_until(now), self.late
        passed_s = now - self._signals_s
        utilisation = (busy_s - self._busy_before_s) / passed_s if passed_s > 0 else 0.0
        backlog_s = self.queue.backlog_s / num_sharing
        backlog_s += fsum(task.estimate_s * task.left / task.tokens for task in self.begun)
        self.late, self._signals_s, self._busy_before_s = [], now, busy_s
        return Signals(backlog_s, sum(late_flags) / len(late_flags) if late_flags else 0.0, utilisation)

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
        self.count_request(task)
        super().enqueue(task)

    def count_request(self, task: PrefillTask) -> None:
        """Count the request as this instance's from now on."""
        self.num_requests += 1
        self.backlog_tokens += task.tokens

    def withdraw(self, task: PrefillTask) -> None:
        """Give a queued request away."""
        assert isinstance(self.queue, OpenQueue)
        self.queue.pull(task)
        self.num_requests -= 1
        self.backlog_tokens -= task.tokens

    def _finish(self, plan: NextStep) -> None:
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
            core.label(plan.mode),
        )
        self.steps.append(row)
        self.num_requests -= num_finished
        self.backlog_tokens -= self._tokens
        super()._finish(plan)


class _PrefillSimulation(Simulation):
    """One run of instances that only prefill. Each serves its own queue or that of its pool."""

    def __init__(self, cluster: PrefillCluster) -> None:
        super().__init__()
        self._cluster = cluster
        system, spatial = cluster.system, cluster.system.spatial
        self._router = system.make_router()
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
                    shares_cache=cluster.cache == "shared",
                )
            )
        self._caches = [instance.cached for instance in self.instances if instance.cached is not None]
        self._controller = None
        if spatial is not None and spatial.controller is not None:
            self._controller = PressureController(spatial.controller)

    def run(self, streams: Sequence[PrefillArrivals], until_s: float) -> PrefillRun:
        """Run until all have finished or until ``until_s``, and return the record."""
        for stream in streams:
            if isinstance(stream, OpenTurns):
                OpenArrivals(self.loop, stream.turns, self._arrive_alone)
            else:
                self._open(stream)
        if self._controller is not None:
            self.loop.at(self._controller.config.period_s, self._control)
        self.loop.run(until_s)
        now = self.loop.now
        steps = sorted(
            (step for each in self.instances for step in each.steps), key=lambda step: (step.start_s, step.instance)
        )
        return PrefillRun(
            requests=requests_of(self.tasks, self._cluster, now),
            steps=table_of(StepRow, steps),
            moves=table_of(MoveRow, self._moves),
            instances=table_of(InstanceRow, [instance.summary(now) for instance in self.instances]),
            facts={"end_s": now, "num_events": self.loop.num_events},
        )

    # ---- turns ---------------------------------------------------------------------------------------------

    def _arrive_alone(self, arrival: Turn) -> None:
        """A turn comes at its own time, whatever became of those before it."""
        _, session_id, turn, history, tokens, answer_tokens = arrival
        if tokens < 1 or history < 0 or not 0 <= answer_tokens <= history:
            raise UserError(
                f"session {session_id} turn {turn}: tokens={tokens}, history={history}, answered={answer_tokens}: a turn has at least "
                "one token, and its answer is part of the history"
            )
        self._num_arrived += 1
        self._ask(session_id, self._num_arrived - 1, turn, history, tokens, answer_tokens)

    def _ready(self, live: Live) -> None:
        turn, rounds = live.round_index, live.session.rounds
        answer_tokens = rounds[turn - 1].decode_tokens if turn else 0
        tokens = rounds[turn].prefill_tokens
        self._ask(live.session.session_id, live.order, turn, live.context, tokens, answer_tokens)

    def _ask(self, session_id: int, order: int, turn: int, history: int, tokens: int, answered: int) -> None:
        if self._cluster.reprefills_answer:
            history, tokens = history - answered, tokens + answered
        kind: TaskKind = "incremental" if turn else "initial"
        task = self._new_task(session_id, order, turn, kind, history, tokens)
        row = TaskRow(task.task_id, session_id, turn, kind, NOWHERE, False, "", history, tokens, ready_s=self.loop.now)
        self.tasks.append(row)
        if not self._is_global:
            self._send(task)
            return
        if self._work_s is not None:
            task.estimate_s = self._work_s(history, tokens)
        pool: LengthClass = "short" if tokens < self._cluster.boundary else "long"
        ask(self._pool_queues[pool].push, task)
        for instance in self.instances:
            if instance.pool == pool and not instance.is_busy:
                instance.poke()
                if instance.is_busy:
                    break

    def _send(self, task: PrefillTask) -> None:
        index = ask(self._router.pick, task, self.instances, self.loop.now)
        if not isinstance(index, int) or not 0 <= index < len(self.instances):
            raise RunError(
                f"router {type(self._router).__name__} picks instance {index!r} of 0 to {len(self.instances) - 1}"
            )
        instance = self.instances[index]
        if instance.cached is not None:
            self.owed.recompute(task, task.history - instance.cached_tokens(task))
            row = self.tasks[task.task_id]
            row.history, row.tokens = task.history, task.tokens
        if self._work_s is not None:
            task.estimate_s = self._work_s(task.history, task.tokens)
        instance.enqueue(task)

    # ---- what instances tell ----------------------------------------------------------------------------------

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None:
        row = self.tasks[task.task_id]
        row.started_s, row.worker_id = now, worker_id
        if self._is_global:
            self.instances[worker_id].count_request(task)

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        row, instance, slo_s = self._finish_task(task), self.instances[worker_id], self._cluster.slo_s
        row.landed_s = now = self.loop.now
        instance.late.append(slo_s is not None and now > row.ready_s + slo_s)
        if instance.cached is not None:
            instance.cached[task.session_id] = task.history + task.tokens
        live = self._lives.get(task.order)
        if live is not None:
            self._answer(live, task, instance)

    def _answer(self, live: Live, task: PrefillTask, instance: PrefillInstance) -> None:
        """Add the answer to the session. Its decoding takes no time here."""
        answer_tokens = live.session.rounds[live.round_index].decode_tokens
        live.context = task.history + task.tokens + answer_tokens
        if instance.cached is not None and not self._cluster.reprefills_answer:
            instance.cached[task.session_id] += answer_tokens
        if not self._go_on(live, self.loop.now):
            self._end(live)

    def _end(self, live: Live) -> None:
        del self._lives[live.order]
        for cached in self._caches:
            cached.pop(live.session.session_id, None)
        stream = self._streams[live.stream]
        if isinstance(stream, Clients) and not stream.go_on(self.loop.now):
            self.loop.at(self.loop.now + stream.think_s, lambda: None)  # the run lasts until all have thought

    # ---- spatial disaggregation ---------------------------------------------------------------------------------

    def _control(self) -> None:
        assert self._controller is not None
        now = self.loop.now
        pools: dict[str | None, list[PrefillInstance]] = {"short": [], "long": []}
        for instance in self.instances:
            pools[instance.pool].append(instance)
        signals: dict[str | None, list[Signals]] = {
            name: [member.signals(now, len(members) if self._is_global else 1) for member in members]
            for name, members in pools.items()
        }
        change = self._controller.decide(signals["short"], signals["long"], now)
        if change.grows is not None:
            givers = pools["long" if change.grows == "short" else "short"]
            # The instance with the least begun work is free the soonest.
            mover = min(givers, key=lambda each: (sum(task.left for task in each.begun), each.is_busy, each.worker_id))
            num_short = len(pools["short"]) + (1 if change.grows == "short" else -1)
            self._moves.append(
                MoveRow(now, mover.worker_id, change.grows, change.short_pressure, change.long_pressure, num_short)
            )
            self._migrate(mover, change.grows)
        self.loop.at(now + self._controller.config.period_s, self._control)

    def _migrate(self, mover: PrefillInstance, to: LengthClass) -> None:
        """Move an instance to the other pool. It finishes the requests that it has begun."""
        mover.pool = to
        if self._is_global:
            mover.queue = self._pool_queues[to]
            mover.poke()
            return
        tasks = list(mover.queue)
        for task in tasks:
            mover.withdraw(task)
        for task in tasks:
            self._send(task)
