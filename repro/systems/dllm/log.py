"""A diffusion-LLM engine driven through a workload: what its steps say of requests, and the table of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from engines.dllm.engine import Engine
from engines.dllm.plan import Request, StepRecord
from repro.runs.drivers.steps import Clock, OnProgress, RequestLog, drive_steps, in_arrival_order
from repro.runs.record import REQUESTS, RunRecord, Table
from repro.systems.dllm.family import PART_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, STEPS


def drive_engine(
    engine: Engine,
    requests: Iterable[Request],
    clock: Clock,
    *,
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RunRecord:
    """The record's requests are in arrival order; those open when ``should_stop`` said so are ``unfinished``."""
    ordered = in_arrival_order(requests)
    log = EngineLog(ordered)
    drive_steps(engine, ordered, clock, log, on_progress=on_progress, should_stop=should_stop)
    steps = engine.settled([step for step, _, _ in log.steps])
    stamped = [(step, start, end) for step, (_, start, end) in zip(steps, log.steps, strict=True)]
    return RunRecord(tables={REQUESTS: log.table, STEPS: _step_table(stamped)}, manifest={"obtained": clock.obtained})


class EngineLog(RequestLog):
    def __init__(self, ordered: Sequence[Request]) -> None:
        super().__init__(ordered, REQUEST_COLUMNS)
        self._gen_lengths = {request.request_id: request.generation.gen_length for request in ordered}
        self.table["gen_length"] = list(self._gen_lengths.values())
        self.steps: list[tuple[StepRecord, float, float]] = []

    def stamp(self, step: StepRecord, start: float, end: float) -> None:
        self.steps.append((step, start, end))
        for request_id in step.plan.admitted:
            self.set_once("admitted_s", request_id, start)
        for request_id in step.done.first_block:
            self.set_once("first_output_s", request_id, end)
        stopped = dict(step.done.stopped)
        for request_id in step.done.finished:
            output_len = stopped.get(request_id, self._gen_lengths.get(request_id))
            self.close(request_id, "ok", finished_s=end, output_len=output_len)
        for request_id, reason in step.done.failed:
            self.close(request_id, "failed", error=reason)


_LENGTHS = {
    "num_admitted": "plan.admitted",
    "num_first_block": "done.first_block",
    "num_finished": "done.finished",
    "num_failed": "done.failed",
}
_PLACES = {
    **dict.fromkeys(("num_refresh", "num_reuse", "scheduled_tokens"), "plan"),
    **dict.fromkeys(("forward_s", "logit_rows", "committed_tokens", "graph", "bound_s"), "outcome"),
    **dict.fromkeys(("kv_rows_used", "kv_rows_total", "num_running", "num_waiting"), "occupancy"),
}
_PATHS = {
    **_LENGTHS,
    **{name: f"{part}.{name}" for name, part in _PLACES.items()},
    "query_tokens": "outcome.query_rows",
}
_STAMPS = ("start_s", "end_s")
_READ = [column.name for column in STEP_COLUMNS if column.name not in (*_STAMPS, *PART_COLUMNS)]
_read_step = attrgetter(*(_PATHS.get(name, name) for name in _READ))
"""A step's columns but for its stamps and parts, the lengths still as tuples; one call for all of them."""


def _step_table(steps: Sequence[tuple[StepRecord, float, float]]) -> Table:
    records, starts, ends = zip(*steps, strict=True) if steps else ((), (), ())
    read = list(zip(*map(_read_step, records), strict=True)) or [()] * len(_READ)
    columns = {
        name: list(map(len, values)) if name in _LENGTHS else list(values)
        for name, values in zip(_READ, read, strict=True)
    }
    parts = [record.outcome.parts for record in records]
    columns |= {name: [None if own is None else own[part] for own in parts] for name, part in PART_COLUMNS.items()}
    columns |= {"start_s": list(starts), "end_s": list(ends)}
    return {column.name: columns[column.name] for column in STEP_COLUMNS}
