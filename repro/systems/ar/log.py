"""A cluster's run as the harness's tables, and back again as what attainment is computed from.

A request is a session; rounds, prefills, transfers and workers have tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from engines.ar.metrics import Floats, ItlStat, Observed, observe, observed, sessions_of_rounds
from engines.ar.record import ClusterRun, RoundRow, TaskRow, TransferRow, WorkerRow, rows_of
from repro.runs.metrics import floats
from repro.runs.record import REQUESTS, Column, RunRecord, Table, columns_of
from repro.systems.simulated import request_table

ROUNDS, TASKS, TRANSFERS, WORKERS = "rounds", "tasks", "transfers", "workers"
_ITL_STATS: tuple[ItlStat, ...] = get_args(ItlStat)


def _itl_columns(scope: str) -> tuple[Column, ...]:
    return tuple(
        Column(
            f"itl_{stat}_s", "float", f"{stat} gap between tokens of the {scope}; null where it has none", nullable=True
        )
        for stat in _ITL_STATS
    )


REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("num_rounds", "int", "rounds of the session, those never reached included"),
    Column("decode_tokens", "int", "tokens to generate, over all rounds"),
    Column("worker_id", "int", "the decode worker it is bound to"),
    *_itl_columns("session"),
)
TABLES: Mapping[str, tuple[Column, ...]] = {
    ROUNDS: (*columns_of(RoundRow), *_itl_columns("round")),
    TASKS: columns_of(TaskRow),
    TRANSFERS: columns_of(TransferRow),
    WORKERS: columns_of(WorkerRow),
}


def tables_of(run: ClusterRun) -> dict[str, Table]:
    seen, sessions = observe(run), run.sessions
    ids = sessions["session_id"]
    started = _initial(run.tasks, "started_s")
    first_token = _initial(run.rounds, "first_token_s")
    requests = request_table(
        request_id=ids,
        arrival_s=sessions["arrival_s"],
        admitted_s=[started.get(each) for each in ids],
        first_output_s=[first_token.get(each) for each in ids],
        finished_s=sessions["finished_s"],
        prompt_len=sessions["prefill_tokens"],
        output_len=sessions["decode_tokens"],
        status=sessions["status"],
        num_rounds=sessions["num_rounds"],
        decode_tokens=sessions["decode_tokens"],
        worker_id=sessions["worker_id"],
        **_itl(seen.session_itl_s),
    )
    rounds = {**run.rounds, **_itl(seen.round_itl_s)}
    return {REQUESTS: requests, ROUNDS: rounds, TASKS: run.tasks, TRANSFERS: run.transfers, WORKERS: run.workers}


def observed_of(record: RunRecord) -> Observed:
    """As ``engines.ar.metrics.observe`` of the run behind the record."""
    sessions, rounds = record.requests, record.tables[ROUNDS]
    round_itl_s, session_itl_s = (
        {stat: floats(table[f"itl_{stat}_s"]) for stat in _ITL_STATS} for table in (rounds, sessions)
    )
    session = sessions_of_rounds(sessions["request_id"], rounds)
    return observed(sessions, rounds, session, round_itl_s, session_itl_s)


def _initial(table: Table, column: str) -> dict[int, Any]:
    """By session, of its first row in round 0."""
    found: dict[int, Any] = {}
    for session, index, value in rows_of(table, "session_id", "round", column):
        if index == 0:
            found.setdefault(session, value)
    return found


def _itl(stats: Mapping[ItlStat, Floats]) -> dict[str, list[Any]]:
    return {
        f"itl_{name}_s": [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in stats.items()
    }
