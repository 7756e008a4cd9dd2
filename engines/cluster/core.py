"""Runs of co-located workers by ``core.cpp``: the numbers of ``engines.cluster.simulation``, to the last bit, in a tenth of the time.

It knows our own policies alone. Runs of others stay in Python, and so do short ones where nothing is compiled yet.
"""

import math
from collections.abc import Sequence
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from engines.cluster.hardware import EngineTimes, StepCost, WorkerCost
from engines.cluster.record import (
    ClusterRun,
    Floats,
    GapLog,
    Ints,
    RoundRow,
    SessionRow,
    Table,
    TaskRow,
    TransferRow,
    Values,
    WorkerRow,
    prefill_load,
    same,
    table_of,
    times_of,
)
from engines.cluster.sessions import Session, SessionColumns
from engines.compiled import CompilerError, Library, loaded
from engines.cost.kernels import Composed
from engines.policies.batching import Chunked, OneByOne, PrefillFirst
from engines.policies.routing import FewestSessions, LeastKvMemory, RoundRobin
from engines.policies.views import Batching, Chunk

LIBRARY = Library("cluster", (Path(__file__).with_suffix(".cpp"),), ("-O2", "-ffp-contract=off"))
"""No two operations become one of another rounding."""
LONG = 2000
"""Rounds of a run that is worth the seconds of a compiler."""
_BATCHING: tuple[type, ...] = OneByOne, PrefillFirst, Chunked
_BINDING: tuple[type, ...] = RoundRobin, LeastKvMemory, FewestSessions
_LAYERS, _HEAD, _LINE, _LAW = range(4)

_Ask = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64, POINTER(c_int64), POINTER(c_double))


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Setup(Structure):
    _fields_ = [
        *_fields("num_sessions num_workers num_costs", c_int64),
        *_fields("arrival_s first_round prefill decode delay_s worker_cost worker_capacity cost_terms", c_void_p),
        *_fields("batching max_tokens max_seqs binding keeps schedules_ahead max_run_steps max_live", c_int64),
        *_fields("keep_s request_s response_s until_s", c_double),
        ("ask", _Ask),
    ]


class _Columns(Structure):
    _fields_ = [
        *_fields("session_worker session_finished_s", c_void_p),
        ("num_rounds", c_int64),
        *_fields(
            "round_session round_index round_ready_s round_history round_first_token_s round_finished_s", c_void_p
        ),
        ("num_tasks", c_int64),
        *_fields("task_row task_recomputes task_worker task_history task_tokens task_computed", c_void_p),
        *_fields("task_ready_s task_started_s task_finished_s", c_void_p),
        ("num_stays", c_int64),
        *_fields("stay_row stay_first_gap_s stay_start stay_end stay_worker", c_void_p),
    ]


class _Totals(Structure):
    _fields_ = [*_fields("num_arrived num_live num_events has_too_many", c_int64), ("now", c_double)]


@cache
def _library(is_long: bool) -> CDLL | None:
    """None where nothing can be compiled, or a short run would wait for it. Asked once, as a grid has thousands of runs."""
    try:
        return loaded(LIBRARY) if is_long or LIBRARY.kept(LIBRARY.command()).is_file() else None
    except CompilerError:
        return None


class CoreWorker(NamedTuple):
    degree: int
    server: int
    cost: StepCost
    kv_capacity: int


