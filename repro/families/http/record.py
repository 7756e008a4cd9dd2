"""The record of a run against an endpoint: its tables, the metrics of a client, and the checks that its numbers must pass. Times count
from the due time unless they say otherwise."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from repro.families.http.endpoint import count_tokens
from repro.families.http.requests import prompt_bounds
from repro.runs.family import (
    Compute,
    Floats,
    Mask,
    column,
    distribution,
    family_in,
    goodput_facts,
    is_ok,
    late_submissions,
    mask,
    without_nan,
)
from repro.runs.http_driver import Exchange, Reply
from repro.runs.record import REQUESTS, RunRecord, Table

MIN_REQUESTS = 10
"""With fewer requests there is no p90 and no verdict."""
MIN_RATE_SHARE = 0.95
"""We must send requests at no less than this share of the rate at which they fell due."""
MAX_DRIFT, MIN_DRIFT_S = 2.0, 0.1
"""A run drifts if its last quarter waits for the first output this many times as long as its first quarter, and this much longer. Then
the rate is above what the endpoint can serve, and latencies only reflect the length of the run."""
BUNCH, MAX_BUNCHED = 4, 0.01
"""We warn of this many pieces of one answer in one network read, or of this share of bunched pieces. Two may meet by chance."""

CHUNKS = "chunks"
_DISTRIBUTED = ("client_queue_s", "finish_lag_s", "usage_lag_s", "close_lag_s")
"""Columns of requests whose distribution is a metric of the same name."""


def tables_of(exchanges: Sequence[Exchange], encode: Callable[[str], list[int]] | None = None) -> dict[str, Table]:
    """The tables of a run. Requests are numbered in the order in which they fell due. ``encode`` counts tokens if the endpoint does not."""
    for exchange in exchanges:
        if exchange.error is None and exchange.reply is not None:
            count_tokens(exchange.reply, encode)
    rows = [_row(number, exchange) for number, exchange in enumerate(exchanges)]
    columns = _row(0, Exchange(session_id=0, turn=0, due_s=0.0)).keys()
    chunks: Table = {column.name: [] for column in HTTP.tables[CHUNKS]}
    for number, exchange in enumerate(exchanges):
        reply = exchange.reply or Reply()
        chunks["request_id"] += [number] * len(reply.chunks_s)
        chunks["arrived_s"] += reply.chunks_s
        chunks["tokens"] += reply.chunk_tokens or [None] * len(reply.chunks_s)
        reads = reply.chunk_reads or range(len(reply.chunks_s))
        chunks["is_bunched"] += [read == previous for previous, read in zip([None, *reads], reads, strict=False)]
    return {REQUESTS: {name: [row[name] for row in rows] for name in columns}, CHUNKS: chunks}


def _row(number: int, exchange: Exchange) -> dict[str, object]:
    reply, ask = exchange.reply or Reply(), exchange.ask
    is_ok = exchange.error is None and exchange.reply is not None
    stamps, counted = reply.chunks_s, reply.prompt_tokens
    low, high = (None, None) if ask is None else prompt_bounds(ask)
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
        # Prefer the endpoint's count, because a chat template adds to the client's.
        "prompt_len": counted if counted is not None else 0 if ask is None else ask.prompt_len,
        "output_len": reply.completion_tokens if is_ok else None,
        "status": "ok" if is_ok else "failed",
        "error": exchange.error,
        "session_id": exchange.session_id,
        "turn": exchange.turn,
        "client_queue_s": queue_s,
        "asked_tokens": None if ask is None else ask.asked_tokens,
        "least_prompt": low,
        "most_prompt": high,
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
    """Seconds from the last piece to another event; 0 if that came with the piece or before it."""
    if exchange.error is not None or exchange.ended_s is None or stamp_s is None:
        return None
    return max(0.0, stamp_s - exchange.ended_s)


# -- metrics, each under the name that it has in metrics.csv ------------------------------------------------


def sent_s(record: RunRecord) -> Floats:
    """[requests] When each was sent; NaN if it was not."""
    return column(record, "arrival_s") + column(record, "submit_lag_s")


def times_per_token(record: RunRecord) -> Floats:
    """[requests] (E2EL - TTFT) / tokens after the first piece; NaN if there are none or their number is unknown."""
    later_tokens = column(record, "output_len") - column(record, "first_tokens")
    with np.errstate(divide="ignore", invalid="ignore"):
        times = (column(record, "finished_s") - column(record, "first_output_s")) / later_tokens
    times[~((later_tokens > 0) & (column(record, "num_chunks") > 1) & is_ok(record))] = np.nan
    return times


def own_gaps_p95(record: RunRecord) -> Floats:
    """[requests] P95 of each request's own gaps between tokens, in seconds. NaN with one piece, infinite if pieces may hold more tokens."""
    owner, arrived = (column(record, name, CHUNKS) for name in ("request_id", "arrived_s"))
    is_single = np.asarray(record.requests["is_single"], dtype=bool)
    percentiles = np.where(is_single | (column(record, "num_chunks") < 2), np.nan, np.inf)
    for request in np.flatnonzero(is_single & (column(record, "num_chunks") > 1)):
        percentiles[request] = np.percentile(np.diff(arrived[owner == request]), 95)
    return percentiles


