"""The exchanges of a run as tables: a row for every request sent, and one for every piece of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from repro.runs.drivers.http import Exchange
from repro.runs.record import REQUESTS, Column, Table
from repro.systems.http.workload import prompt_bounds

CHUNKS = "chunks"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("session_id", "int", "its conversation"),
    Column("turn", "int", "of the conversation; 0 is the first"),
    Column("client_queue_s", "float", "wait for a place under max_concurrency; null if not sent", nullable=True),
    Column("asked_tokens", "int", "tokens asked for; null if not sent", nullable=True),
    Column(
        "least_prompt",
        "int",
        "fewest tokens that what was sent can be; of token ids their number; null if not sent",
        nullable=True,
    ),
    Column("most_prompt", "int", "most tokens that what was sent can be", nullable=True),
    Column("num_ids", "int", "token ids of the answer; null where not told", nullable=True),
    Column("text_bytes", "int", "of the answer, in UTF-8; null if not sent", nullable=True),
    Column("finish_reason", "str", "as the endpoint says it", nullable=True),
    Column("num_chunks", "int", "pieces of the answer that have content"),
    Column("cached_tokens", "int", "prompt tokens from a cache; null where not told", nullable=True),
)

CHUNK_COLUMNS: tuple[Column, ...] = (
    Column("request_id", "int", "whose answer it is of"),
    Column("arrived_s", "float", "when it arrived"),
)


def tables_of(exchanges: Sequence[Exchange]) -> dict[str, Table]:
    """Requests are numbered in the order in which they were due."""
    rows = [_row(number, exchange) for number, exchange in enumerate(exchanges)]
    columns = _row(0, Exchange(session_id=0, turn=0, due_s=0.0)).keys()
    chunks: Table = {"request_id": [], "arrived_s": []}
    for number, exchange in enumerate(exchanges):
        stamps = [] if exchange.reply is None else exchange.reply.chunks_s
        chunks["request_id"] += [number] * len(stamps)
        chunks["arrived_s"] += stamps
    return {REQUESTS: {name: [row[name] for row in rows] for name in columns}, CHUNKS: chunks}


def _row(number: int, exchange: Exchange) -> dict[str, object]:
    reply, ask = exchange.reply, exchange.ask
    is_ok = exchange.error is None and reply is not None
    stamps = [] if reply is None else reply.chunks_s
    queue_s = None
    if exchange.sent_s is not None and exchange.queued_s is not None:
        queue_s = exchange.sent_s - exchange.queued_s
    counted = None if reply is None else reply.prompt_tokens
    return {
        "request_id": number,
        "arrival_s": exchange.due_s,
        "submit_lag_s": None if exchange.sent_s is None else exchange.sent_s - exchange.due_s,
        "admitted_s": None,
        "first_output_s": stamps[0] if stamps else None,
        "finished_s": exchange.ended_s if is_ok else None,
        # The endpoint's count where it tells one: a chat template adds to the client's.
        "prompt_len": counted if counted is not None else 0 if ask is None else ask.prompt_len,
        "output_len": reply.completion_tokens if is_ok and reply is not None else None,
        "status": "ok" if is_ok else "failed",
        "error": exchange.error,
        "session_id": exchange.session_id,
        "turn": exchange.turn,
        "client_queue_s": queue_s,
        "asked_tokens": None if ask is None else ask.asked_tokens,
        "least_prompt": None if ask is None else prompt_bounds(ask)[0],
        "most_prompt": None if ask is None else prompt_bounds(ask)[1],
        "num_ids": None if reply is None or reply.token_ids is None else len(reply.token_ids),
        "text_bytes": None if reply is None else len(reply.text.encode()),
        "finish_reason": None if reply is None or reply.finish_reason is None else str(reply.finish_reason)[:40],
        "num_chunks": len(stamps),
        "cached_tokens": None if reply is None else reply.cached_tokens,
    }
