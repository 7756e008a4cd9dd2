"""The family of diffusion-LLM systems: the tables, metrics and checks of their runs."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.columns import Values
from engines.dllm.config import Phase
from engines.dllm.engine import Engine
from engines.dllm.plan import Occupancy, PlanFacts, Request, StepChanges, StepOutcome, StepRecord
from engines.dllm.simulated import LETTERS, RecordingExecutor
from engines.runtime.step_timer import STEP_PARTS, DeviceTimes
from repro.runs.family import (
    Floats,
    column,
    distribution,
    family_in,
    late_submissions,
    request_times,
    served_per_second,
    status_counts,
    without_nan,
)
from repro.runs.record import REQUESTS, OnProgress, RunRecord, Table
from repro.runs.step_driver import Clock, RequestLog, drive_steps, in_arrival_order
from repro.tasks.task import Task

STEPS = "steps"
BLOCKS = "blocks"
"""A table for simulations that follow a run (``replay``). It is filled if a model decides how steps go, else empty."""
PART_COLUMNS = {f"{part}_s": part for part in STEP_PARTS}
"""Column of a profiled step -> part of the step."""


# -- metrics, each under the name that it has in metrics.csv --------------------------------------------------


def num_steps(record: RunRecord) -> int:
    return len(record.tables[STEPS]["step"])


def busy_s(record: RunRecord) -> float:
    return float(np.sum(column(record, "duration_s", STEPS)))


def step_requests(record: RunRecord) -> dict[str, Any]:
    return distribution(column(record, "num_refresh", STEPS) + column(record, "num_reuse", STEPS))


def _per_busy_second(values_of: Callable[[RunRecord], Floats]) -> Callable[[RunRecord], float | None]:
    """The sum of the values divided by the sum of durations, over the steps that have a value."""

    def compute(record: RunRecord) -> float | None:
        values = values_of(record)
        is_given = ~np.isnan(values)
        busy = float(column(record, "duration_s", STEPS)[is_given].sum())
        return float(values[is_given].sum()) / busy if busy > 0 else None

    return compute


def _kinds(record: RunRecord) -> dict[str, npt.NDArray[np.bool_]]:
    """Masks of the steps that are pure Refresh, pure Reuse and mixed. Empty steps are in none."""
    refreshes, reuses = column(record, "num_refresh", STEPS) > 0, column(record, "num_reuse", STEPS) > 0
    return {"refresh": refreshes & ~reuses, "reuse": reuses & ~refreshes, "mixed": refreshes & reuses}


def phase_mix(record: RunRecord) -> dict[str, float | None]:
    counts = {name: int(of_kind.sum()) for name, of_kind in _kinds(record).items()}
    shares = {name: count / sum(counts.values()) if any(counts.values()) else None for name, count in counts.items()}
    refresh, reuse = (float(column(record, name, STEPS).sum()) for name in ("num_refresh", "num_reuse"))
    return {
        "refresh_only_steps": shares["refresh"],
        "reuse_only_steps": shares["reuse"],
        "mixed_steps": shares["mixed"],
        "refresh_sequences": refresh / (refresh + reuse) if refresh + reuse else None,
    }


def budget_occupancy(record: RunRecord) -> float | None:
    cap, scheduled = record.manifest.get("max_num_batched_tokens"), column(record, "scheduled_tokens", STEPS)
    return float(scheduled.mean()) / cap if cap is not None and scheduled.size else None


def _kv_shares(record: RunRecord) -> Floats:
    """The share of its pool that each step used; NaN without a pool."""
    used, total = column(record, "kv_rows_used", STEPS), column(record, "kv_rows_total", STEPS)
    return np.divide(used, total, out=np.full_like(total, np.nan), where=total > 0)


mean_running = _per_busy_second(
    lambda record: column(record, "num_running", STEPS) * column(record, "duration_s", STEPS)
)
kv_occupancy = _per_busy_second(lambda record: _kv_shares(record) * column(record, "duration_s", STEPS))
roofline_share = _per_busy_second(lambda record: column(record, "bound_s", STEPS))
_forward_share = _per_busy_second(lambda record: column(record, "forward_s", STEPS))


def kv_occupancy_peak(record: RunRecord) -> float | None:
    shares = without_nan(_kv_shares(record))
    return float(shares.max()) if shares.size else None


def outside_forward_share(record: RunRecord) -> float | None:
    forward_share = _forward_share(record)
    return None if forward_share is None else 1.0 - forward_share


def graph_hit_rate(record: RunRecord) -> float | None:
    """The share of pure Reuse steps that ran a graph. Profiled steps do not count, because profiling them prevents graphs."""
    could_hit = _kinds(record)["reuse"] & np.isnan(column(record, "idle_s", STEPS))
    hits = np.asarray(record.tables[STEPS]["graph"], dtype=np.bool_)[could_hit]
    return float(hits.mean()) if hits.size else None


def host_share(record: RunRecord) -> float | None:
    by_kind = profile(record)
    return None if by_kind is None else by_kind["all"]["share"]["idle"]


def profile(record: RunRecord) -> dict[str, Any] | None:
    columns = {part: column(record, name, STEPS) for name, part in PART_COLUMNS.items()}
    profiled = ~np.isnan(columns["idle"])
    if not profiled.any():
        return None
    by_kind: dict[str, Any] = {}
    for name, of_kind in (*_kinds(record).items(), ("all", profiled)):
        steps = profiled & of_kind
        seconds = {part: float(values[steps].sum()) for part, values in columns.items()}
        total = sum(seconds.values())
        share = {part: value / total if total > 0 else None for part, value in seconds.items()}
        by_kind[name] = {"num_steps": int(steps.sum()), "seconds": seconds, "share": share}
    return by_kind


def _solved_share(record: RunRecord, verdict: str) -> dict[str, Any] | None:
    """value, low, high and n of ``correct`` or ``correct_strict``."""
    from repro.runs.statistics import wilson_interval

    verdicts = record.requests[verdict]
    if not verdicts or None in verdicts:
        return None
    n, solved = len(verdicts), sum(verdicts)
    low, high = wilson_interval(solved, n)
    return {"value": solved / n, "low": low, "high": high, "n": n}


accuracy, accuracy_strict = (partial(_solved_share, verdict=verdict) for verdict in ("correct", "correct_strict"))


# -- checks ---------------------------------------------------------------------------------------------------


def step_times(record: RunRecord) -> Iterator[str]:
    start, end, duration, forward = (
        column(record, name, STEPS) for name in ("start_s", "end_s", "duration_s", "forward_s")
    )
    if num_wrong := int((end < start).sum()):
        yield f"{num_wrong} steps end before they start"
        return
    if num_wrong := int((start[1:] < end[:-1]).sum()):
        yield f"{num_wrong} steps start before the previous one ends"
    if num_wrong := int(((duration < 0) | (forward < 0)).sum()):
        yield f"{num_wrong} steps have a negative duration"
    # A device may lag behind the steps that give it work. But it cannot begin before them or end after the last of them.
    # Two timers may differ by their resolution.
    to_come, to_end = np.cumsum(np.where(np.isnan(forward), 0, forward)[::-1])[::-1], end[-1:] - start
    if num_wrong := int((to_come > to_end * (1 + 1e-6) + 1e-6).sum()):
        yield f"{num_wrong} steps and those after them spend longer in the forward than they last"


def step_counts(record: RunRecord) -> Iterator[str]:
    if not record.tables[STEPS]["step"]:
        return
    counts, table = status_counts(record), record.tables[STEPS]
    for status, name in (("ok", "num_finished"), ("failed", "num_failed")):
        if (reported := int(np.sum(table[name]))) != counts[status]:
            yield f"steps report {reported} requests as {status}, the request table has {counts[status]}"
    used, total, computed = (np.asarray(table[name]) for name in ("kv_rows_used", "kv_rows_total", "query_tokens"))
    if num_wrong := int((used > total).sum()):
        yield f"{num_wrong} steps use more KV rows than the pool has"
    cap = record.manifest.get("max_num_batched_tokens")
    if cap is not None and (num_wrong := int((computed > cap).sum())):
        yield f"{num_wrong} steps compute up to {int(computed.max())} query tokens, max_num_batched_tokens={cap}"


def output_lengths(record: RunRecord) -> Iterator[str]:
    """Committed tokens must lie between the outputs' total and the tokens asked for. Open requests may have committed a part, and
    a request that a stop token ended has committed its whole block."""
    gen_lengths, output_lens = record.requests["gen_length"], record.requests["output_len"]
    rows = zip(record.requests["status"], gen_lengths, output_lens, strict=True)
    if wrong := sum(not 1 <= (n or 0) <= limit if status == "ok" else n is not None for status, limit, n in rows):
        yield f"{wrong} requests have an output_len that cannot be theirs"
        return
    if not record.tables[STEPS]["step"]:
        return
    low = sum(length for length in output_lens if length is not None)
    high = sum(gen_lengths)
    committed = int(np.sum(record.tables[STEPS]["committed_tokens"]))
    if not low <= committed <= high:
        yield f"wrong output lengths: {committed} tokens were committed, {low if committed < low else high} were due"


def submissions(record: RunRecord) -> Iterator[str]:
    """Requests must be submitted in time. If a step was running when a request fell due, we count from the step's end: every engine that
    admits between steps has this delay."""
    due_s = column(record, "arrival_s")
    earliest_s = due_s
    if record.tables[STEPS]["step"]:
        start, end = (column(record, name, STEPS) for name in ("start_s", "end_s"))
        running = np.searchsorted(start, due_s, side="right") - 1
        earliest_s = np.where(running >= 0, np.maximum(due_s, end[running]), due_s)
    yield from late_submissions(record, earliest_s)


def score(record: RunRecord) -> tuple[float, ...]:
    """The score of a trial, where less is better: minus tokens/s, then mean latency."""
    latencies = request_times(record, "e2el_s")
    rate = served_per_second(record, sum_column="output_len") or 0.0
    return -rate, float(latencies.mean()) if latencies.size else math.inf


DLLM = family_in(
    Path(__file__).parent, "dllm", globals(), checks=(step_times, step_counts, output_lengths, submissions), score=score
)
REQUEST_COLUMNS, STEP_COLUMNS, BLOCK_COLUMNS = DLLM.request_columns, DLLM.tables[STEPS], DLLM.tables[BLOCKS]


def drive_engine(
    engine: Engine,
    requests: Iterable[Request],
    clock: Clock,
    *,
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    recording: RecordingExecutor | None = None,
) -> RunRecord:
    """Run requests on an engine and return the record, in arrival order. Requests that are open when ``should_stop`` returns true are
    ``unfinished``. ``recording`` is the engine's executor, if it records steps."""
    ordered = in_arrival_order(requests)
    log = EngineLog(ordered)
    drive_steps(engine, ordered, clock, log, on_progress=on_progress, should_stop=should_stop)
    steps = log.step_table(engine.times())
    blocks = block_table({} if recording is None else recording.steps)
    return RunRecord(tables={REQUESTS: log.table, STEPS: steps, BLOCKS: blocks}, manifest={"obtained": clock.obtained})


