"""The knobs that every autoregressive cell has; None takes the platform's value, or the data set's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from engines.ar.metrics import ItlStat, Scope, TtftRule
from engines.knobs import Range, Seconds, check_fields
from repro.workloads.knobs import ArrivalKnobs, Rate
from repro.workloads.sessions.card import Lengths
from repro.workloads.sessions.workload import Source

Objective = Annotated[float, Range(1e-6, 1e6)]
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class SessionKnobs(ArrivalKnobs):
    """What the sessions are, and what they are held to."""

    num_prompts: Annotated[int, Range(1, 10**5)] | None = None
    """Sessions."""
    dataset_source: Source | None = None
    """embedded or local; local where there is a file."""
    dataset_path: str | None = None
    """A file of recorded sessions."""
    delay_mean_s: Seconds | None = None
    """Mean seconds between an answer and the next round."""
    slo_ttft_s: Objective | None = None
    """Objective of the time to the first token, in seconds."""
    slo_itl_s: Objective | None = None
    """Objective of the time between tokens, in seconds."""
    transient: bool = False
    """Accept arrivals that outrun the workers: the numbers are of this number of sessions alone."""


@dataclass(frozen=True, kw_only=True)
class ClusterKnobs(SessionKnobs):
    model: str | None = None
    """A shape by its name."""
    num_gpus: int | None = None
    """GPUs of the deployment."""
    constants: str | None = None
    """A reading of the cost model."""
    deployment: str | None = None
    """Workers as P:TP4x2 D:TP8x1 or TP8x2; planner for AMPD's; search for the best of several, found by simulating other samples of
    the workload."""
    counted: Lengths | None = None
    """What the lengths of a card count."""
    meets_totals: bool | None = None
    """Scale sessions to the means of the trace's card: its own are by default, those of a file are not."""
    planning_rate: Rate | None = None
    """Sessions/s that the planner expects; the cell's own rate by default."""
    slo_scope: Scope | None = None
    """Whether rounds or sessions meet the objectives."""
    ttft_rule: TtftRule | None = None
    """Whether every TTFT has to, or their mean."""
    itl_stat: ItlStat | None = None
    """Which statistic of the times between tokens has to."""

    def __post_init__(self) -> None:
        check_fields(self)
