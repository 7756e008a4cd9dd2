"""What a run leaves behind: plain tables, and the gaps between tokens as run lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.ar.cluster.decode_batch import Stay

Table = dict[str, list[Any]]

SESSION_COLUMNS = (
    "session_id",
    "arrival_s",
    "num_rounds",
    "prefill_tokens",
    "decode_tokens",
    "worker_id",
    "finished_s",
    "status",
)
"""``worker_id`` is the decode worker it was bound to; ``finished_s`` is null and ``status`` "unfinished" where the run
was stopped before its end, else "ok"."""
ROUND_COLUMNS = (
    "session_id",
    "round",
    "ready_s",
    "history",
    "prefill_tokens",
    "decode_tokens",
    "first_token_s",
    "finished_s",
    "is_local",
)
"""One row per round that became ready. TTFT is ``first_token_s`` - ``ready_s``; null where it never came."""
TASK_COLUMNS = (
    "task_id",
    "session_id",
    "round",
    "kind",
    "worker_id",
    "is_local",
    "reason",
    "history",
    "tokens",
    "computed_tokens",
    "estimate_s",
    "ready_s",
    "started_s",
    "finished_s",
    "landed_s",
    "postponed",
)
"""One row per prefill: where it was routed and why. ``computed_tokens`` exceeds ``tokens`` where part of the history
had been evicted; ``landed_s`` is when its K/V was with the decode worker."""
TRANSFER_COLUMNS = ("task_id", "content", "source", "target", "link", "tokens", "bytes", "start_s", "end_s")
"""``content`` is "history" (decode to prefill worker) or "increment" (back)."""
WORKER_COLUMNS = (
    "worker_id",
    "role",
    "degree",
    "server",
    "busy_prefill_s",
    "busy_decode_s",
    "num_prefills",
    "prefilled_tokens",
    "kv_capacity",
    "kv_peak",
    "kv_evicted",
    "num_preemptions",
)
"""K/V in tokens; null for a worker that only prefills. ``busy_prefill_s`` counts steps with a prefill in them."""


class Gaps(NamedTuple):
    """Gaps between consecutive tokens of a round; run i is ``tokens[i]`` gaps of mean ``gap_s[i]``. Sorted by row."""

    row: npt.NDArray[np.int64]
    """Of the rounds table."""
    gap_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    sessions: Table
    rounds: Table
    tasks: Table
    transfers: Table
    workers: Table
    gaps: Gaps
    facts: Mapping[str, Any]
    """system, model, gpu, constants, deployment, seed, num_events, end_s; ``stop_reason`` where a run was given up, and
    ``overload_reason`` where its arrivals asked for more prefill than the workers can do (``prefill_load`` above 1)."""

    @property
    def num_sessions(self) -> int:
        return len(self.sessions["session_id"])


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    return {name: [row[index] for row in rows] for index, name in enumerate(columns)}


def gaps_of(stays: Sequence[tuple[int, Stay]], logs: Mapping[int, tuple[Sequence[float], Sequence[int]]]) -> Gaps:
    """Each stay is its own first gap and a slice of its worker's log (``DecodeBatch``)."""
    if not stays:
        return Gaps(np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int64))
    offsets: dict[int, int] = {}
    total = 0
    for worker_id, (gaps, _) in logs.items():
        offsets[worker_id] = total
        total += len(gaps)
    log_gap = np.concatenate([np.asarray(gaps, dtype=np.float64) for gaps, _ in logs.values()])
    log_count = np.concatenate([np.asarray(counts, dtype=np.int64) for _, counts in logs.values()])
    row = np.array([stay.row for _, stay in stays], dtype=np.int64)
    first = np.array([stay.first_gap_s for _, stay in stays], dtype=np.float64)
    start = np.array([offsets[worker] + stay.start for worker, stay in stays], dtype=np.int64)
    length = np.array([stay.end - stay.start for _, stay in stays], dtype=np.int64)
    # Of the slices, one index after the other: start[i] + 0..length[i].
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    index = np.repeat(start, length) + within
    rows = np.concatenate([row, np.repeat(row, length)])
    order = np.argsort(rows, kind="stable")
    return Gaps(
        rows[order],
        np.concatenate([first, log_gap[index]])[order],
        np.concatenate([np.ones(len(row), dtype=np.int64), log_count[index]])[order],
    )
