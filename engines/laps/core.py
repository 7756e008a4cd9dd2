"""Simulates prefill instances in ``core.cpp``: the same numbers as ``engines.laps.cluster``, to the last bit, in 1/20 of the time.

It knows only our own policies. Runs with other policies stay in Python, and so do all runs if nothing can be compiled.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from ctypes import CDLL, Structure, c_double, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engines.cluster.core import OPTIONS, SHARED, Ask, Load, Made, fields_of, kernel_times, library_for, write_numbers
from engines.cluster.record import Floats, Ints, Table, times_of
from engines.cluster.sessions import ClosedLoop, OpenLoop, Session
from engines.columns import Values
from engines.compiled import Library
from engines.cost.kernels import Composed, Kernels
from engines.laps.batching import ClassQueue, Ladder, Nearest, WithGraphs
from engines.laps.latency import StepModel
from engines.laps.system import Adjustment, PrefillSystem, PressureController, Signals
from engines.policies.views import Bucket, Fallback, OpenQueue, PrefillQueue, Rule, Rung, rule_of

LIBRARY = Library("laps", (Path(__file__).with_suffix(".cpp"),), OPTIONS, SHARED)
_BATCHING = "chunked", "temporal", "reserve", "moore-hodgson", "on-time"
_ROUTING = "in-turn", "least-requests", "least-tokens", "least-in-pool", "cache-aware"
_TURNS, _OPEN, _CLOSED = range(3)
_CLASSES = "short", "long"
_OF_TEMPORAL = 7
"""How many limits of a temporal rule are its own. Those of waiting follow, and then the depths."""
_OF_WAITING = 9


class _Setup(Structure):
    _fields_ = [
        *fields_of("num_streams num_instances num_shapes", c_int64),
        *fields_of("streams think_s session_id arrival_s first_round prefill decode delay_s turns turn_s", c_void_p),
        *fields_of("factors batching wait own_model graph_model work_model router constants", c_void_p),
        *fields_of("depths shapes shape_s lengths batches cover", c_void_p),
        *fields_of("num_depths num_lengths num_batches", c_int64),
        *fields_of("batching_kind choice router_kind compares boundary class_boundary num_short", c_int64),
        *fields_of("reprefills is_shared is_global has_works compensates", c_int64),
        *fields_of("most_padding slo_s period_s until_s", c_double),
        ("prices", c_void_p),
        ("ask", Ask),
    ]


def simulate(cluster: Any, streams: Sequence[Any], until_s: float) -> dict[str, Any] | None:
    """Return the tables and facts of a ``PrefillCluster``'s run. None if only Python can make it: policies or prices are not ours, arrivals
    have to be refused, or the run is short and nothing is compiled yet."""
    system, cost, slo_s = cluster.system, cluster.cost, cluster.slo_s
    if type(cost.price) is not Composed:
        return None
    policies, arrivals = _Policies.of(system, cluster.num_instances), _arrivals(streams)
    if policies is None or arrivals is None:
        return None
    library = library_for(LIBRARY, arrivals.num_turns)
    if library is None:
        return None
    spatial, decides = system.spatial, _Decides(system)
    arrays = {
        **arrivals.sessions._asdict(),
        **{name: getattr(arrivals, name) for name in ("streams", "think_s", "turns", "turn_s")},
        **policies.arrays,
        "factors": policies.factors(arrivals.num_turns),
        "constants": _constants(cost),
    }
    setup = _Setup(
        num_streams=len(arrivals.think_s),
        num_instances=cluster.num_instances,
        **{name: array.ctypes.data for name, array in arrays.items() if array is not None},
        **policies.numbers,
        boundary=cluster.boundary,
        num_short=0 if spatial is None else spatial.num_short,
        reprefills=cluster.reprefills_answer,
        is_shared=cluster.cache == "shared",
        is_global=spatial is not None and spatial.pooling == "global",
        compensates=sys.version_info >= (3, 12),
        slo_s=math.inf if slo_s is None else slo_s,
        period_s=0.0 if decides.controller is None else decides.controller.config.period_s,
        until_s=until_s,
        prices=_prices(library, cost.price.kernels).at,
        ask=Ask(decides.answer),
    )
    totals = (run := Made(library, setup)).finish()
    if decides.error is not None:
        raise decides.error
    if run.is_given_up:
        return None
    return {
        "requests": _requests(run, cluster.boundary, slo_s, totals.now),
        "steps": _steps(run, policies.modes),
        "moves": _moves(run, decides.made),
        "instances": _instances(run, has_pools=spatial is not None),
        "facts": {"end_s": totals.now, "num_events": totals.num_events},
    }


def _constants(cost: Any) -> Floats:
    constants = cost.constants
    return _floats(
        *(constants.step_overhead_s, constants.request_overhead_s, constants.graph_check_s, constants.graph_launch_s),
        *(cost.launch_s, constants.kappa, constants.boundary, constants.overlap == "add"),
    )


# ---- what a run is given ----------------------------------------------------------------------------------------------


class _Policies(NamedTuple):
    numbers: Mapping[str, Any]
    arrays: Mapping[str, Any]
    modes: Sequence[str]
    """Names of the modes as in the steps table, by the core's numbers."""
    belief: Any
    """The policy's config, which may say how it misjudges the work of a prefill."""

    @classmethod
    def of(cls, system: PrefillSystem, num_instances: int) -> "_Policies | None":
        batchings = [system.make_batching() for _ in range(num_instances)]
        pairs = [(each.batching, each.choice) if type(each) is WithGraphs else (each, None) for each in batchings]
        rules, choices = {rule_of(batching) for batching, _ in pairs}, {id(choice): choice for _, choice in pairs}
        rule, graphs = rules.pop(), _graphs_of(choices.popitem()[1])
        queue, router, works = system.make_queue(), rule_of(system.make_router()), _terms_of(system.work_s)
        is_classed = type(queue) is ClassQueue
        if rules or choices or graphs is None or router is None or works is None or rule is None or rule.terms is None:
            return None
        if rule.kind not in _BATCHING or router.kind not in _ROUTING or is_classed != (rule.kind == "temporal"):
            return None
        if not is_classed and type(queue) not in (PrefillQueue, OpenQueue):
            return None
        depths = rule.limits[_OF_TEMPORAL + _OF_WAITING :] if is_classed else ()
        graph_numbers, graph_arrays, modes = graphs
        numbers = {
            **graph_numbers,
            "num_depths": len(depths),
            "batching_kind": _BATCHING.index(rule.kind),
            "router_kind": _ROUTING.index(router.kind),
            "class_boundary": queue.boundary if isinstance(queue, ClassQueue) else 0,
            "has_works": bool(works),
        }
        arrays = {
            **graph_arrays,
            "depths": np.array(depths, dtype=np.int64),
            "batching": _floats(*rule.limits),
            "wait": _floats(*(rule.limits[_OF_TEMPORAL:] if is_classed else [0.0] * _OF_WAITING)),
            "own_model": _terms(rule.terms),
            "work_model": _terms(works),
            "router": _floats(*router.limits),
        }
        return cls(numbers, arrays, modes, getattr(pairs[0][0], "config", None))

    def factors(self, num: int) -> Floats | None:
        if not getattr(self.belief, "misjudged", 0.0):
            return None
        return _floats(*(self.belief.factor_of(number) for number in range(num)))


