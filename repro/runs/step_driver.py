"""Drives an in-process engine, step by step, through an open-loop workload. Time is the wall clock's, or a virtual clock's that moves only
when told.

Requests are submitted when due, never earlier, whatever the engine is doing: load does not adapt to the system under test. A step blocks
the loop, so a request that falls due during a step is submitted at its end. Its latency still counts from the due time.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from engines.errors import RunError, UserError
from repro.runs.record import REQUEST_COLUMNS, Column, DriveProgress, Obtained, OnProgress, Table


class Clock(Protocol):
    """Seconds since ``start``. ``obtained`` tells how times of this clock come about."""

    @property
    def obtained(self) -> Obtained: ...

    def start(self) -> None:
        """Makes this moment zero."""

    def now(self) -> float: ...

    def advance(self, duration_s: float) -> None:
        """Adds the duration of work that was not waited for. On the wall clock this does nothing, because the time has passed already."""

    def sleep_until(self, time_s: float) -> None:
        """Returns once ``now() >= time_s``, at once if that holds already."""


class WallClock:
    obtained: Obtained = "measured"

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def start(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def advance(self, duration_s: float) -> None:
        return None

    def sleep_until(self, time_s: float) -> None:
        while (remaining_s := time_s - self.now()) > 0:
            time.sleep(remaining_s)


class VirtualClock:
    obtained: Obtained = "simulated"
    _now = 0.0

    def start(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, duration_s: float) -> None:
        if not math.isfinite(duration_s) or duration_s < 0:
            raise ValueError(f"a step took {duration_s} s: a duration is finite and not negative")
        self._now += duration_s

    def sleep_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)


class TimedRequest(Protocol):
    @property
    def request_id(self) -> int: ...

    @property
    def arrival_s(self) -> float: ...

    @property
    def prompt_len(self) -> int: ...


R = TypeVar("R", bound=TimedRequest)


class StepEngine(Protocol):
    """An engine that runs in steps. On virtual time it may have ``ahead``: steps after the last one, if no request comes meanwhile."""

    @property
    def has_work(self) -> bool:
        """Whether any submitted request is neither finished nor failed."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def submit(self, request: Any) -> None: ...

    def step(self, now_s: float) -> Any:
        """Runs one iteration and returns it with its ``duration_s``; None if there is nothing it can run now."""


class StepLog(Protocol):
    """Receives a driver's events; the tables of a run are made from it."""

    @property
    def num_closed(self) -> int: ...

    def submit(self, request_id: int, now: float) -> None: ...

    def stamp(self, step: Any, start: float, end: float) -> None: ...


class EngineStalledError(RunError):
    """The engine holds requests but runs nothing, and no later arrival can change that."""


def drive_steps(
    engine: StepEngine,
    ordered: Sequence[TimedRequest],
    clock: Clock,
    log: StepLog,
    *,
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Submit ``ordered`` (``in_arrival_order``) and step until all are closed, or until ``should_stop`` returns True."""
    pending = deque(ordered)
    clock.start()
    while should_stop is None or not should_stop():
        while pending and pending[0].arrival_s <= (now := clock.now()):
            request = pending.popleft()
            log.submit(request.request_id, now)
            engine.submit(request)
        if not engine.has_work:
            if not pending:
                break
            clock.sleep_until(pending[0].arrival_s)
            continue

        start = clock.now()
        step = engine.step(start)
        if step is None:
            if not pending:
                raise EngineStalledError(
                    f"the engine stopped with {engine.num_waiting} requests waiting and {engine.num_running} running"
                )
            clock.sleep_until(pending[0].arrival_s)
            continue
        for executed in chain((step,), getattr(engine, "ahead", None) or ()):
            clock.advance(executed.duration_s)
            end = clock.now()
            log.stamp(executed, start, end)
            if on_progress is not None:
                num_submitted = len(ordered) - len(pending)
                on_progress(
                    DriveProgress(
                        now_s=end, num_total=len(ordered), num_submitted=num_submitted, num_closed=log.num_closed
                    )
                )
            if (pending and pending[0].arrival_s <= end) or (should_stop is not None and should_stop()):
                break
            start = end


def in_arrival_order(requests: Iterable[R]) -> list[R]:
    """The requests sorted by due time. Raises UserError for a repeated id or an invalid time."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    seen_ids: set[int] = set()
    for request in ordered:
        if request.request_id in seen_ids:
            raise UserError(f"request_id={request.request_id} appears twice in the workload: make ids unique")
        if not math.isfinite(request.arrival_s) or request.arrival_s < 0:
            raise UserError(
                f"arrival_s={request.arrival_s} of request {request.request_id} must be finite and at least 0"
            )
        seen_ids.add(request.request_id)
    return ordered


class RequestLog:
    """Fills the table of requests. Raises RuntimeError if the engine reports a request that it does not hold."""

    def __init__(self, ordered: Sequence[TimedRequest], columns: Sequence[Column] = ()) -> None:
        """``columns`` are the family's own columns."""
        self.num_closed = 0
        self._row = {request.request_id: row for row, request in enumerate(ordered)}
        self.table: Table = {column.name: [None] * len(ordered) for column in (*REQUEST_COLUMNS, *columns)}
        self.table["request_id"] = [request.request_id for request in ordered]
        self.table["arrival_s"] = [request.arrival_s for request in ordered]
        self.table["prompt_len"] = [request.prompt_len for request in ordered]
        self.table["status"] = ["unfinished"] * len(ordered)

    def submit(self, request_id: int, now: float) -> None:
        row = self._row[request_id]
        self.table["submit_lag_s"][row] = now - self.table["arrival_s"][row]

    def close(self, request_id: int, status: str, **values: Any) -> None:
        """``values`` holds the columns that are known at the request's end."""
        for column, value in values.items():
            self.set_once(column, request_id, value)
        self.table["status"][self._open_row(request_id)] = status
        self.num_closed += 1

    def set_once(self, column: str, request_id: int, value: Any) -> None:
        row = self._open_row(request_id)
        if self.table[column][row] is not None:
            raise RuntimeError(f"the engine reported {column} of request {request_id} twice")
        self.table[column][row] = value

    def _open_row(self, request_id: int) -> int:
        row = self._row.get(request_id)
        if row is None or self.table["submit_lag_s"][row] is None:
            raise RuntimeError(f"the engine reported request {request_id}, which was never submitted")
        if self.table["status"][row] != "unfinished":
            raise RuntimeError(f"the engine reported request {request_id} after its end")
        return row