def block_table(steps: Mapping[int, Mapping[int, Sequence[tuple[Phase, int]]]]) -> Table:
    """The table of blocks, one row each: the phases and committed tokens of its steps. ``steps`` is by request and block."""
    letters = {phase: letter for letter, phase in LETTERS.items()}
    table: Table = {column.name: [] for column in BLOCK_COLUMNS}
    for request_id in sorted(steps):
        for block, path in enumerate(steps[request_id].values()):
            phases, committed = "".join(letters[phase] for phase, _ in path), " ".join(str(count) for _, count in path)
            for name, value in zip(table, (request_id, block, phases, committed), strict=True):
                table[name].append(value)
    return table


_OUTCOME = ("committed_tokens", "query_tokens", "logit_rows", "forward_s", "graph", "bound_s")
_LENGTHS = {
    "admitted": "num_admitted",
    "first_block": "num_first_block",
    "finished": "num_finished",
    "failed": "num_failed",
}


class _StepColumns:
    """Columns of what steps share: a row is kept once for all steps in a row that give the same object."""

    def __init__(self, names: Sequence[str], row_of: Callable[[Any], tuple[Any, ...]]) -> None:
        self._names, self._row_of = names, row_of
        self.last: object = None
        self._starts: list[int] = []
        self._rows: list[tuple[Any, ...]] = []

    def add(self, index: int, value: object) -> None:
        self.last = value
        self._starts.append(index)
        self._rows.append(self._row_of(value))

    def columns(self, num: int) -> dict[str, Values]:
        """The columns of ``num`` steps."""
        starts = np.array([*self._starts, num])
        lengths = starts[1:] - starts[:-1]
        values = zip(*self._rows, strict=True) if self._rows else ([] for _ in self._names)
        return {
            name: _values(np.repeat(np.array(each), lengths)) for name, each in zip(self._names, values, strict=True)
        }


