"""What a run against an endpoint records: a row for every request sent, and one for every piece of an answer."""

from __future__ import annotations

from repro.runs.record import Column

CHUNKS = "chunks"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="session_id", kind="int", meaning="its conversation"),
    Column(name="turn", kind="int", meaning="of the conversation; 0 is the first"),
    Column(
        name="client_queue_s",
        kind="float",
        nullable=True,
        meaning="wait for a place under max_concurrency; null if not sent",
    ),
    Column(name="asked_tokens", kind="int", nullable=True, meaning="tokens asked for; null if not sent"),
    Column(
        name="least_prompt",
        kind="int",
        nullable=True,
        meaning="fewest tokens that what was sent can be; of token ids their number; null if not sent",
    ),
    Column(name="most_prompt", kind="int", nullable=True, meaning="most tokens that what was sent can be"),
    Column(name="num_ids", kind="int", nullable=True, meaning="token ids of the answer; null where not told"),
    Column(name="text_bytes", kind="int", nullable=True, meaning="of the answer, in UTF-8; null if not sent"),
    Column(name="finish_reason", kind="str", nullable=True, meaning="as the endpoint says it"),
    Column(name="num_chunks", kind="int", meaning="pieces of the answer that have content"),
    Column(name="cached_tokens", kind="int", nullable=True, meaning="prompt tokens from a cache; null where not told"),
)

CHUNK_COLUMNS: tuple[Column, ...] = (
    Column(name="request_id", kind="int", meaning="whose answer it is of"),
    Column(name="arrived_s", kind="float", meaning="when it arrived"),
)
