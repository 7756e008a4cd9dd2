"""Whether a run's numbers may be used, and if not, why: what is checked of every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from repro.runs.metrics import Floats, floats, is_ok, request_times, status_counts
from repro.runs.record import RunRecord

MAX_HARNESS_DELAY_S = 0.010
MAX_HARNESS_DELAY_SHARE = 0.01
"""A submission is late when the harness itself added more than the larger of 10 ms and 1 % of the mean latency. A run is
invalid when more than 1 % of its submissions are late."""
MAX_LATE_SHARE = 0.01

_ORDER = ("arrival_s", "admitted_s", "first_output_s", "finished_s")


@dataclass(frozen=True, kw_only=True)
class Validity:
    valid: bool
    reasons: tuple[str, ...]
    """Why not."""
    warnings: tuple[str, ...] = ()
    """What a reader of valid numbers has to know: that the machine was busy with something else, or the facts' ``warnings``."""


def request_counts(record: RunRecord) -> Iterator[str]:
    n, counts = record.num_requests, status_counts(record)
    if n == 0:
        yield "there are no requests"
        return
    if counts["failed"]:
        first = next(error for error in record.requests["error"] if error is not None)
        yield f"{counts['failed']} of {n} requests failed, the first with: {first}"
    if counts["unfinished"]:
        yield f"{counts['unfinished']} of {n} requests did not finish"
    if other := n - sum(counts.values()):
        yield f"{other} of {n} requests have an unknown status"
    if negative := sum(length is not None and length < 0 for length in record.requests["output_len"]):
        yield f"{negative} of {n} requests have an output_len below 0"
    if (repeated := n - len(set(record.requests["request_id"]))) > 0:
        yield f"{repeated} request ids are repeated"


def request_stamps(record: RunRecord) -> Iterator[str]:
    """arrival <= admitted <= first output <= finished. A stamp no request has was not observed, which is no fault."""
    table = record.requests
    ok, stamps = is_ok(record), {name: floats(table[name]) for name in _ORDER}
    for name in _ORDER[1:]:
        missing = int((np.isnan(stamps[name]) & ok).sum())
        if missing and (name == "finished_s" or missing < int(ok.sum())):
            yield f"{missing} finished requests have no {name}"
    if any(lag is not None and lag < 0 for lag in table["submit_lag_s"]):
        yield "some requests were submitted before they were due"
    for i, earlier in enumerate(_ORDER):
        for later in _ORDER[i + 1 :]:
            # A comparison with NaN, a missing stamp, is False.
            if wrong := int((stamps[later] < stamps[earlier]).sum()):
                yield f"{wrong} requests have {later} before {earlier}"


def late_submissions(record: RunRecord, earliest: Floats | None = None) -> Iterator[str]:
    """``earliest`` is when each request could be submitted at all, where that is later than its due time."""
    lag = floats(record.requests["submit_lag_s"])
    was_submitted = ~np.isnan(lag)
    due = floats(record.requests["arrival_s"])[was_submitted]
    if due.size == 0:
        return
    possible = due if earliest is None else earliest[was_submitted]
    delay = due + lag[was_submitted] - possible
    latencies = request_times(record, "e2el_s")
    limit = max(MAX_HARNESS_DELAY_S, MAX_HARNESS_DELAY_SHARE * float(latencies.mean()) if latencies.size else 0.0)
    late = int((delay > limit).sum())
    if late > MAX_LATE_SHARE * due.size:
        yield (
            f"{late} of {due.size} requests were submitted more than {limit * 1e3:.3g} ms late by the harness "
            f"(worst {float(delay.max()) * 1e3:.3g} ms)"
        )


CHECKS = (request_counts, request_stamps)
