"""The exchanges of a run as tables: a row for every request sent, and one for every piece of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from repro.runs.drivers.http import Exchange, Reply
from repro.runs.record import REQUESTS, Column, Table
from repro.systems.http.endpoint import count_tokens
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
    Column("text_bytes", "int", "of the answer and its reasoning, in UTF-8; null if not sent", nullable=True),
    Column("finish_reason", "str", "as the endpoint says it", nullable=True),
    Column("num_chunks", "int", "pieces of the answer that have content"),
    Column("cached_tokens", "int", "prompt tokens from a cache; null where not told", nullable=True),
    Column(
        "counted_by",
        "str",
        "what output_len is by: usage, token_ids or tokenizer; null where nothing is",
        nullable=True,
    ),
    Column("first_tokens", "int", "tokens of the first piece; null where nothing shows them", nullable=True),
    Column(
        "first_by",
        "str",
        "what those are by: token_ids, usage, tokenizer, one each, one piece, or text, which is its share",
        nullable=True,
    ),
    Column("is_single", "bool", "whether every piece is known to be one token"),
    Column("finish_lag_s", "float", "from the end of the answer to the reason for it; null if none", nullable=True),
    Column("usage_lag_s", "float", "from the end of the answer to the last usage; null if none", nullable=True),
    Column("close_lag_s", "float", "from the end of the answer to that of the stream; null unless ok", nullable=True),
    Column("was_resent", "bool", "whether it was cut off unanswered on a kept connection, and sent once more"),
)

CHUNK_COLUMNS: tuple[Column, ...] = (
    Column("request_id", "int", "whose answer it is of"),
    Column("arrived_s", "float", "when it arrived"),
    Column("tokens", "int", "of it, by ids or usage; null where not told", nullable=True),
    Column("is_bunched", "bool", "whether it came in one network read with the piece before it"),
)


def tables_of(exchanges: Sequence[Exchange], encode: Callable[[str], list[int]] | None = None) -> dict[str, Table]:
    """Requests are numbered in the order in which they were due. ``encode`` counts tokens that the endpoint does not tell."""
    for exchange in exchanges:
        if exchange.error is None and exchange.reply is not None:
            count_tokens(exchange.reply, encode)
    rows = [_row(number, exchange) for number, exchange in enumerate(exchanges)]
    columns = _row(0, Exchange(session_id=0, turn=0, due_s=0.0)).keys()
    chunks: Table = {column.name: [] for column in CHUNK_COLUMNS}
    for number, exchange in enumerate(exchanges):
        reply = exchange.reply or Reply()
        chunks["request_id"] += [number] * len(reply.chunks_s)
        chunks["arrived_s"] += reply.chunks_s
        chunks["tokens"] += reply.chunk_tokens or [None] * len(reply.chunks_s)
        reads = reply.chunk_reads or range(len(reply.chunks_s))
        chunks["is_bunched"] += [read == before for before, read in zip([None, *reads], reads, strict=False)]
    return {REQUESTS: {name: [row[name] for row in rows] for name in columns}, CHUNKS: chunks}


def _row(number: int, exchange: Exchange) -> dict[str, object]:
    reply, ask = exchange.reply or Reply(), exchange.ask
    is_ok = exchange.error is None and exchange.reply is not None
    stamps, counted = reply.chunks_s, reply.prompt_tokens
    least, most = (None, None) if ask is None else prompt_bounds(ask)
    queue_s = None
    if exchange.sent_s is not None and exchange.queued_s is not None:
        queue_s = exchange.sent_s - exchange.queued_s
    return {
        "request_id": number,
        "arrival_s": exchange.due_s,
        "submit_lag_s": None if exchange.sent_s is None else exchange.sent_s - exchange.due_s,
        "admitted_s": None,
        "first_output_s": stamps[0] if stamps else None,
        "finished_s": exchange.ended_s if is_ok else None,
        # The endpoint's count where it tells one: a chat template adds to the client's.
        "prompt_len": counted if counted is not None else 0 if ask is None else ask.prompt_len,
        "output_len": reply.completion_tokens if is_ok else None,
        "status": "ok" if is_ok else "failed",
        "error": exchange.error,
        "session_id": exchange.session_id,
        "turn": exchange.turn,
        "client_queue_s": queue_s,
        "asked_tokens": None if ask is None else ask.asked_tokens,
        "least_prompt": least,
        "most_prompt": most,
        "num_ids": None if reply.token_ids is None else len(reply.token_ids),
        "text_bytes": None if exchange.reply is None else len((reply.text + reply.aside).encode()),
        "finish_reason": None if reply.finish_reason is None else str(reply.finish_reason)[:40],
        "num_chunks": len(stamps),
        "cached_tokens": reply.cached_tokens,
        "counted_by": reply.counted_by,
        "first_tokens": reply.first_tokens,
        "first_by": reply.first_by,
        "is_single": reply.are_single,
        "finish_lag_s": _lag(exchange, reply.finish_s),
        "usage_lag_s": _lag(exchange, reply.usage_s),
        "close_lag_s": _lag(exchange, reply.closed_s),
        "was_resent": reply.was_resent,
    }


def _lag(exchange: Exchange, stamp_s: float | None) -> float | None:
    """Seconds from the last piece to an event that may come with it, or before it."""
    if exchange.error is not None or exchange.ended_s is None or stamp_s is None:
        return None
    return max(0.0, stamp_s - exchange.ended_s)
