"""What is checked of a run of a diffusion-LLM engine: its steps against each other and against its requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.runs.metrics import floats, status_counts
from repro.runs.record import RunRecord
from repro.runs.validity import late_submissions
from repro.systems.dllm.columns import STEPS
from repro.systems.dllm.metrics import num_steps


def step_times(record: RunRecord) -> Iterator[str]:
    table = record.tables[STEPS]
    start, end, duration, forward = (floats(table[name]) for name in ("start_s", "end_s", "duration_s", "forward_s"))
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


def step_counts(record: RunRecord) -> Iterator[str]:
    if num_steps(record) == 0:
        return
    counts, table = status_counts(record), record.tables[STEPS]
    for status, column in (("ok", "num_finished"), ("failed", "num_failed")):
        if (reported := sum(table[column])) != counts[status]:
            yield f"steps report {reported} requests as {status}, the request table has {counts[status]}"
    used, total, computed = (np.asarray(table[name]) for name in ("kv_rows_used", "kv_rows_total", "query_tokens"))
    if wrong := int((used > total).sum()):
        yield f"{wrong} steps use more KV rows than the pool has"
    cap = record.manifest.get("max_num_batched_tokens")
    if cap is not None and (wrong := int((computed > cap).sum())):
        yield f"{wrong} steps compute up to {int(computed.max())} query tokens, max_num_batched_tokens={cap}"


def output_lengths(record: RunRecord) -> Iterator[str]:
    """Committed tokens against what the requests have and asked for: open ones may have committed a part, and
    one that a stop token ended has committed its whole block."""
    asked, got = record.requests["gen_length"], record.requests["output_len"]
    rows = zip(record.requests["status"], asked, got, strict=True)
    if wrong := sum(not 1 <= (n or 0) <= most if status == "ok" else n is not None for status, most, n in rows):
        yield f"{wrong} requests have an output_len that cannot be theirs"
        return
    if num_steps(record) == 0:
        return
    least = sum(length for length in got if length is not None)
    most = sum(asked)
    committed = sum(record.tables[STEPS]["committed_tokens"])
    if not least <= committed <= most:
        yield f"wrong output lengths: {committed} tokens were committed, {least if committed < least else most} were due"


def submissions(record: RunRecord) -> Iterator[str]:
    """Time inside a step that was running when a request fell due is not the harness's: any engine that admits between
    steps has it."""
    due = floats(record.requests["arrival_s"])
    earliest = due
    if num_steps(record):
        start, end = (np.asarray(record.tables[STEPS][name]) for name in ("start_s", "end_s"))
        running = np.searchsorted(start, due, side="right") - 1
        earliest = np.where(running >= 0, np.maximum(due, end[running]), due)
    yield from late_submissions(record, earliest)


DLLM_CHECKS = (step_times, step_counts, output_lengths, submissions)