class CoreRun(NamedTuple):
    """What a run is asked for; see ``Policies``, ``EngineTimes`` and ``StopRule``."""

    workers: Sequence[CoreWorker]
    batching: Batching
    binder: object
    reason: str
    """What the router says of each prefill."""
    keeps: bool
    keep_s: float
    engine: EngineTimes
    until_s: float | None
    max_live_sessions: int | None
    max_run_steps: int

    def simulate(self, sessions: Sequence[Session]) -> ClusterRun | None:
        """None of a run that only Python can make: of policies that are not ours, sessions that it refuses, or a short one where
        nothing is compiled yet."""
        if type(self.batching) not in _BATCHING or type(self.binder) not in _BINDING:
            return None
        load = _Load.of(sessions)
        least = min(worker.kv_capacity for worker in self.workers)
        if not load.is_served(least):
            return None
        library = _library(len(load.prefill) >= LONG)
        return None if library is None else self._run(library, load)

    def _run(self, library: CDLL, load: "_Load") -> ClusterRun:
        costs = list({id(each.cost): each.cost for each in self.workers}.values())
        asks = _Asks(costs)
        arrays = {
            **load._asdict(),
            "worker_cost": np.array([costs.index(each.cost) for each in self.workers], dtype=np.int64),
            "worker_capacity": np.array([each.kv_capacity for each in self.workers], dtype=np.int64),
            "cost_terms": np.array([(1.0, *each.terms) if _is_composed(each) else (0.0,) * 7 for each in costs]),
        }
        largest = np.iinfo(np.int64).max
        setup = _Setup(
            num_sessions=len(load.arrival_s),
            num_workers=len(self.workers),
            num_costs=len(costs),
            **{name: array.ctypes.data for name, array in arrays.items() if name != "session_id"},
            batching=_BATCHING.index(type(self.batching)),
            max_tokens=getattr(self.batching, "max_num_batched_tokens", 0),
            max_seqs=getattr(self.batching, "max_num_seqs", 0),
            binding=_BINDING.index(type(self.binder)),
            keeps=self.keeps,
            schedules_ahead=self.engine.schedules_ahead,
            max_run_steps=min(self.max_run_steps, largest),
            max_live=-1 if self.max_live_sessions is None else self.max_live_sessions,
            keep_s=self.keep_s,
            request_s=self.engine.request_s,
            response_s=self.engine.response_s,
            until_s=math.inf if self.until_s is None else self.until_s,
            ask=_Ask(asks.answer),
        )
        totals = _Totals()
        library.simulate.restype = c_void_p
        made = _Made(library, c_void_p(library.simulate(byref(setup), byref(totals))))
        if asks.error is not None:
            raise asks.error
        return self._record(made, load, totals)

    def _record(self, made: "_Made", load: "_Load", totals: _Totals) -> ClusterRun:
        columns = _Columns()
        made.library.columns_of(made.run, byref(columns))
        workers, logs = self._workers(made)
        num = columns.num_stays
        worker, row, start, end = (
            made.ints(columns, f"stay_{name}", num) for name in ("worker", "row", "start", "end")
        )
        first_gap_s = made.array(columns.stay_first_gap_s, num, c_double)
        return ClusterRun(
            **_tables(made, columns, load, totals.num_arrived, self.reason),
            transfers=table_of(TransferRow, []),
            workers=table_of(WorkerRow, workers),
            gaps=GapLog.of(logs, worker, row, start, end, first_gap_s),
            facts={
                "num_events": totals.num_events,
                "end_s": totals.now,
                "stop_reason": self._why_stopped(totals, len(load.arrival_s)),
                **prefill_load(((each.role, each.busy_prefill_s) for each in workers), load.span_s(totals.num_arrived)),
            },
        )

    def _why_stopped(self, totals: _Totals, num: int) -> str | None:
        if totals.has_too_many:
            return f"unstable: over {self.max_live_sessions} sessions at once at {totals.now:g} s"
        if totals.num_live or totals.num_arrived < num:
            return f"stopped at {totals.now:g} s with {totals.num_live} sessions unfinished"
        return None

    def _workers(self, made: "_Made") -> tuple[list[WorkerRow], list[tuple[Floats, Ints]]]:
        """Their rows, and the gaps of each one's log with how many of them follow each other."""
        rows, logs = [], []
        for index, worker in enumerate(self.workers):
            counts, seconds, gaps, lengths = (c_int64 * 5)(), (c_double * 2)(), c_void_p(), c_void_p()
            size = made.library.worker_of(made.run, c_int64(index), counts, seconds, byref(gaps), byref(lengths))
            logs.append((made.array(gaps.value, size, c_double), made.array(lengths.value, size, c_int64)))
            rows.append(
                WorkerRow(
                    worker_id=index,
                    role="decode",
                    degree=worker.degree,
                    server=worker.server,
                    busy_prefill_s=seconds[0],
                    busy_decode_s=seconds[1],
                    num_prefills=counts[0],
                    prefilled_tokens=counts[1],
                    kv_capacity=worker.kv_capacity,
                    kv_peak=counts[2],
                    kv_evicted=counts[3],
                    num_preemptions=counts[4],
                )
            )
        return rows, logs


class _Load(NamedTuple):
    """Sessions by columns; rounds of all one after the other, those of session i from ``first_round[i]`` on."""

    session_id: Ints
    arrival_s: Floats
    first_round: Ints
    prefill: Ints
    decode: Ints
    delay_s: Floats

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> "_Load":
        if isinstance(sessions, SessionColumns):
            index = np.arange(len(sessions) + 1)
            delay_s = np.zeros(len(sessions))
            return cls(index[:-1], sessions.arrival_s, index, sessions.prefill, sessions.decode, delay_s)
        rounds = [each.rounds for each in sessions]
        every = list(chain.from_iterable(rounds))
        return cls(
            session_id=np.array([each.session_id for each in sessions], dtype=np.int64),
            arrival_s=np.array([each.arrival_s for each in sessions], dtype=np.float64),
            first_round=np.cumsum([0, *map(len, rounds)], dtype=np.int64),
            prefill=np.array([each.prefill_tokens for each in every], dtype=np.int64),
            decode=np.array([each.decode_tokens for each in every], dtype=np.int64),
            delay_s=np.array([each.delay_s for each in every], dtype=np.float64),
        )

    def sums(self, tokens: Ints) -> Ints:
        return np.add.reduceat(tokens, self.first_round[:-1]) if len(tokens) else tokens

    def is_served(self, most_tokens: int) -> bool:
        """Whether all come in order, and fit a worker."""
        if not len(self.arrival_s) or (np.diff(self.arrival_s) < 0).any():
            return False
        return int(self.sums(self.prefill + self.decode).max()) <= most_tokens

    def span_s(self, num: int) -> float:
        return float(self.arrival_s[num - 1]) if num else 0.0


