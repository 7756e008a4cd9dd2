"""What a run of prefill instances leaves behind: plain tables, from which every number is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.ar.cluster.record import Table
from engines.policies.step import Bucket, Fallback, Rung

REQUEST_COLUMNS = (
    "request_id",
    "session_id",
    "turn",
    "length_class",
    "history",
    "tokens",
    "arrival_s",
    "started_s",
    "finished_s",
    "instance",
    "deadline_s",
    "violated",
)
"""One row per request that arrived. ``finished_s`` is its first token; TTFT is ``finished_s`` - ``arrival_s``.

``history`` and ``tokens`` are as prefilled: what was not cached where it ran counts as tokens. Null: not reached by
the end of the run. ``violated`` is null where the run's end left it open: unfinished, its deadline not yet passed."""
STEP_COLUMNS = (
    "instance",
    "start_s",
    "duration_s",
    "tokens",
    "padded_tokens",
    "num_short",
    "num_long",
    "num_finished",
    "mode",
)
"""One row per step that ended. ``num_short`` and ``num_long`` count requests; ``padded_tokens`` includes padding."""
MOVE_COLUMNS = ("time_s", "instance", "to", "short_pressure", "long_pressure", "num_short")
"""One row per decision of the controller that moved an instance; ``num_short`` is n_s afterwards."""
INSTANCE_COLUMNS = ("instance", "pool", "busy_s", "num_steps", "num_finished", "tokens", "padded_tokens")
"""``busy_s`` counts the part of a step that lies before the end of the run."""


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    requests: Table
    steps: Table
    moves: Table
    instances: Table
    facts: Mapping[str, Any]
    """system, model, gpu, num_instances, slo_s, boundary, cache, reprefills_answer, until_s, seed, num_events."""

    @property
    def num_requests(self) -> int:
        return len(self.requests["request_id"])


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A row a tuple of ``columns``, turned."""
    if not rows:
        return {name: [] for name in columns}
    return dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))


def mode_label(mode: object) -> str:
    """As in the steps table: "eager", "fallback", "graph 64x8" or "rung 512"."""
    if mode is None:
        return "eager"
    if isinstance(mode, Fallback):
        return "fallback"
    if isinstance(mode, Bucket):
        return f"graph {mode.length}x{mode.batch}"
    if isinstance(mode, Rung):
        return f"rung {mode.tokens}"
    return str(mode)