def _terms_of(work_s: Any) -> tuple[float, ...] | None:
    """Constants of the model that predicts the work of a prefill; empty without a model, None if the model is not ours."""
    if work_s is None:
        return ()
    model = getattr(work_s, "__self__", None)
    return model.terms if type(model) is StepModel and work_s == model.work_s else None


def _graphs_of(choice: object) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
    """Return the core's numbers and arrays about how steps choose among captured shapes, and the names of their modes."""
    rule = Rule("none") if choice is None else rule_of(choice)
    times = getattr(choice, "times", None)
    if rule is None or not (times is None or type(times) is StepModel):
        return None
    shapes: list[Any] = []
    lengths = batches = cover_index = list[int]()
    if isinstance(choice, Ladder):
        shapes = choice.rungs
    elif isinstance(choice, Nearest):
        lengths, batches = choice.lengths, choice.batches
        cells = [shape for row in choice.cover for shape in row]
        shapes = [*dict.fromkeys(shape for shape in cells if shape is not None)]
        cover_index = [-1 if shape is None else shapes.index(shape) for shape in cells]
    numbers = {
        "choice": ("none", "nearest", "ladder").index(rule.kind),
        "compares": times is not None,
        "num_shapes": len(shapes),
        "num_lengths": len(lengths),
        "num_batches": len(batches),
        "most_padding": rule.limits[0] if rule.limits else math.inf,
    }
    sizes = [(shape.length, shape.batch) if isinstance(shape, Bucket) else (shape.tokens, 0) for shape in shapes]
    arrays = {
        **{name: np.array(values, dtype=np.int64) for name, values in (("lengths", lengths), ("batches", batches))},
        "cover": np.array(cover_index, dtype=np.int64),
        "shapes": np.array(sizes, dtype=np.int64),
        "shape_s": _floats(*(0.0 if times is None else times.shapes[shape] for shape in shapes)),
        "graph_model": _terms(() if times is None else times.terms),
    }
    return numbers, arrays, [label(mode) for mode in (None, Fallback(), *shapes)]


