"""What a run on the simulated cluster records: a request is a session, and rounds, prefills, transfers and workers have
tables of their own."""

from __future__ import annotations

from typing import get_args

from engines.ar.metrics import ItlStat
from repro.runs.record import Column

ROUNDS, TASKS, TRANSFERS, WORKERS = "rounds", "tasks", "transfers", "workers"

ITL_STATS: tuple[ItlStat, ...] = get_args(ItlStat)


def _itl_columns(scope: str) -> tuple[Column, ...]:
    return tuple(
        Column(
            name=f"itl_{stat}_s",
            kind="float",
            nullable=True,
            meaning=f"{stat} gap between tokens of the {scope}; null where it has none",
        )
        for stat in ITL_STATS
    )


REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="num_rounds", kind="int", meaning="rounds of the session, those never reached included"),
    Column(name="decode_tokens", kind="int", meaning="tokens to generate, over all rounds"),
    Column(name="worker_id", kind="int", meaning="the decode worker it is bound to"),
    *_itl_columns("session"),
)

ROUND_COLUMNS: tuple[Column, ...] = (
    Column(name="session_id", kind="int", meaning="request_id of its session"),
    Column(name="round", kind="int", meaning="0 is the initial one"),
    Column(name="ready_s", kind="float", meaning="when it could start; TTFT counts from here"),
    Column(name="history", kind="int", meaning="tokens of the rounds before it"),
    Column(name="prefill_tokens", kind="int", meaning="tokens it adds to the history"),
    Column(name="decode_tokens", kind="int", meaning="tokens to generate"),
    Column(name="first_token_s", kind="float", nullable=True, meaning="first token with the decode worker"),
    Column(name="finished_s", kind="float", nullable=True, meaning="last token"),
    Column(name="is_local", kind="bool", meaning="whether its prefill was routed to its own decode worker"),
    *_itl_columns("round"),
)

TASK_COLUMNS: tuple[Column, ...] = (
    Column(name="task_id", kind="int", meaning="in order of routing"),
    Column(name="session_id", kind="int", meaning="request_id of its session"),
    Column(name="round", kind="int", meaning="of the session"),
    Column(name="kind", kind="str", meaning="initial, incremental, or recompute (after a preemption)"),
    Column(name="worker_id", kind="int", meaning="where it was routed"),
    Column(name="is_local", kind="bool", meaning="whether that is the decode worker of its session"),
    Column(name="reason", kind="str", meaning="the router's rule that decided"),
    Column(name="history", kind="int", meaning="tokens of K/V it continues, as the router knew"),
    Column(name="tokens", kind="int", meaning="tokens to prefill, as the router knew"),
    Column(name="computed_tokens", kind="int", nullable=True, meaning="tokens prefilled, evicted history included"),
    Column(name="estimate_s", kind="float", meaning="the performance model's time; 0 where no policy asks"),
    Column(name="ready_s", kind="float", meaning="when it was routed"),
    Column(name="started_s", kind="float", nullable=True, meaning="when it left its queue"),
    Column(name="finished_s", kind="float", nullable=True, meaning="when its last token was computed"),
    Column(name="landed_s", kind="float", nullable=True, meaning="when its K/V was with the decode worker"),
    Column(name="postponed", kind="int", meaning="times that reordering let another go first"),
)

TRANSFER_COLUMNS: tuple[Column, ...] = (
    Column(name="task_id", kind="int", meaning="the prefill it belongs to"),
    Column(name="content", kind="str", meaning="history (to the prefill worker) or increment (back)"),
    Column(name="source", kind="int", meaning="worker"),
    Column(name="target", kind="int", meaning="worker"),
    Column(name="link", kind="str", meaning="within a server or between two"),
    Column(name="tokens", kind="int", meaning="tokens of K/V"),
    Column(name="bytes", kind="int", meaning="of them"),
    Column(name="start_s", kind="float", meaning="begin"),
    Column(name="end_s", kind="float", meaning="all there"),
)

WORKER_COLUMNS: tuple[Column, ...] = (
    Column(name="worker_id", kind="int", meaning="decode workers first"),
    Column(name="role", kind="str", meaning="prefill or decode; co-located workers decode"),
    Column(name="degree", kind="int", meaning="tensor-parallel degree"),
    Column(name="server", kind="int", meaning="where it stands"),
    Column(name="busy_prefill_s", kind="float", meaning="time in steps with a prefill"),
    Column(name="busy_decode_s", kind="float", meaning="time in other steps"),
    Column(name="num_prefills", kind="int", meaning="prefills finished"),
    Column(name="prefilled_tokens", kind="int", meaning="tokens of them"),
    Column(name="kv_capacity", kind="int", nullable=True, meaning="tokens; null for prefill workers"),
    Column(name="kv_peak", kind="int", nullable=True, meaning="most tokens in use"),
    Column(name="kv_evicted", kind="int", nullable=True, meaning="tokens of idle prefixes given up"),
    Column(name="num_preemptions", kind="int", meaning="sequences whose K/V was given up"),
)