def _gaps(record: RunRecord, is_chosen: Mask) -> Floats:
    owner = np.asarray(record.tables[CHUNKS]["request_id"], dtype=np.int64)
    arrived = column(record, "arrived_s", CHUNKS)
    # Requests are numbered by their rows, and pieces are in their order.
    together = (owner[1:] == owner[:-1]) & is_chosen[owner[1:]] if owner.size else np.zeros(0, dtype=bool)
    return np.diff(arrived)[together] if owner.size else arrived


def bunched_share(record: RunRecord) -> float | None:
    """The share of gaps of bunched pieces. Such gaps are 0, and show how the pieces arrived, not how they were made."""
    gaps = _gaps(record, is_ok(record)).size
    return int(np.count_nonzero(_bunched(record))) / gaps if gaps else None


def _bunched(record: RunRecord) -> Mask:
    """[pieces] Which pieces of ok requests came together with the piece before them."""
    table = record.tables[CHUNKS]
    owner = np.asarray(table["request_id"], dtype=np.int64)
    return np.asarray(table["is_bunched"], dtype=bool) & is_ok(record)[owner]


def _rate(times_of: Callable[[RunRecord], Floats]) -> Callable[[RunRecord], float | None]:
    """The rate of first turns. That of drawn arrivals differs from the requested rate, because the number of draws is finite."""

    def rate(record: RunRecord) -> float | None:
        times = without_nan(times_of(record)[mask(record, "turn", 0)])
        span = float(times.max() - times.min()) if times.size > 1 else 0.0
        return (times.size - 1) / span if span > 0 else None

    return rate


def peak_concurrency(record: RunRecord) -> int:
    begun, ended = sent_s(record), column(record, "finished_s")
    was_served = ~np.isnan(begun) & ~np.isnan(ended)
    events = sorted([(t, 1) for t in begun[was_served].tolist()] + [(t, -1) for t in ended[was_served].tolist()])
    return int(np.cumsum([step for _, step in events]).max()) if events else 0


def goodput_http(record: RunRecord) -> dict[str, Any]:
    """Good requests are ok and keep each limit of ``goodput``. All others count against attainment."""
    limits: dict[str, float] = record.facts.get("goodput", {})
    if not limits:
        return {}
    arrival = column(record, "arrival_s")
    times = {
        "ttft": column(record, "first_output_s") - arrival,
        "e2el": column(record, "finished_s") - arrival,
        "tpot": times_per_token(record),
        "itl": own_gaps_p95(record),
    }
    good = is_ok(record)
    for name, limit in limits.items():
        # An answer in one piece has no time per token, and so breaks no such limit.
        good = good & ((times[name] <= limit) | (np.isnan(times[name]) if name in ("tpot", "itl") else False))
    return {"limits_s": limits, **goodput_facts(record, good)}


def _summary(values_of: Callable[[RunRecord], Floats]) -> Compute:
    return lambda record: distribution(without_nan(values_of(record)))


