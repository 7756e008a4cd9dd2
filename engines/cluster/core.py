"""Simulates runs in ``core.cpp``: the same numbers as ``engines.cluster.simulation``, to the last bit, in a tenth of the time.

It knows only our own policies. Runs with other policies stay in Python, and so do short runs if nothing is compiled yet.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from engines.cluster.hardware import Hardware, PlacedWorker, StepCost, WorkerCost
from engines.cluster.policies import Policies, StopRule
from engines.cluster.record import ROWS, ClusterRun, Floats, GapLog, Ints, Table, prefill_load, rows_of, times_of
from engines.cluster.sessions import Session, SessionColumns
from engines.columns import Values
from engines.compiled import CompilerError, Library, load_library
from engines.cost.kernels import Composed, Kernels
from engines.machine import delay_signals
from engines.policies.batching import Chunked, OneByOne, PrefillFirst
from engines.policies.routing import FewestSessions, KvCost, LeastKvMemory, RoundRobin
from engines.policies.views import Batching, Chunk, Rule, rule_of

SHARED = tuple(Path(__file__).with_name(name) for name in ("core.hpp", "exports.hpp"))
OPTIONS = "-O2", "-ffp-contract=off"
"""The compiler must not fuse two operations into one that rounds differently."""
LIBRARY = Library("cluster", (Path(__file__).with_suffix(".cpp"),), OPTIONS, SHARED)
LONG = 2000
"""A run of this many rounds is worth the seconds of a compiler. So are ten times as many rounds over all runs of a process."""
_SEEN = Counter[str]()
_EVENTS = 1 << 16
"""The core returns to Python after so many events, so that Ctrl-C can end a run."""
_BATCHING: tuple[type, ...] = OneByOne, PrefillFirst, Chunked
_BINDING: tuple[type, ...] = RoundRobin, LeastKvMemory, FewestSessions, KvCost
_ROUTING = "local", "remote", "conditional", "adaptive", "kv-aware"
_CHOICES = "shortest", "round-robin", "random", "shared", "load"
_SIGNALS = "done", "age", "backlog"
_NAMES: Mapping[str, tuple[Any, ...]] = {
    "session_status": ("ok", "unfinished"),
    "task_kind": ("initial", "incremental", "recompute"),
    "task_reason": (
        *("co-located", "always-remote", "remote", "short", "prefill-busy"),
        *("ttft-slack", "itl-slack", "cost", "kv-aware"),
    ),
    "transfer_content": ("history", "increment"),
    "transfer_link": ("intra-server", "inter-server"),
    "worker_role": ("decode", "prefill"),
}
"""The values of columns that ``core.cpp`` stores as numbers."""
_LAYERS, _HEAD, _LINE, _LAW, _STEP, _ESTIMATE, _, _, _DRAW = range(9)

Ask = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64, POINTER(c_int64), POINTER(c_double))


def fields_of(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Setup(Structure):
    _fields_ = [
        *fields_of("num_sessions num_workers num_homes num_costs", c_int64),
        *fields_of("session_id arrival_s first_round prefill decode delay_s", c_void_p),
        *fields_of(
            "worker_cost worker_capacity worker_degree worker_server cost_terms batching queues limits", c_void_p
        ),
        *fields_of("binding keeps schedules_ahead max_run_steps max_live", c_int64),
        *fields_of("routing choice signal has_estimator shares_queue overlaps kv_bytes", c_int64),
        *fields_of("bind_weight keep_s request_s response_s until_s window_s", c_double),
        *fields_of("latency_s intra_bytes_s inter_bytes_s", c_double),
        ("ask", Ask),
    ]


class _Totals(Structure):
    _fields_ = [*fields_of("num_arrived num_live num_events has_too_many", c_int64), ("now", c_double)]


@cache
def _load_if_ready(library: Library, is_long: bool) -> CDLL | None:
    """The compiled library; None if it cannot be compiled, or a short run would wait for it. Cached: a grid has thousands of runs."""
    try:
        return load_library(library) if is_long or library.cached_path(library.command()).is_file() else None
    except CompilerError:
        return None


def library_for(library: Library, num_rounds: int) -> CDLL | None:
    """Return the library for a run of ``num_rounds`` rounds, or None. After a long run, short runs use its library too."""
    _SEEN[library.name] += num_rounds if num_rounds < LONG else 10 * LONG
    return _load_if_ready(library, _SEEN[library.name] >= 10 * LONG)


class CoreRun(NamedTuple):
    """The arguments of a run."""

    hardware: Hardware
    workers: Sequence[PlacedWorker]
    policies: Policies
    binder: object
    router: object
    stop: StopRule
    max_run_steps: int

    def simulate(self, sessions: Sequence[Session]) -> ClusterRun | None:
        """Return the record of the run, or None if only Python can make it: the policies are not ours, a session has to be
        refused, or the run is short and nothing is compiled yet."""
        policies = self.policies
        queues = policies.make_local_queue(), policies.make_prefill_queue()
        rules = [rule for policy in (self.router, *queues) if (rule := rule_of(policy)) is not None]
        batchings = type(policies.local_batching), type(policies.prefill_batching)
        is_ours = len(rules) == 3 and type(self.binder) in _BINDING and set(batchings) <= set(_BATCHING)
        if not is_ours or policies.block_size is not None or policies.history == "own-cache":
            return None
        if rules[0].kind not in ("local", "adaptive") and all(worker.is_decode for worker in self.workers):
            return None
        load = Load.of(sessions)
        if not load.is_served(min(self.hardware.kv_capacity(worker.degree) for worker in self.workers)):
            return None
        library = library_for(LIBRARY, len(load.prefill))
        return None if library is None else self._run(library, load, *rules)

    def _run(self, library: CDLL, load: "Load", routing: Rule, *queues: Rule) -> ClusterRun:
        policies, engine, links = self.policies, self.hardware.constants.engine, self.hardware.links
        cost_of = self._costs()
        costs = list({id(cost): cost for cost in cost_of}.values())
        asks = Asks(costs, policies, routing)
        arrays = {
            **load._asdict(),
            "worker_cost": ints_of(map(costs.index, cost_of)),
            "worker_capacity": ints_of(self.hardware.kv_capacity(worker.degree) for worker in self.workers),
            "worker_degree": ints_of(worker.degree for worker in self.workers),
            "worker_server": ints_of(worker.server for worker in self.workers),
            "cost_terms": np.array([(1.0, *cost.terms) if _is_composed(cost) else (0.0,) * 7 for cost in costs]),
            "batching": ints_of([*_limits(policies.local_batching), *_limits(policies.prefill_batching)]),
            "queues": np.array([(*queue.limits, 0, 0)[:5] for queue in queues], dtype=np.float64),
            "limits": np.array(routing.limits, dtype=np.float64),
        }
        setup = _Setup(
            num_sessions=len(load.arrival_s),
            num_workers=len(self.workers),
            num_homes=sum(worker.is_decode for worker in self.workers),
            num_costs=len(costs),
            **{name: array.ctypes.data for name, array in arrays.items()},
            binding=_BINDING.index(type(self.binder)),
            keeps=policies.keeps,
            schedules_ahead=engine.schedules_ahead,
            max_run_steps=min(self.max_run_steps, np.iinfo(np.int64).max),
            max_live=-1 if self.stop.max_live_sessions is None else self.stop.max_live_sessions,
            routing=_ROUTING.index(routing.kind),
            choice=_CHOICES.index(routing.choice),
            signal=_SIGNALS.index(routing.signal),
            has_estimator=policies.estimator is not None,
            shares_queue=policies.shares_prefill_queue,
            overlaps=policies.history == "overlapped",
            kv_bytes=links.kv_bytes_per_token,
            bind_weight=getattr(self.binder, "overlap_weight", 0.0),
            keep_s=policies.keep_s,
            request_s=engine.request_s,
            response_s=engine.response_s,
            until_s=math.inf if self.stop.until_s is None else self.stop.until_s,
            window_s=policies.window_s,
            latency_s=links.intra.latency_s,
            intra_bytes_s=links.intra.bytes_per_s,
            inter_bytes_s=links.inter.bytes_per_s,
            ask=Ask(asks.answer),
        )
        run = Made(library, setup)
        totals = run.finish()
        if asks.error is not None:
            raise asks.error
        return self._record(run, load, totals)

    def _costs(self) -> list[StepCost]:
        batchings, run_cost = (self.policies.prefill_batching, self.policies.local_batching), self.hardware.run_cost
        return [run_cost(each.degree, batchings[each.is_decode], is_remote=not each.is_decode) for each in self.workers]

    def _record(self, results: "Made", load: "Load", totals: _Totals) -> ClusterRun:
        workers: Table = {name: list(values) for name, values in results.table("worker").items()}
        num, busy = totals.num_arrived, rows_of(workers, "role", "busy_prefill_s")
        return ClusterRun(
            sessions=results.table("session"),
            rounds=results.table("round"),
            tasks=results.table("task"),
            transfers=results.table("transfer"),
            workers=workers,
            gaps=GapLog(
                log_gap_s=results.seconds("log_gap_s"),
                log_tokens=results.ints("log_tokens"),
                stay_row=results.ints("stay_row"),
                start=results.ints("stay_start"),
                end=results.ints("stay_end"),
                first_gap_s=results.seconds("stay_first_gap_s"),
            ),
            facts={
                "num_events": totals.num_events,
                "end_s": totals.now,
                "stop_reason": self._why_stopped(totals, len(load.arrival_s)),
                **prefill_load(busy, float(load.arrival_s[num - 1]) if num else 0.0),
            },
        )

    def _why_stopped(self, totals: _Totals, num: int) -> str | None:
        if totals.has_too_many:
            return f"unstable: over {self.stop.max_live_sessions} sessions at once at {totals.now:g} s"
        if totals.num_live or totals.num_arrived < num:
            return f"stopped at {totals.now:g} s with {totals.num_live} sessions unfinished"
        return None


class Load(NamedTuple):
    """Sessions as columns. The rounds of all sessions follow one another, and those of session i begin at ``first_round[i]``."""

    session_id: Ints
    arrival_s: Floats
    first_round: Ints
    prefill: Ints
    decode: Ints
    delay_s: Floats

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> "Load":
        if isinstance(sessions, SessionColumns):
            index = np.arange(len(sessions) + 1)
            delay_s = np.zeros(len(sessions))
            return cls(index[:-1], sessions.arrival_s, index, sessions.prefill, sessions.decode, delay_s)
        rounds = [session.rounds for session in sessions]
        all_rounds = list(chain.from_iterable(rounds))
        return cls(
            session_id=ints_of(session.session_id for session in sessions),
            arrival_s=np.array([session.arrival_s for session in sessions], dtype=np.float64),
            first_round=np.cumsum([0, *map(len, rounds)], dtype=np.int64),
            prefill=ints_of(entry.prefill_tokens for entry in all_rounds),
            decode=ints_of(entry.decode_tokens for entry in all_rounds),
            delay_s=np.array([entry.delay_s for entry in all_rounds], dtype=np.float64),
        )

    def sums(self, tokens: Ints) -> Ints:
        return np.add.reduceat(tokens, self.first_round[:-1]) if len(tokens) else tokens

    def is_served(self, most_tokens: int) -> bool:
        """Whether all sessions arrive in order, and each fits a worker of ``most_tokens`` tokens of K/V."""
        if not len(self.arrival_s) or (np.diff(self.arrival_s) < 0).any():
            return False
        return int(self.sums(self.prefill + self.decode).max()) <= most_tokens


class Asks:
    """Answers the core's questions about costs and policies. An exception stops the run and is raised after it."""

    def __init__(self, costs: Sequence[StepCost], policies: Policies, routing: Rule) -> None:
        self.costs, self.routing = costs, routing
        self.error: BaseException | None = None
        self.estimates: list[Any] = [getattr(policies.estimator, "prefill_s", None), *routing.estimates]

    def answer(self, question: int, key: int, num: int, inputs: Any, out: Any) -> int:
        """Write the answer to ``out`` and return its length, or -1 after an exception. ``key`` is the index of a cost, or a degree."""
        try:
            if question < _ESTIMATE:
                numbers = self._costs(question, self.costs[key], num, inputs)
            elif question == _DRAW:
                numbers = [self.routing.draw() for _ in range(num)]
            else:
                numbers = [self.estimates[question - _ESTIMATE](*inputs[:num], key)]
        except BaseException as error:
            self.error = error
            return -1
        return write_numbers(numbers, out)

    def _costs(self, question: int, cost: StepCost, num: int, inputs: Any) -> Sequence[float]:
        if question == _LINE and num > 0:
            return cost.decode_line(num)
        if not _is_composed(cost):
            chunks = [Chunk(inputs[2 + 2 * index], inputs[3 + 2 * index]) for index in range(num)]
            return [cost.step_s(chunks, inputs[0], inputs[1])]
        kernels = cost.price.kernels  # type: ignore[attr-defined]
        return kernels.decode_line(-num) if question == _LINE else kernel_times(kernels, question, num)


