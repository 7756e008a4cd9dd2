"""A run of prefill instances as the harness's tables, and which of its requests count: a request is one turn, done with its first token.

The window opens when a tenth of the turns have arrived. In a closed loop it closes when a client finds no further
conversation, so that all clients are busy in it; in an open one with the last arrival. Requests that arrive in it
count, however late they finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engines.ar.record import rows_of
from engines.laps.record import InstanceRow, MoveRow, PrefillRun, StepRow
from repro.runs.record import REQUESTS, Column, Table, columns_of
from repro.systems.simulated import request_table

STEPS, MOVES, INSTANCES = "steps", "moves", "instances"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("session_id", "int", "the conversation it is a turn of"),
    Column("turn", "int", "0 is the first"),
    Column("length_class", "str", "short or long, by the run's boundary"),
    Column("history", "int", "tokens whose K/V was there"),
    Column("instance", "int", "where it was prefilled", nullable=True),
    Column("violated", "bool", "whether its first token came later than the objective allows, or never"),
    Column("counted", "bool", "whether it arrived in the measured window"),
)
TABLES: Mapping[str, tuple[Column, ...]] = {
    STEPS: columns_of(StepRow),
    MOVES: columns_of(MoveRow),
    INSTANCES: columns_of(InstanceRow),
}
WARM_UP = 0.1
"""Share of the turns that arrive before the window opens."""


class Window(NamedTuple):
    """Arrivals in [start_s, end_s) count."""

    start_s: float
    end_s: float


def window_of(arrivals_s: Sequence[float], closes_s: float) -> Window:
    before = sorted(time for time in arrivals_s if time <= closes_s)
    return Window(before[int(WARM_UP * len(before))], closes_s) if before else Window(0.0, 0.0)


def closing_s(run: PrefillRun, last_sessions: Sequence[int]) -> float:
    """When the first of the closed loops, whose last conversations these are, runs out, or the run ends before that; the last arrival
    without any."""
    requests = run.requests
    if not last_sessions:
        return max(requests["arrival_s"], default=0.0)
    turns = rows_of(requests, "session_id", "turn", "arrival_s")
    begun = {session: arrival_s for session, turn, arrival_s in turns if turn == 0}
    return min(begun.get(session, run.facts["end_s"]) for session in last_sessions)


def tables_of(run: PrefillRun, window: Window) -> dict[str, Table]:
    requests = run.requests
    finished = requests["finished_s"]
    arrival = np.asarray(requests["arrival_s"], dtype=np.float64)
    counted = (window.start_s <= arrival) & (arrival < window.end_s)
    is_done = [stamp is not None for stamp in finished]
    return {
        REQUESTS: request_table(
            request_id=requests["request_id"],
            arrival_s=requests["arrival_s"],
            admitted_s=requests["started_s"],
            first_output_s=finished,
            finished_s=finished,
            prompt_len=requests["tokens"],
            output_len=[1] * len(finished),
            status=["ok" if done else "unfinished" for done in is_done],
            violated=[bool(late) or not done for late, done in zip(requests["violated"], is_done, strict=True)],
            counted=counted.tolist(),
            **{name: requests[name] for name in ("session_id", "turn", "length_class", "history", "instance")},
        ),
        STEPS: run.steps,
        MOVES: run.moves,
        INSTANCES: run.instances,
    }