# How late the client itself was, without the wait for a free place (max_concurrency).
schedule_delay_s = _summary(lambda record: column(record, "submit_lag_s") - column(record, "client_queue_s"))
ttft_sent_s = _summary(lambda record: column(record, "first_output_s") - sent_s(record))
tpot_s = _summary(times_per_token)
icl_s = _summary(lambda record: _gaps(record, is_ok(record)))
itl_s = _summary(lambda record: _gaps(record, is_ok(record) & mask(record, "is_single")))
input_len = _summary(lambda record: column(record, "prompt_len")[is_ok(record)])
output_len = _summary(lambda record: column(record, "output_len")[is_ok(record)])
due_rate, achieved_rate = _rate(lambda record: column(record, "arrival_s")), _rate(sent_s)


def num_resent(record: RunRecord) -> int:
    return sum(record.requests["was_resent"])


def prompt_tokens(record: RunRecord) -> int:
    return int(sum(n for n, ok in zip(record.requests["prompt_len"], is_ok(record), strict=True) if ok))


# -- checks -----------------------------------------------------------------------------------------------


def enough_requests(record: RunRecord) -> Iterator[str]:
    n = len(record.requests["request_id"])
    if 0 < n < MIN_REQUESTS:
        yield f"{n} requests are too few: send at least {MIN_REQUESTS}"


def submissions(record: RunRecord) -> Iterator[str]:
    """Requests must be submitted in time. The wait for a free place does not count, because it is not the harness's and is shown apart."""
    queue = np.nan_to_num(column(record, "client_queue_s"))
    yield from late_submissions(record, column(record, "arrival_s") + queue)


def rate_was_kept(record: RunRecord) -> Iterator[str]:
    due, achieved = due_rate(record), achieved_rate(record)
    if due is not None and achieved is not None and achieved < MIN_RATE_SHARE * due:
        longest = max((value for value in record.requests["client_queue_s"] if value is not None), default=0.0)
        reason = " (max_concurrency held requests back)" if longest > 0.001 else ""
        yield f"requests were sent at {achieved:.3g} per second and fell due at {due:.3g}{reason}"