def kernel_times(kernels: Kernels, question: int, num: int) -> Sequence[float]:
    """Seconds of the layers or of the head for ``num`` rows, or the power laws of the attention of ``num`` prompts."""
    if question == _LAW:
        laws = kernels.prompts_s(num)
        return [*laws.sizes, *laws.times, *laws.powers]
    return [kernels.layers_s(num) if question == _LAYERS else kernels.head_s(num)]


def write_numbers(numbers: Sequence[float], out: Any) -> int:
    """Write numbers to the core's memory and return how many."""
    for index, number in enumerate(numbers):
        out[index] = number
    return len(numbers)


def _is_composed(cost: StepCost) -> TypeGuard[WorkerCost]:
    return type(cost) is WorkerCost and type(cost.price) is Composed


class Made:
    """A run in the core's memory, which is freed when no array refers to it any longer."""

    def __init__(self, library: CDLL, setup: Structure) -> None:
        library.begin.restype = c_void_p
        self.library, self.run = library, c_void_p(library.begin(byref(setup)))
        self.is_given_up = False
        """Whether an exception in Python stopped the run, or only Python can make it."""

    def __del__(self) -> None:
        self.library.let_go(self.run)

    def finish(self) -> _Totals:
        totals, has_more = _Totals(), 1
        while has_more > 0:
            with delay_signals():  # an exception that Ctrl-C raises while Python answers the core would be lost
                has_more = self.library.go_on(self.run, c_int64(_EVENTS), byref(totals))
        self.is_given_up = has_more < 0
        return totals

    def ints(self, name: str) -> Ints:
        return self._column(name, c_int64)

    def seconds(self, name: str) -> Floats:
        return self._column(name, c_double)

    def _column(self, name: str, kind: Any) -> Any:
        address = c_void_p()
        size = self.library.column_of(self.run, name.encode(), byref(address))
        if not size or address.value is None:
            return np.empty(0, kind)
        array = (kind * size).from_address(address.value)
        array.made = self
        return np.frombuffer(array, kind)

    def table(self, name: str) -> Table:
        return {column.name: self._values(f"{name}_{column.name}") for column in fields(ROWS[name])}

    def _values(self, name: str) -> Values:
        if name.endswith("_s"):
            return times_of(self.seconds(name))
        values = self.ints(name)
        if name.endswith("is_local"):
            return Values(values.astype(bool))
        if name in _NAMES:
            return Values(values.astype(np.int8), names=_NAMES[name])
        return Values(values, missing=-1 if name.startswith(("task_computed", "worker_kv")) else None)


def _limits(batching: Batching) -> tuple[int, int, int]:
    tokens, sequences = (getattr(batching, name, 0) for name in ("max_num_batched_tokens", "max_num_seqs"))
    return _BATCHING.index(type(batching)), tokens, sequences


def ints_of(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)