def _values(values: npt.NDArray[Any]) -> Values:
    if values.dtype == object:
        values = values.astype(np.float64)  # None becomes NaN
    return Values(values, missing=math.nan if values.dtype == np.float64 else None)


def _lengths_of(value: PlanFacts | StepChanges) -> tuple[int, ...]:
    return tuple([len(part) if isinstance(part, tuple) else part for part in value])


def _results(outcome: StepOutcome) -> tuple[Any, ...]:
    committed, query_rows, logit_rows, forward_s, _, graph, _, bound_s, *_ = outcome
    return sum(committed), query_rows, logit_rows, forward_s, graph, bound_s


class EngineLog(RequestLog):
    def __init__(self, ordered: Sequence[Request]) -> None:
        super().__init__(ordered, REQUEST_COLUMNS)
        self._gen_lengths = {request.request_id: request.generation.gen_length for request in ordered}
        self.table["gen_length"] = list(self._gen_lengths.values())
        self._num_steps = 0
        self._times = array("d")
        """Number, start, end and duration of one step after the other."""
        named = [[_LENGTHS.get(name, name) for name in kind._fields] for kind in (PlanFacts, StepChanges)]
        self._plans = _StepColumns(named[0], _lengths_of)
        self._changes = _StepColumns(named[1], _lengths_of)
        self._occupancies = _StepColumns(Occupancy._fields, tuple)
        self._outcomes = _StepColumns(_OUTCOME, _results)
        self._parts: dict[int, Mapping[str, float]] = {}
        """Seconds of each part of the profiled steps, by step number."""

    def stamp(self, step: StepRecord, start: float, end: float) -> None:
        index, (number, duration_s, plan, outcome, done, occupancy) = self._num_steps, step
        self._num_steps += 1
        self._times.extend((number, start, end, duration_s))
        if outcome is not self._outcomes.last:
            self._outcomes.add(index, outcome)
            if outcome.parts is not None:
                self._parts[number] = outcome.parts
        if occupancy is not self._occupancies.last:
            self._occupancies.add(index, occupancy)
        if plan is not self._plans.last:
            self._plans.add(index, plan)
            for request_id in plan.admitted:
                self.set_once("admitted_s", request_id, start)
        if done is not self._changes.last:
            self._changes.add(index, done)
            self._change(done, end)

    def _change(self, done: StepChanges, end: float) -> None:
        for request_id in done.first_block:
            self.set_once("first_output_s", request_id, end)
        for request_id in done.finished:
            output_len = dict(done.stopped).get(request_id, self._gen_lengths.get(request_id))
            self.close(request_id, "ok", finished_s=end, output_len=output_len)
        for request_id, reason in done.failed:
            self.close(request_id, "failed", error=reason)

    def step_table(self, timed: Mapping[int, DeviceTimes]) -> Table:
        """The columns of all steps. ``timed`` holds the times that the device reported afterwards, by step number."""
        number, start, end, duration_s = np.frombuffer(self._times).reshape(-1, 4).T.copy()
        columns = {"step": Values(number.astype(np.int64))}
        columns |= {"start_s": Values(start), "end_s": Values(end), "duration_s": Values(duration_s)}
        for shared in (self._plans, self._changes, self._occupancies, self._outcomes):
            columns |= shared.columns(self._num_steps)
        parts = self._parts | {number: times.parts for number, times in timed.items()}
        if timed:
            columns["forward_s"] = _values(
                np.array(
                    [
                        timed[number].forward_s if number in timed else seconds
                        for number, seconds in zip(columns["step"], columns["forward_s"], strict=True)
                    ]
                )
            )
        nothing = Values(np.broadcast_to(math.nan, self._num_steps), missing=math.nan)
        for name, part in PART_COLUMNS.items():
            step_parts = map(parts.get, columns["step"]) if parts else ()
            seconds = [None if each is None else each[part] for each in step_parts]
            columns[name] = _values(np.array(seconds)) if parts else nothing
        return {column.name: columns[column.name] for column in STEP_COLUMNS}


def graded(record: RunRecord, task: Task, texts: Mapping[int, str]) -> RunRecord:
    """The record with verdicts on the answers. ``texts`` are by request id."""
    answered = sorted(texts)
    verdicts = dict(
        zip(answered, task.grade_all([task.problems[i] for i in answered], [texts[i] for i in answered]), strict=True)
    )
    is_strict = any(verdict.strict is not None for verdict in verdicts.values())
    ids = record.requests["request_id"]
    correct = [request_id in verdicts and verdicts[request_id].correct for request_id in ids]
    strict = [request_id in verdicts and bool(verdicts[request_id].strict) if is_strict else None for request_id in ids]
    return record.with_columns(REQUESTS, correct=correct, correct_strict=strict)
