"""Drives an in-process engine through an open-loop workload and stamps what happened.

Requests are submitted when due, never earlier, whatever the engine is doing: load does not adapt to the
system under test. A step blocks the loop, so a request due in the middle of one is submitted at its end, and
latency still counts from the due time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from engines.dllm.record import StepRecord
from engines.dllm.request import Request
from engines.errors import UserError
from repro.runs.clock import Clock
from repro.runs.record import PART_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, RunRecord, Table


class StepEngine(Protocol):
    @property
    def has_work(self) -> bool:
        """Whether any submitted request is neither finished nor failed."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> StepRecord | None:
        """Runs one iteration; None when there is nothing it can run now."""

    def settled(self, records: Sequence[StepRecord]) -> Sequence[StepRecord]:
        """The records as given, with what became known of their steps since."""


class EngineStalledError(RuntimeError):
    """The engine holds requests, runs nothing, and no arrival is left that could change that."""


@dataclass(frozen=True, kw_only=True)
class DriveProgress:
    now_s: float
    num_total: int
    num_submitted: int
    num_closed: int
    """Finished or failed."""


def drive_steps(
    engine: StepEngine,
    requests: Iterable[Request],
    clock: Clock,
    *,
    on_progress: Callable[[DriveProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RunRecord:
    """The record's requests are in arrival order; those open when ``should_stop`` said so are ``unfinished``."""
    ordered = _in_arrival_order(requests)
    pending = deque(ordered)
    log = _RequestLog(ordered)
    steps: list[tuple[StepRecord, float, float]] = []

    clock.start()
    while pending or engine.has_work:
        if should_stop is not None and should_stop():
            break
        while pending and pending[0].arrival_s <= (now := clock.now()):
            request = pending.popleft()
            log.submit(request, now)
            engine.submit(request)
        if not engine.has_work:
            if pending:
                clock.sleep_until(pending[0].arrival_s)
            continue

        start = clock.now()
        record = engine.step()
        if record is None:
            if not pending:
                raise EngineStalledError(
                    f"the engine stopped with {engine.num_waiting} requests waiting and {engine.num_running} running"
                )
            clock.sleep_until(pending[0].arrival_s)
            continue
        clock.advance(record.duration_s)
        end = clock.now()
        log.stamp(record, start, end)
        steps.append((record, start, end))
        if on_progress is not None:
            num_submitted = len(ordered) - len(pending)
            on_progress(
                DriveProgress(now_s=end, num_total=len(ordered), num_submitted=num_submitted, num_closed=log.num_closed)
            )
    settled = engine.settled([record for record, _, _ in steps])
    steps = [(record, start, end) for record, (_, start, end) in zip(settled, steps, strict=True)]
    return RunRecord(requests=log.table, steps=_step_table(steps), manifest={"obtained": clock.obtained})


def _in_arrival_order(requests: Iterable[Request]) -> list[Request]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    seen: set[int] = set()
    for request in ordered:
        if request.request_id in seen:
            raise UserError(f"request_id={request.request_id} appears twice in the workload: make ids unique")
        if not math.isfinite(request.arrival_s) or request.arrival_s < 0:
            raise UserError(
                f"arrival_s={request.arrival_s} of request {request.request_id} must be finite and at least 0"
            )
        seen.add(request.request_id)
    return ordered


class _RequestLog:
    """The request table while it fills. Refuses an engine that reports a request it does not hold."""

    def __init__(self, ordered: Sequence[Request]) -> None:
        self.num_closed = 0
        self._row = {request.request_id: row for row, request in enumerate(ordered)}
        self.table: Table = {column.name: [None] * len(ordered) for column in REQUEST_COLUMNS}
        self.table["request_id"] = [request.request_id for request in ordered]
        self.table["arrival_s"] = [request.arrival_s for request in ordered]
        self.table["prompt_len"] = [request.prompt_len for request in ordered]
        self.table["gen_length"] = [request.generation.gen_length for request in ordered]
        self.table["status"] = ["unfinished"] * len(ordered)

    def submit(self, request: Request, now: float) -> None:
        self.table["submit_lag_s"][self._row[request.request_id]] = now - request.arrival_s

    def stamp(self, record: StepRecord, start: float, end: float) -> None:
        for request_id in record.plan.admitted:
            self._set_once("admitted_s", request_id, start)
        for request_id in record.done.first_block:
            self._set_once("first_block_s", request_id, end)
        stopped = dict(record.done.stopped)
        for request_id in record.done.finished:
            self._set_once("finished_s", request_id, end)
            gen_length = self.table["gen_length"][self._row[request_id]]
            self._set_once("output_len", request_id, stopped.get(request_id, gen_length))
            self._close(request_id, "ok")
        for request_id, reason in record.done.failed:
            self._set_once("error", request_id, reason)
            self._close(request_id, "failed")

    def _set_once(self, column: str, request_id: int, value: Any) -> None:
        row = self._open_row(request_id)
        if self.table[column][row] is not None:
            raise RuntimeError(f"the engine reported {column} of request {request_id} twice")
        self.table[column][row] = value

    def _close(self, request_id: int, status: str) -> None:
        self.table["status"][self._open_row(request_id)] = status
        self.num_closed += 1

    def _open_row(self, request_id: int) -> int:
        row = self._row.get(request_id)
        if row is None or self.table["submit_lag_s"][row] is None:
            raise RuntimeError(f"the engine reported request {request_id}, which was never submitted")
        if self.table["status"][row] != "unfinished":
            raise RuntimeError(f"the engine reported request {request_id} after its end")
        return row


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
