"""Whether a run's numbers may be used, and if not, why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from repro.runs.metrics import min_count, request_times, status_counts
from repro.runs.record import RunRecord

MAX_HARNESS_DELAY_S = 0.010
MAX_HARNESS_DELAY_SHARE = 0.01
"""A submission is late when the harness itself added more than the larger of 10 ms and 1 % of the mean
latency; time inside a step that was running when the request fell due is not counted, since any engine that
admits between steps has it. A run is invalid when more than 1 % of its submissions are late."""
MAX_LATE_SHARE = 0.01

_ORDER = ("arrival_s", "admitted_s", "first_block_s", "finished_s")


@dataclass(frozen=True, kw_only=True)
class Validity:
    valid: bool
    reasons: tuple[str, ...]


def assess(record: RunRecord, *, min_requests: int = 1, percentiles: Sequence[int] = ()) -> Validity:
    """``percentiles`` are those a caller is going to read; each needs ``metrics.min_count`` ok requests."""
    checks = (
        _request_counts(record, min_requests, percentiles),
        _request_times(record),
        _step_times(record),
        _step_counts(record),
        _output_lengths(record),
        _late_submissions(record),
    )
    reasons = tuple(reason for check in checks for reason in check)
    return Validity(valid=not reasons, reasons=reasons)


def _request_counts(record: RunRecord, min_requests: int, percentiles: Sequence[int]) -> Iterator[str]:
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
    if (repeated := n - len(set(record.requests["request_id"]))) > 0:
        yield f"{repeated} request ids are repeated"
    if counts["ok"] < min_requests:
        yield f"{counts['ok']} finished requests are fewer than the {min_requests} asked for"
    for q in percentiles:
        if counts["ok"] < min_count(q):
            yield f"{counts['ok']} finished requests are too few for p{q}, which needs {min_count(q)}"


def _request_times(record: RunRecord) -> Iterator[str]:
    """arrival <= admitted <= first block <= finished. A stamp no request has was not observed, which is no fault."""
    table = record.requests
    is_ok = np.asarray([status == "ok" for status in table["status"]], dtype=np.bool_)
    stamps = {name: np.asarray(table[name], dtype=np.float64) for name in _ORDER}
    for name in _ORDER[1:]:
        missing = int((np.isnan(stamps[name]) & is_ok).sum())
        if missing and (name == "finished_s" or missing < int(is_ok.sum())):
            yield f"{missing} finished requests have no {name}"
    if any(lag is not None and lag < 0 for lag in table["submit_lag_s"]):
        yield "some requests were submitted before they were due"
    for i, earlier in enumerate(_ORDER):
        for later in _ORDER[i + 1 :]:
            # A comparison with NaN, a missing stamp, is False.
            if wrong := int((stamps[later] < stamps[earlier]).sum()):
                yield f"{wrong} requests have {later} before {earlier}"


def _step_times(record: RunRecord) -> Iterator[str]:
    table = record.steps
    start, end = np.asarray(table["start_s"], dtype=np.float64), np.asarray(table["end_s"], dtype=np.float64)
    duration, forward = (
        np.asarray(table["duration_s"], dtype=np.float64),
        np.asarray(table["forward_s"], dtype=np.float64),
    )
    if wrong := int((end < start).sum()):
        yield f"{wrong} steps end before they start"
        return
    if wrong := int((start[1:] < end[:-1]).sum()):
        yield f"{wrong} steps start before the previous one ends"
    if wrong := int(((duration < 0) | (forward < 0)).sum()):
        yield f"{wrong} steps have a negative duration"
    # A device may lag behind the steps that hand it work, but not begin before them, nor end after the last of them.
    # Two timers may differ by their resolution.
    to_come, to_end = np.cumsum(np.where(np.isnan(forward), 0, forward)[::-1])[::-1], end[-1:] - start
    if wrong := int((to_come > to_end * (1 + 1e-6) + 1e-6).sum()):
        yield f"{wrong} steps and those after them spend longer in the forward than they last"


def _step_counts(record: RunRecord) -> Iterator[str]:
    if record.num_steps == 0:
        return
    counts = status_counts(record)
    for status, column in (("ok", "num_finished"), ("failed", "num_failed")):
        if (reported := sum(record.steps[column])) != counts[status]:
            yield f"steps report {reported} requests as {status}, the request table has {counts[status]}"
    used, total = np.asarray(record.steps["kv_rows_used"]), np.asarray(record.steps["kv_rows_total"])
    if wrong := int((used > total).sum()):
        yield f"{wrong} steps use more KV rows than the pool has"
    cap = record.manifest.get("max_num_batched_tokens")
    if cap is not None and (wrong := int((np.asarray(record.steps["scheduled_tokens"]) > cap).sum())):
        yield f"{wrong} steps schedule more than max_num_batched_tokens={cap}"


def _output_lengths(record: RunRecord) -> Iterator[str]:
    """Committed tokens against what the requests have and asked for: open ones may have committed a part, and
    one that a stop token ended has committed its whole block."""
    asked, got = record.requests["gen_length"], record.requests["output_len"]
    rows = zip(record.requests["status"], asked, got, strict=True)
    if wrong := sum(not 1 <= (n or 0) <= most if status == "ok" else n is not None for status, most, n in rows):
        yield f"{wrong} requests have an output_len that cannot be theirs"
        return
    if record.num_steps == 0:
        return
    least = sum(length for length in got if length is not None)
    most = sum(asked)
    committed = sum(record.steps["committed_tokens"])
    if not least <= committed <= most:
        yield f"wrong output lengths: {committed} tokens were committed, {least if committed < least else most} were due"


def _late_submissions(record: RunRecord) -> Iterator[str]:
    lag = np.asarray(record.requests["submit_lag_s"], dtype=np.float64)
    was_submitted = ~np.isnan(lag)
    due = np.asarray(record.requests["arrival_s"], dtype=np.float64)[was_submitted]
    if due.size == 0:
        return
    earliest = due
    if record.num_steps:
        start, end = np.asarray(record.steps["start_s"]), np.asarray(record.steps["end_s"])
        running = np.searchsorted(start, due, side="right") - 1
        earliest = np.where(running >= 0, np.maximum(due, end[running]), due)
    delay = due + lag[was_submitted] - earliest
    latencies = request_times(record, "e2el_s")
    limit = max(MAX_HARNESS_DELAY_S, MAX_HARNESS_DELAY_SHARE * float(latencies.mean()) if latencies.size else 0.0)
    late = int((delay > limit).sum())
    if late > MAX_LATE_SHARE * due.size:
        yield (
            f"{late} of {due.size} requests were submitted more than {limit * 1e3:.3g} ms late by the harness "
            f"(worst {float(delay.max()) * 1e3:.3g} ms)"
        )
