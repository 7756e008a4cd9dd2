"""What a run of prefill instances leaves behind: plain tables, from which every number is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.cluster.record import Table, TaskRow
from engines.policies.instances import LengthClass


def requests_of(
    prefills: Sequence[TaskRow], class_of: Callable[[int], LengthClass], slo_s: float | None, end_s: float
) -> Table:
    """Columns of the requests, turns in order of arrival, that these prefills and no recomputation are.

    ``history`` and ``tokens`` are as prefilled: what was not cached where it ran counts as tokens. ``started_s``, ``finished_s`` (its
    first token) and ``instance`` are null where the run ended before. ``violated`` says whether the first token came later than the
    objective allows, and is null where the run's end left it open.
    """
    rows = [row for row in prefills if row.kind != "recompute"]
    deadlines = [None if slo_s is None else row.ready_s + slo_s for row in rows]
    late = [
        deadline_s is not None and deadline_s < (end_s if row.landed_s is None else row.landed_s)
        for row, deadline_s in zip(rows, deadlines, strict=True)
    ]
    return {
        "request_id": list(range(len(rows))),
        "session_id": [row.session_id for row in rows],
        "turn": [row.round for row in rows],
        "length_class": [class_of(row.tokens) for row in rows],
        "history": [row.history for row in rows],
        "tokens": [row.tokens for row in rows],
        "arrival_s": [row.ready_s for row in rows],
        "started_s": [row.started_s for row in rows],
        "finished_s": [row.landed_s for row in rows],
        "instance": [None if row.started_s is None else row.worker_id for row in rows],
        "deadline_s": deadlines,
        "violated": [
            is_late if is_late or row.landed_s is not None else None for row, is_late in zip(rows, late, strict=True)
        ],
    }


@dataclass(slots=True)
class StepRow:
    """A step that ended."""

    instance: int
    """Where it ran."""
    start_s: float
    """Begin."""
    duration_s: float
    """How long it took."""
    tokens: int
    """Tokens prefilled."""
    padded_tokens: int
    """Tokens computed, a graph's padding included."""
    num_short: int
    """Short requests in it."""
    num_long: int
    """Long requests in it."""
    num_finished: int
    """Requests whose last token it computed."""
    mode: str
    """eager, fallback, graph LxB or rung N."""


@dataclass(slots=True)
class MoveRow:
    """A decision of the controller that moved an instance."""

    time_s: float
    """When the controller moved an instance."""
    instance: int
    """Which."""
    to: LengthClass
    """Pool it went to."""
    short_pressure: float
    """P_s of Algorithm 2."""
    long_pressure: float
    """P_l."""
    num_short: int
    """n_s afterwards."""


@dataclass(slots=True)
class InstanceRow:
    """What an instance did. The part of a step that lies before the end of the run counts."""

    instance: int
    """Its number."""
    pool: LengthClass | None
    """Its pool at the end; null without pools."""
    busy_s: float
    """Time in steps."""
    num_steps: int
    """Steps."""
    num_finished: int
    """Requests finished."""
    tokens: int
    """Tokens prefilled."""
    padded_tokens: int
    """Tokens computed, padding included."""


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    requests: Table
    steps: Table
    moves: Table
    instances: Table
    facts: Mapping[str, Any]
    """end_s and num_events."""
