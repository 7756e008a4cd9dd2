"""What a run against an endpoint records: a row for every request sent, and one for every piece of an answer."""

from __future__ import annotations

from repro.runs.record import Column

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
