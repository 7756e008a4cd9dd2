"""A cluster's run as the harness's tables, and back again as what attainment is computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from engines.ar.cluster.record import ClusterRun
from engines.ar.metrics import Floats, ItlStat, Observed, observe
from repro.runs.metrics import floats
from repro.runs.record import REQUESTS, RunRecord, Table
from repro.systems.ar.columns import ITL_STATS, ROUNDS, TASKS, TRANSFERS, WORKERS


def tables_of(run: ClusterRun) -> dict[str, Table]:
    observed = observe(run)
    return {
        REQUESTS: _requests(run, observed),
        ROUNDS: {**run.rounds, **_itl(observed.round_itl_s)},
        TASKS: run.tasks,
        TRANSFERS: run.transfers,
        WORKERS: run.workers,
    }


def observed_of(record: RunRecord) -> Observed:
    """As ``engines.ar.metrics.observe`` of the run behind the record."""
    sessions, rounds = record.requests, record.tables[ROUNDS]
    ids = np.asarray(sessions["request_id"], dtype=np.int64)
    by_id = np.argsort(ids, kind="stable")
    finished = floats(rounds["finished_s"])
    return Observed(
        round_session=by_id[np.searchsorted(ids, rounds["session_id"], sorter=by_id)],
        round_index=np.asarray(rounds["round"], dtype=np.int64),
        ttft_s=floats(rounds["first_token_s"]) - floats(rounds["ready_s"]),
        round_done=~np.isnan(finished),
        round_itl_s={stat: floats(rounds[f"itl_{stat}_s"]) for stat in ITL_STATS},
        session_itl_s={stat: floats(sessions[f"itl_{stat}_s"]) for stat in ITL_STATS},
        session_done=np.asarray([status == "ok" for status in sessions["status"]], dtype=np.bool_),
        session_rounds=np.asarray(sessions["num_rounds"], dtype=np.int64),
        e2el_s=floats(sessions["finished_s"]) - floats(sessions["arrival_s"]),
        is_local=np.asarray(rounds["is_local"], dtype=np.bool_),
    )


def _requests(run: ClusterRun, observed: Observed) -> Table:
    sessions = run.sessions
    ids = sessions["session_id"]
    started: dict[int, float | None] = {}
    first_token: dict[int, float | None] = {}
    for session, index, start_s in zip(
        run.tasks["session_id"], run.tasks["round"], run.tasks["started_s"], strict=True
    ):
        if index == 0:
            started.setdefault(session, start_s)
    for session, index, token_s in zip(
        run.rounds["session_id"], run.rounds["round"], run.rounds["first_token_s"], strict=True
    ):
        if index == 0:
            first_token[session] = token_s
    is_ok = [status == "ok" for status in sessions["status"]]
    return {
        "request_id": ids,
        "arrival_s": sessions["arrival_s"],
        "submit_lag_s": [0.0] * len(ids),
        "admitted_s": [started.get(each) for each in ids],
        "first_output_s": [first_token.get(each) for each in ids],
        "finished_s": sessions["finished_s"],
        "prompt_len": sessions["prefill_tokens"],
        "output_len": [tokens if ok else None for tokens, ok in zip(sessions["decode_tokens"], is_ok, strict=True)],
        "status": sessions["status"],
        "error": [None] * len(ids),
        "num_rounds": sessions["num_rounds"],
        "decode_tokens": sessions["decode_tokens"],
        "worker_id": sessions["worker_id"],
        **_itl(observed.session_itl_s),
    }


def _itl(stats: Mapping[ItlStat, Floats]) -> dict[str, list[Any]]:
    return {
        f"itl_{name}_s": [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in stats.items()
    }
