"""What is checked of a run on the cluster: that it ended, that it could have gone on, and that nothing was lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engines.ar.record import rows_of
from repro.runs.record import RunRecord
from repro.systems.ar.columns import ROUNDS, TASKS, TRANSFERS, WORKERS


def _drained(record: RunRecord) -> Iterator[str]:
    facts = record.facts
    if (reason := facts["stop_reason"]) is not None:
        yield f"it was given up: {reason}"
    if (reason := facts["overload_reason"]) is not None and not facts["is_transient"]:
        yield f"the rate never drains: {reason}; lower it, or set transient=true to read this number of sessions alone"


def _rounds_are_whole(record: RunRecord) -> Iterator[str]:
    """Finished sessions have all their rounds and tokens."""
    rounds, sessions = record.tables[ROUNDS], record.requests
    ids = np.asarray(sessions["request_id"], dtype=np.int64)
    place = {session: row for row, session in enumerate(ids.tolist())}
    rows = np.array([place[session] for session in rounds["session_id"]], dtype=np.int64)
    ok = np.array([status == "ok" for status in sessions["status"]], dtype=np.bool_)
    for what, column in (("rounds", None), ("prefill", "prefill_tokens"), ("decode", "decode_tokens")):
        weights = None if column is None else np.asarray(rounds[column], dtype=np.float64)
        counted = np.bincount(rows, weights=weights, minlength=len(ids))
        due = sessions[{"rounds": "num_rounds", "prefill": "prompt_len", "decode": "decode_tokens"}[what]]
        if wrong := int(((counted != np.asarray(due)) & ok).sum()):
            yield f"{wrong} finished sessions do not have the {what} they asked for"


def _transfers_match(record: RunRecord) -> Iterator[str]:
    """A remote prefill sends back what it was asked for and the history it had to compute again."""
    transfers = rows_of(record.tables[TRANSFERS], "task_id", "content", "tokens")
    tasks = rows_of(record.tables[TASKS], "task_id", "is_local", "computed_tokens")
    sent = {task: tokens for task, content, tokens in transfers if content == "increment"}
    remote = {task: tokens for task, is_local, tokens in tasks if not is_local and tokens is not None}
    if wrong := sum(sent.get(task) != tokens for task, tokens in remote.items()):
        yield f"{wrong} remote prefills sent back other K/V than they computed"


def _memory_held(record: RunRecord) -> Iterator[str]:
    pairs = rows_of(record.tables[WORKERS], "kv_peak", "kv_capacity")
    if wrong := sum(peak is not None and peak > capacity for peak, capacity in pairs):
        yield f"{wrong} workers held more K/V than they have memory for"


AR_CHECKS = (_drained, _rounds_are_whole, _transfers_match, _memory_held)
