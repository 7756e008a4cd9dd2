"""What a client can see of an endpoint. Times count from the due time unless they say otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from repro.runs.metrics import Floats, Metric, distribution, floats, is_ok, metric, told_of_good
from repro.runs.record import RunRecord
from repro.systems.http.columns import CHUNKS

_NONE_SENT = "per entry: none sent; std below 2, pQ below 100 / (100 - Q) of them"
_FEW = "fewer than two first turns sent, or all at one moment"


def sent_s(record: RunRecord) -> Floats:
    """[requests] when each was sent; NaN where it was not."""
    return floats(record.requests["arrival_s"]) + floats(record.requests["submit_lag_s"])


@metric("s", "distribution of sent - due - client_queue_s", _NONE_SENT)
def schedule_delay_s(record: RunRecord) -> dict[str, Any]:
    """How late the client itself was, the wait for a place left out."""
    return _known(floats(record.requests["submit_lag_s"]) - floats(record.requests["client_queue_s"]))


@metric("s", "distribution of the wait under max_concurrency", _NONE_SENT)
def client_queue_s(record: RunRecord) -> dict[str, Any]:
    return _known(floats(record.requests["client_queue_s"]))


@metric("s", "distribution of first piece - sent", _NONE_SENT)
def ttft_sent_s(record: RunRecord) -> dict[str, Any]:
    return _known(floats(record.requests["first_output_s"]) - sent_s(record))


@metric(
    "s",
    "distribution over requests of (end of the answer - first piece) / (output_len - 1)",
    "one token, or an answer in one piece",
)
def tpot_s(record: RunRecord) -> dict[str, Any]:
    return _known(_times_per_token(record))


def _times_per_token(record: RunRecord) -> Floats:
    """[requests] (E2EL - TTFT) / (n_out - 1); NaN for one token, or an answer in one piece."""
    table = record.requests
    tokens, pieces = floats(table["output_len"]), np.asarray(table["num_chunks"])
    with np.errstate(divide="ignore", invalid="ignore"):
        times = (floats(table["finished_s"]) - floats(table["first_output_s"])) / (tokens - 1)
    times[~((tokens > 1) & (pieces > 1) & is_ok(record))] = np.nan
    return times


@metric("s", "distribution of gaps between pieces", "answers in one piece")
def icl_s(record: RunRecord) -> dict[str, Any]:
    return _known(_gaps(record, is_ok(record)))


@metric("s", "distribution of gaps between tokens", "answers in pieces of several tokens")
def itl_s(record: RunRecord) -> dict[str, Any]:
    single = np.asarray(record.requests["num_chunks"]) == floats(record.requests["output_len"])
    return _known(_gaps(record, is_ok(record) & single))


def _gaps(record: RunRecord, of: np.ndarray) -> Floats:
    owner = np.asarray(record.tables[CHUNKS]["request_id"], dtype=np.int64)
    arrived = floats(record.tables[CHUNKS]["arrived_s"])
    # Requests are numbered by their rows, and pieces are in their order.
    together = (owner[1:] == owner[:-1]) & of[owner[1:]] if owner.size else np.zeros(0, dtype=bool)
    return np.diff(arrived)[together] if owner.size else arrived


@metric("requests/s", "as asked; of sessions, where they are", "all at once")
def requested_rate(record: RunRecord) -> float | None:
    rate: float | None = record.facts.get("requested_rate")
    return rate


@metric("requests/s", "(first turns - 1) / span of their due times", _FEW)
def due_rate(record: RunRecord) -> float | None:
    """The rate of the arrivals that were drawn, which a finite number of draws moves off the requested rate."""
    return _rate(floats(record.requests["arrival_s"])[_first_turns(record)])


@metric("requests/s", "(first turns - 1) / span of their sending", _FEW)
def achieved_rate(record: RunRecord) -> float | None:
    return _rate(sent_s(record)[_first_turns(record)])


def _first_turns(record: RunRecord) -> np.ndarray:
    return np.asarray(record.requests["turn"]) == 0


def _rate(times: Floats) -> float | None:
    times = times[~np.isnan(times)]
    span = float(times.max() - times.min()) if times.size > 1 else 0.0
    return (times.size - 1) / span if span > 0 else None


@metric("requests", "most under way at once")
def peak_concurrency(record: RunRecord) -> int:
    begun, ended = sent_s(record), floats(record.requests["finished_s"])
    known = ~np.isnan(begun) & ~np.isnan(ended)
    events = sorted([(t, 1) for t in begun[known].tolist()] + [(t, -1) for t in ended[known].tolist()])
    return int(np.cumsum([step for _, step in events]).max()) if events else 0


@metric("requests/s, share", "within the limits of goodput / window_s; / all", "no limits")
def goodput_http(record: RunRecord) -> dict[str, Any]:
    """Good requests are ok and keep every limit of ``goodput``; the others count against attainment."""
    limits: dict[str, float] = record.facts.get("goodput", {})
    if not limits:
        return {}
    table = record.requests
    arrival = floats(table["arrival_s"])
    times = {
        "ttft": floats(table["first_output_s"]) - arrival,
        "e2el": floats(table["finished_s"]) - arrival,
        "tpot": _times_per_token(record),
    }
    good = is_ok(record)
    for name, limit in limits.items():
        # An answer in one piece has no time per token, and breaks no limit of it.
        good = good & ((times[name] <= limit) | (np.isnan(times[name]) if name == "tpot" else False))
    return {"limits_s": limits, **told_of_good(record, good)}


def _known(times: Floats) -> dict[str, Any]:
    return distribution(times[~np.isnan(times)])


@metric("tokens", "distribution of prompt_len over ok requests", "no ok request")
def input_len(record: RunRecord) -> dict[str, Any]:
    return distribution(floats(record.requests["prompt_len"])[is_ok(record)])


@metric("tokens", "distribution of output_len over ok requests", "no ok request")
def output_len(record: RunRecord) -> dict[str, Any]:
    return distribution(floats(record.requests["output_len"])[is_ok(record)])


@metric("tokens", "sum of prompt_len over ok requests")
def prompt_tokens(record: RunRecord) -> int:
    return int(sum(n for n, ok in zip(record.requests["prompt_len"], is_ok(record), strict=True) if ok))


HTTP_METRICS: tuple[Metric, ...] = (
    ttft_sent_s,
    tpot_s,
    itl_s,
    icl_s,
    schedule_delay_s,
    client_queue_s,
    requested_rate,
    due_rate,
    achieved_rate,
    peak_concurrency,
    input_len,
    output_len,
    prompt_tokens,
    goodput_http,
)
