"""What a run of prefill instances leaves behind: plain tables, from which every number is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.ar.record import Table
from engines.policies.instances import LengthClass


@dataclass(slots=True)
class RequestRow:
    """A request that arrived. TTFT is ``finished_s`` - ``arrival_s``.

    ``history`` and ``tokens`` are as prefilled: what was not cached where it ran counts as tokens.
    """

    request_id: int
    session_id: int
    """The conversation it is a turn of."""
    turn: int
    """0 is the first."""
    length_class: LengthClass
    """short or long, by the run's boundary."""
    history: int
    """Tokens whose K/V was there."""
    tokens: int
    """Tokens to prefill."""
    arrival_s: float
    started_s: float | None = None
    """Null: not reached by the end of the run, as for the next two."""
    finished_s: float | None = None
    """Its first token."""
    instance: int | None = None
    """Where it was prefilled."""
    deadline_s: float | None = None
    """Null without an objective."""
    violated: bool | None = None
    """Whether its first token came later than the objective allows; null where the run's end left it open."""


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
