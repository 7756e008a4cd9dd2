"""When the numbers of a run against an endpoint may not be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from repro.runs.metrics import floats, is_ok
from repro.runs.record import RunRecord
from repro.runs.validity import late_submissions
from repro.systems.http.metrics import achieved_rate, due_rate
from repro.systems.http.server_metrics import tokens_generated

MIN_REQUESTS = 10
"""Below it there is no p90 and no verdict."""
MIN_RATE_SHARE = 0.95
"""The share of the rate at which requests fell due that they have to be sent at."""
MAX_DRIFT, MIN_DRIFT_S = 2.0, 0.1
"""A run drifts whose last quarter waits this many times as long for its first output as its first quarter, and this much
longer: the rate is above what the endpoint can serve, and latencies say how long the run was."""
MAX_OTHERS = 0.01
"""Share of tokens that others may have had of the server."""


def enough_requests(record: RunRecord) -> Iterator[str]:
    if 0 < record.num_requests < MIN_REQUESTS:
        yield f"{record.num_requests} requests are too few: send at least {MIN_REQUESTS}"


def submissions(record: RunRecord) -> Iterator[str]:
    """The wait for a place is shown apart, and is not the harness's."""
    queue = np.nan_to_num(floats(record.requests["client_queue_s"]))
    yield from late_submissions(record, floats(record.requests["arrival_s"]) + queue)


def rate_was_kept(record: RunRecord) -> Iterator[str]:
    due, achieved = due_rate(record), achieved_rate(record)
    if due is not None and achieved is not None and achieved < MIN_RATE_SHARE * due:
        longest = max((value for value in record.requests["client_queue_s"] if value is not None), default=0.0)
        held = " (max_concurrency held requests back)" if longest > 0.001 else ""
        yield f"requests were sent at {achieved:.3g} per second and fell due at {due:.3g}{held}"


def _ok_rows(record: RunRecord, *names: str) -> Iterator[tuple[Any, ...]]:
    """These columns of the requests that are ok."""
    for ok, *row in zip(is_ok(record), *(record.requests[name] for name in names), strict=True):
        if ok:
            yield tuple(row)


def output_lengths(record: RunRecord) -> Iterator[str]:
    """Exactly as long as asked for where ends of text are ignored, else at most."""
    is_exact = record.facts.get("ignore_eos", False)
    rows = _ok_rows(record, "asked_tokens", "output_len")
    wrong = sum((got != asked if is_exact else got > asked) for asked, got in rows)
    if wrong:
        rule = "exactly" if is_exact else "at most"
        yield f"{wrong} answers have not {rule} the tokens that were asked for"


def prompt_lengths(record: RunRecord) -> Iterator[str]:
    """As the endpoint counts them, where it does: it cannot have read more or less than was sent."""
    rows = _ok_rows(record, "prompt_len", "least_prompt", "most_prompt")
    wrong = [(told, least, most) for told, least, most in rows if not least <= told <= most]
    if wrong:
        told, least, most = wrong[0]
        sent = f"{least} that were sent" if least == most else f"{least} to {most} that what was sent can be"
        yield (
            f"in {len(wrong)} answers the endpoint counts other prompt tokens (usage) than it got, the first {told} of the {sent}"
        )


def answers_sent(record: RunRecord) -> Iterator[str]:
    """A token comes in one piece, and with its id where ids come; an end of text that was heeded may stay unsaid."""
    wrong = []
    for told, ids, pieces, reason in _ok_rows(record, "output_len", "num_ids", "num_chunks", "finish_reason"):
        unsaid = 0 if ids is None else told - ids
        if pieces > told or unsaid not in (0, int(reason == "stop")):
            wrong.append(f"{told} (pieces: {pieces}" + (")" if ids is None else f", ids: {ids})"))
    if wrong:
        yield f"{len(wrong)} answers have not the tokens that the endpoint counts (usage), the first {wrong[0]}"


def cold_cache(record: RunRecord) -> Iterator[str]:
    """A first turn has seen nothing of its prompt before; later ones may find their own history."""
    rows = zip(record.requests["turn"], record.requests["cached_tokens"], strict=True)
    if warm := sum(turn == 0 and bool(cached) for turn, cached in rows):
        yield (
            f"{warm} first turns found a part of their prompt in a cache: start the endpoint again, or without prefix "
            f"caching"
        )


def no_drift(record: RunRecord) -> Iterator[str]:
    """Looks at runs with a rate: what comes all at once waits as long as it must."""
    if record.facts.get("requested_rate") is None:
        return
    ttft = floats(record.requests["first_output_s"]) - floats(record.requests["arrival_s"])
    ttft = ttft[~np.isnan(ttft)]
    quarter = ttft.size // 4
    if quarter < MIN_REQUESTS // 2:
        return
    first, last = float(np.median(ttft[:quarter])), float(np.median(ttft[-quarter:]))
    if last > MAX_DRIFT * first and last - first > MIN_DRIFT_S:
        yield (
            f"the wait for the first output grew from {first:.3g} s to {last:.3g} s (medians of the first and the last "
            f"quarter): the rate is above what the endpoint serves"
        )


def nobody_else(record: RunRecord) -> Iterator[str]:
    """By the server's own count of tokens, where it tells one. Of failed requests nobody knows how many they had."""
    counted = tokens_generated(record.facts.get("server_metrics"))
    if counted is None or not is_ok(record).all():
        return
    own = sum(record.requests["output_len"])
    if counted > (1 + MAX_OTHERS) * own:
        yield (
            f"the server generated {counted:.0f} tokens during the run, of which {own} were asked for here: measure it while "
            f"nobody else uses it"
        )


def unseen_tokens(record: RunRecord) -> Iterator[str]:
    """What a reader of valid numbers has to know: ends of text that are ignored leave no text, and neither does a lie."""
    rows = _ok_rows(record, "output_len", "text_bytes", "num_ids")
    if unseen := sum(ids is None and told > num_bytes for told, num_bytes, ids in rows):
        yield (
            f"{unseen} answers have fewer bytes of text than tokens (usage), and nothing shows the others: let the endpoint tell "
            f"ids, as with --knob extra='{{\"return_token_ids\": true}}'"
        )


HTTP_CHECKS = (
    enough_requests,
    submissions,
    rate_was_kept,
    prompt_lengths,
    output_lengths,
    answers_sent,
    cold_cache,
    no_drift,
    nobody_else,
)