class _Asks:
    """What the core asks of the costs; an exception stops the run and is raised behind it."""

    def __init__(self, costs: Sequence[StepCost]) -> None:
        self.costs = costs
        self.error: BaseException | None = None

    def answer(self, question: int, cost: int, num: int, given: Any, out: Any) -> int:
        try:
            numbers = self._numbers(question, self.costs[cost], num, given)
        except BaseException as error:
            self.error = error
            return -1
        for place, number in enumerate(numbers):
            out[place] = number
        return len(numbers)

    def _numbers(self, question: int, cost: StepCost, num: int, given: Any) -> Sequence[float]:
        if question == _LINE and num > 0:
            return cost.decode_line(num)
        if not _is_composed(cost):
            chunks = [Chunk(given[2 + 2 * each], given[3 + 2 * each]) for each in range(num)]
            return [cost.step_s(chunks, given[0], given[1])]
        kernels = cost.price.kernels  # type: ignore[attr-defined]
        if question == _LINE:
            return kernels.decode_line(-num)
        if question == _LAW:
            laws = kernels.prompts_s(num)
            return [*laws.sizes, *laws.times, *laws.powers]
        return [kernels.layers_s(num) if question == _LAYERS else kernels.head_s(num)]


def _is_composed(cost: StepCost) -> TypeGuard[WorkerCost]:
    return type(cost) is WorkerCost and type(cost.price) is Composed


class _Made:
    """A run in the core's memory, which goes when no array of it is left."""

    def __init__(self, library: CDLL, run: c_void_p) -> None:
        self.library, self.run = library, run

    def __del__(self) -> None:
        self.library.let_go(self.run)

    def ints(self, columns: _Columns, name: str, size: int) -> Ints:
        found: Ints = self.array(getattr(columns, name), size, c_int64)
        return found

    def array(self, address: int | None, size: int, kind: Any) -> Any:
        if not size:
            return np.empty(0, kind)
        content = (kind * size).from_address(address)
        content.made = self
        return np.frombuffer(content, kind)


def _tables(made: _Made, columns: _Columns, load: _Load, num: int, reason: str) -> dict[str, Table]:
    """Tables of ``num`` sessions, of rounds and of tasks, their columns in the order of the rows' fields."""

    def ints(name: str, size: int) -> Ints:
        return made.ints(columns, name, size)

    def times(name: str, size: int) -> Values:
        return times_of(made.array(getattr(columns, name), size, c_double))

    num_rounds, num_tasks = columns.num_rounds, columns.num_tasks
    session, index, task_row = (
        ints("round_session", num_rounds),
        ints("round_index", num_rounds),
        ints("task_row", num_tasks),
    )
    row_round = load.first_round[session] + index
    is_routed = np.zeros(num_rounds, dtype=bool)
    is_routed[task_row] = True
    recomputes = ints("task_recomputes", num_tasks).astype(bool)
    kinds = np.where(recomputes, 2, np.minimum(index[task_row], 1)).astype(np.int8)
    task_finished_s = times("task_finished_s", num_tasks)
    rounds = (
        Values(load.session_id[session]),
        Values(index),
        times("round_ready_s", num_rounds),
        Values(ints("round_history", num_rounds)),
        Values(load.prefill[row_round]),
        Values(load.decode[row_round]),
        times("round_first_token_s", num_rounds),
        times("round_finished_s", num_rounds),
        Values(is_routed),
    )
    tasks = (
        Values(np.arange(num_tasks)),
        Values(load.session_id[session[task_row]]),
        Values(index[task_row]),
        Values(kinds, names=("initial", "incremental", "recompute")),
        Values(ints("task_worker", num_tasks)),
        same(True, num_tasks),
        same(reason, num_tasks),
        Values(ints("task_history", num_tasks)),
        Values(ints("task_tokens", num_tasks)),
        Values(ints("task_computed", num_tasks), missing=-1),
        Values(np.broadcast_to(0.0, num_tasks)),
        times("task_ready_s", num_tasks),
        times("task_started_s", num_tasks),
        task_finished_s,
        task_finished_s,
        Values(np.broadcast_to(0, num_tasks)),
    )
    sessions = _sessions(load, num, ints("session_worker", num), times("session_finished_s", num))
    found = {"sessions": (SessionRow, sessions), "rounds": (RoundRow, rounds), "tasks": (TaskRow, tasks)}
    return {
        name: dict(zip((each.name for each in fields(kind)), own, strict=True)) for name, (kind, own) in found.items()
    }


def _sessions(load: _Load, num: int, worker: Ints, finished_s: Values) -> tuple[Values, ...]:
    return (
        Values(load.session_id[:num]),
        Values(load.arrival_s[:num]),
        Values(np.diff(load.first_round)[:num]),
        Values(load.sums(load.prefill)[:num]),
        Values(load.sums(load.decode)[:num]),
        Values(worker),
        finished_s,
        Values(finished_s.is_missing.astype(np.int8), names=("ok", "unfinished")),
    )