def label(mode: object) -> str:
    """Name of a mode in the steps table: "eager", "fallback", "graph 64x8" or "rung 512"."""
    if mode is None:
        return "eager"
    if isinstance(mode, Fallback):
        return "fallback"
    if isinstance(mode, Bucket):
        return f"graph {mode.length}x{mode.batch}"
    if isinstance(mode, Rung):
        return f"rung {mode.tokens}"
    return str(mode)


class _Arrivals(NamedTuple):
    streams: Ints
    """[n, 4] kind of each stream, first and end index of its turns or sessions, and clients."""
    think_s: Floats
    sessions: Load
    turns: Ints
    turn_s: Floats
    num_turns: int


_SEEN: dict[tuple[int, ...], tuple[Sequence[Any], _Arrivals | None]] = {}
_KEPT = 64
"""How many streams' columns we keep, because compared systems serve the same streams."""


def _arrivals(streams: Sequence[Any]) -> _Arrivals | None:
    """Columns of the streams; None if Python has to look at the arrivals one by one."""
    key = tuple(map(id, streams))
    if key not in _SEEN:
        if len(_SEEN) == _KEPT:
            _SEEN.clear()
        _SEEN[key] = streams, _columns(streams)
    return _SEEN[key][1]


def _columns(streams: Sequence[Any]) -> _Arrivals | None:
    rows, think_s = list[tuple[int, ...]](), list[float]()
    sessions, turns = list[Session](), list[Any]()
    for stream in streams:
        is_loop = isinstance(stream, OpenLoop | ClosedLoop)
        items, all_items = (stream.sessions, sessions) if is_loop else (stream.turns, turns)
        if not isinstance(items, list | tuple):
            return None
        is_closed = isinstance(stream, ClosedLoop)
        times = [turn.arrival_s for turn in items]
        if not is_closed and times != sorted(times):
            return None
        kind = _CLOSED if is_closed else _OPEN if is_loop else _TURNS
        start = len(all_items)
        all_items.extend(items)  # type: ignore[arg-type]
        rows.append((kind, start, len(all_items), stream.num_clients if is_closed else 0))
        think_s.append(stream.think_s if is_closed else 0.0)
    turn_table = np.array([turn[1:] for turn in turns], dtype=np.int64).reshape(-1, 5)
    turn_s = _floats(*(turn.arrival_s for turn in turns))
    _, _, history, tokens, answers = turn_table.T
    if (tokens < 1).any() or (answers < 0).any() or (answers > history).any() or (turn_s < 0).any():
        return None
    load = Load.of(sessions)
    return _Arrivals(
        np.array(rows, dtype=np.int64), _floats(*think_s), load, turn_table, turn_s, len(load.prefill) + len(turn_s)
    )


class _Prices:
    """A framework's kernel times in the core's memory, for all runs of a process."""

    def __init__(self, library: CDLL, kernels: Kernels) -> None:
        self._kernels, self._ask = kernels, Ask(self._answer)
        library.prices_of.restype = c_void_p
        self.at = library.prices_of(self._ask)

    def _answer(self, question: int, key: int, num: int, inputs: Any, out: Any) -> int:
        return write_numbers(kernel_times(self._kernels, question, num), out)


_prices = lru_cache(maxsize=64)(_Prices)


class _Decides:
    """The controller of the pools, which the core asks. An exception stops the run and is raised after it."""

    def __init__(self, system: PrefillSystem) -> None:
        config = None if system.spatial is None else system.spatial.controller
        self.controller = None if config is None else PressureController(config)
        self.made: list[Adjustment] = []
        """The adjustments that moved an instance."""
        self.error: BaseException | None = None

    def answer(self, question: int, key: int, num: int, inputs: Any, buffer: Any) -> int:
        """``buffer`` holds the time, then each instance's pool and signals. The answer in ``buffer[0]``: the pool that grows, from 1, or 0."""
        try:
            assert self.controller is not None
            pools: tuple[list[Signals], list[Signals]] = [], []
            for index in range(num):
                pool, *signals = buffer[1 + 4 * index : 5 + 4 * index]
                pools[int(pool)].append(Signals(*signals))
            adjustment = self.controller.decide(*pools, buffer[0])
        except BaseException as error:
            self.error = error
            return -1
        buffer[0] = 0.0
        if adjustment.grows is not None:
            self.made.append(adjustment)
            buffer[0] = 1 + _CLASSES.index(adjustment.grows)
        return 1


