"""What the planner knows of the workload: a sample of sessions, how often they come, and the objectives (App. A.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engines.ampd.performance import PerformanceModel
from engines.ar.session import Round, Session
from engines.errors import require
from engines.policies.task import Slo

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PlanningWorkload:
    """``sessions`` arrive at ``rate`` a second; their own arrival times give the pattern, not the rate."""

    sessions: tuple[Session, ...]
    rate: float
    slo: Slo

    def __post_init__(self) -> None:
        require(bool(self.sessions), "sessions=(): the planner needs a sample of the workload")
        require(0 < self.rate < float("inf"), f"rate={self.rate}: planning needs a finite rate above 0 sessions/s")

    @cached_property
    def rounds(self) -> list[Round]:
        return [entry for session in self.sessions for entry in session.rounds]

    @property
    def span_s(self) -> float:
        """How long the sample takes to arrive."""
        return len(self.sessions) / self.rate

    @property
    def rounds_per_s(self) -> float:
        return self.rate * len(self.rounds) / len(self.sessions)

    def prefill_s(self, model: PerformanceModel, degree: int) -> Floats:
        """T_pre of every round, seconds."""
        found = []
        for session in self.sessions:
            history = 0
            for prefill, decode, _ in session.rounds:
                found.append(model.prefill_s(history, prefill, degree))
                history += prefill + decode
        return np.array(found)

    def at_rate(self) -> tuple[Session, ...]:
        """The sessions with their arrivals stretched to the planning rate."""
        last = self.sessions[-1].arrival_s
        stretch = self.span_s / last if last > 0 else 0.0
        return tuple(
            Session(session.session_id, session.arrival_s * stretch, session.rounds) for session in self.sessions
        )
