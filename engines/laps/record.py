"""What a run of prefill instances leaves behind: plain tables, from which every number is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engines.ar.record import Table
from engines.policies.instances import LengthClass

PREFILLED = ("kind", "session_id", "round", "history", "tokens", "ready_s", "started_s", "landed_s", "worker_id")
"""Columns of prefills (``engines.ar.record.TaskRow``) that requests are read from."""


def requests_of(
    prefills: Iterable[tuple[Any, ...]], class_of: Callable[[int], LengthClass], slo_s: float | None, end_s: float
) -> Table:
    """A request is a turn that arrived, in order of arrival; ``prefills`` are rows of ``PREFILLED``.

    ``history`` and ``tokens`` are as prefilled: what was not cached where it ran counts as tokens. ``started_s``, ``finished_s`` (its
    first token) and ``instance`` are null where the run ended before. ``violated`` says whether the first token came later than the
    objective allows, and is null where the run's end left it open.
    """
    names = ("session_id", "turn", "length_class", "history", "tokens", "arrival_s", "started_s", "finished_s")
    found: Table = {name: [] for name in ("request_id", *names, "instance", "deadline_s", "violated")}
    add = [column.append for column in found.values()]
    number = 0
    for kind, session_id, turn, history, tokens, ready_s, started_s, landed_s, worker in prefills:
        if kind == "recompute":
            continue
        deadline_s = None if slo_s is None else ready_s + slo_s
        is_late = deadline_s is not None and deadline_s < (end_s if landed_s is None else landed_s)
        row = (
            number,
            session_id,
            turn,
            class_of(tokens),
            history,
            tokens,
            ready_s,
            started_s,
            landed_s,
            None if started_s is None else worker,
            deadline_s,
            is_late if is_late or landed_s is not None else None,
        )
        for append, value in zip(add, row, strict=True):
            append(value)
        number += 1
    return found


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