def _floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float64)


def _terms(terms: Sequence[float]) -> Floats:
    return _floats(*(terms or [0.0] * 7))


# ---- what it leaves ---------------------------------------------------------------------------------------------------


def _requests(results: Made, boundary: int, slo_s: float | None, end_s: float) -> Table:
    ints = {name: results.ints(f"request_{name}") for name in REQUEST_INTS}
    times = {name: results.seconds(f"request_{name}") for name in REQUEST_TIMES}
    return request_table(ints, times, boundary=boundary, slo_s=slo_s, end_s=end_s)


REQUEST_INTS = "session_id", "turn", "history", "tokens", "worker"
REQUEST_TIMES = "ready_s", "started_s", "landed_s"


def request_table(
    ints: Mapping[str, Ints], times: Mapping[str, Floats], *, boundary: int, slo_s: float | None, end_s: float
) -> Table:
    """Return the columns of the requests, turns in order of arrival, from arrays [n] by the names ``REQUEST_INTS`` and ``REQUEST_TIMES``.

    ``history`` and ``tokens`` are as prefilled: history that was not cached where it ran counts as tokens. ``started_s``,
    ``finished_s`` (the first token) and ``instance`` are null if the run ended before. ``violated`` says whether the first token came
    later than the objective allows, and is null if the run's end left that open.
    """
    session_id, turn, history, tokens, worker = (ints[name] for name in REQUEST_INTS)
    ready_s, started_s, landed_s = (times[name] for name in REQUEST_TIMES)
    num, is_open = len(ready_s), np.isnan(landed_s)
    is_late = np.zeros(num, dtype=bool)
    if slo_s is not None:
        is_late = ready_s + slo_s < np.where(is_open, end_s, landed_s)
    return {
        "request_id": Values(np.arange(num)),
        "session_id": Values(session_id),
        "turn": Values(turn),
        "length_class": Values((tokens >= boundary).astype(np.int8), names=_CLASSES),
        "history": Values(history),
        "tokens": Values(tokens),
        "arrival_s": Values(ready_s),
        "started_s": times_of(started_s),
        "finished_s": times_of(landed_s),
        "instance": Values(np.where(np.isnan(started_s), -1, worker), missing=-1),
        "deadline_s": [None] * num if slo_s is None else Values(ready_s + slo_s),
        "violated": Values(np.where(is_late, 1, np.where(is_open, 2, 0)), names=(False, True, None)),
    }


def _steps(results: Made, modes: Sequence[str]) -> Table:
    start_s, instance = results.seconds("step_start_s"), results.ints("step_instance")
    order = np.lexsort((instance, start_s))
    counts = ("tokens", "padded_tokens", "num_short", "num_long", "num_finished")
    return {
        "instance": Values(instance[order]),
        "start_s": Values(start_s[order]),
        "duration_s": Values(results.seconds("step_duration_s")[order]),
        **{name: Values(results.ints(f"step_{name}")[order]) for name in counts},
        "mode": Values(results.ints("step_mode")[order], names=modes),
    }


def _moves(results: Made, adjustments: Sequence[Adjustment]) -> Table:
    return {
        "time_s": results.seconds("move_time_s").tolist(),
        "instance": results.ints("move_instance").tolist(),
        "to": [adjustment.grows for adjustment in adjustments],
        "short_pressure": [adjustment.short_pressure for adjustment in adjustments],
        "long_pressure": [adjustment.long_pressure for adjustment in adjustments],
        "num_short": results.ints("move_num_short").tolist(),
    }


def _instances(results: Made, *, has_pools: bool) -> Table:
    pools = results.ints("instance_pool").tolist()
    counts = ("num_steps", "num_finished", "tokens", "padded_tokens")
    return {
        "instance": list(range(len(pools))),
        "pool": [_CLASSES[pool] if has_pools else None for pool in pools],
        "busy_s": results.seconds("instance_busy_s").tolist(),
        **{name: results.ints(f"instance_{name}").tolist() for name in counts},
    }