def _ok_rows(record: RunRecord, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of these columns for each ok request."""
    for ok, *row in zip(is_ok(record), *(record.requests[name] for name in names), strict=True):
        if ok:
            yield tuple(row)


def output_lengths(record: RunRecord) -> Iterator[str]:
    """Answers have exactly the asked tokens if ends of text are ignored, else at most. We skip counts by a tokenizer, which can differ."""
    is_exact = record.facts.get("ignore_eos", False)
    rows = _ok_rows(record, "asked_tokens", "output_len", "counted_by")
    rows = ((target, actual) for target, actual, method in rows if method != "tokenizer" and target is not None)
    num_wrong = sum((actual != target if is_exact else actual > target) for target, actual in rows)
    if num_wrong:
        rule = "exactly" if is_exact else "at most"
        yield f"{num_wrong} answers have not {rule} the tokens that were asked for"


def prompt_lengths(record: RunRecord) -> Iterator[str]:
    """If the endpoint counts prompt tokens, it cannot have read more or less than we sent."""
    rows = _ok_rows(record, "prompt_len", "least_prompt", "most_prompt")
    mismatches = [(counted, low, high) for counted, low, high in rows if low is not None and not low <= counted <= high]
    if mismatches:
        counted, low, high = mismatches[0]
        sent = f"{low} that were sent" if low == high else f"{low} to {high} that what was sent can be"
        yield (
            f"in {len(mismatches)} answers the endpoint counts other prompt tokens (usage) than it got, the first {counted} of the {sent}"
        )


def answers_sent(record: RunRecord) -> Iterator[str]:
    """A token comes in one piece, and with its id if ids come. Only an end of text that ended the answer may have no id."""
    messages = []
    rows = _ok_rows(record, "output_len", "num_ids", "num_chunks", "finish_reason", "counted_by")
    for num_tokens, num_ids, pieces, reason in (row for *row, method in rows if method != "tokenizer"):
        num_missing = 0 if num_ids is None else num_tokens - num_ids
        if pieces > num_tokens or num_missing not in (0, int(reason == "stop")):
            messages.append(f"{num_tokens} (pieces: {pieces}" + (")" if num_ids is None else f", ids: {num_ids})"))
    if messages:
        yield f"{len(messages)} answers have not the tokens that the endpoint counts (usage), the first {messages[0]}"


def cold_cache(record: RunRecord) -> Iterator[str]:
    """No first turn may find its prompt in a cache. Later turns may find their own history."""
    rows = zip(record.requests["turn"], record.requests["cached_tokens"], strict=True)
    if warm := sum(turn == 0 and bool(cached) for turn, cached in rows):
        yield (
            f"{warm} first turns found a part of their prompt in a cache: start the endpoint again, or without prefix "
            f"caching"
        )


def no_drift(record: RunRecord) -> Iterator[str]:
    """The wait for the first output must not grow. We check only runs with a rate, because requests that come all at once have to wait."""
    if record.facts.get("requested_rate") is None:
        return
    ttft = without_nan(column(record, "first_output_s") - column(record, "arrival_s"))
    quarter = ttft.size // 4
    if quarter < MIN_REQUESTS // 2:
        return
    first, last = float(np.median(ttft[:quarter])), float(np.median(ttft[-quarter:]))
    if last > MAX_DRIFT * first and last - first > MIN_DRIFT_S:
        yield (
            f"the wait for the first output grew from {first:.3g} s to {last:.3g} s (medians of the first and the last "
            f"quarter): the rate is above what the endpoint serves"
        )


SHOW_IDS = "let the endpoint tell ids, as with --knob extra='{\"return_token_ids\": true}'"


def warnings(record: RunRecord) -> Iterator[str]:
    """Warnings that a reader of valid numbers has to know."""
    yield from _unseen_tokens(record)
    yield from _uncounted_tokens(record)
    yield from _bunched_pieces(record)
    if count := num_resent(record):
        yield (
            f"{count} requests were cut off unanswered on a connection that was used before, and sent once more on a fresh one: "
            f"their times count from the first sending"
        )


def _unseen_tokens(record: RunRecord) -> Iterator[str]:
    """Warn of counted tokens that leave no text: they may be ignored ends of text, or a false count."""
    rows = _ok_rows(record, "output_len", "text_bytes", "num_ids")
    if unseen := sum(ids is None and num_bytes is not None and tokens > num_bytes for tokens, num_bytes, ids in rows):
        yield f"{unseen} answers have fewer bytes of text than tokens (usage), and nothing shows the others: {SHOW_IDS}"


def _uncounted_tokens(record: RunRecord) -> Iterator[str]:
    """Warn of answers whose tokens are not counted by the endpoint's own usage."""
    counts = [method for (method,) in _ok_rows(record, "counted_by")]
    for method, source in (("token_ids", "the ids that it tells"), ("tokenizer", "the tokenizer that is given")):
        if method in counts:
            yield f"{counts.count(method)} answers have no count of tokens (usage): they were counted by {source}"
    firsts = [method for method, pieces in _ok_rows(record, "first_by", "num_chunks") if pieces > 1]
    if guessed := firsts.count("text"):
        yield (
            f"of {guessed} answers in pieces of several tokens nobody says how many the first has: for the time per token (tpot) its share "
            f"of the text was taken: {SHOW_IDS}, or give --knob tokenizer=FOLDER, the model's"
        )


def _bunched_pieces(record: RunRecord) -> Iterator[str]:
    rows, share = np.flatnonzero(_bunched(record)), bunched_share(record) or 0.0
    # The first piece of a read is not marked, so marked pieces of two reads are never adjacent.
    longest = 1 + max(map(len, np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)))
    if longest >= BUNCH or share > MAX_BUNCHED:
        owners = {record.tables[CHUNKS]["request_id"][row] for row in rows.tolist()}
        yield (
            f"{share:.3g} of the pieces, in {len(owners)} answers, came bunched, in one network read with the piece before them (up to "
            f"{longest} at once): gaps between pieces (icl, itl) say how they were delivered, not how they were made"
        )


HTTP = family_in(
    Path(__file__).parent,
    "http",
    globals() | {name: _summary(partial(column, name=name)) for name in _DISTRIBUTED},
    checks=(
        enough_requests,
        submissions,
        rate_was_kept,
        prompt_lengths,
        output_lengths,
        answers_sent,
        cold_cache,
        no_drift,
    ),
)
