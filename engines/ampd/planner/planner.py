"""From a workload to ranked deployments (AMPD §5, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.coefficients import Coefficients, Method, PhaseLatency, coefficients
from engines.ampd.planner.program import SOLVERS, Choice, Objective, Program, SolverName
from engines.ampd.planner.workload import PlanningWorkload
from engines.ar.deployment import Deployment
from engines.errors import UserError, require

Latency = Literal["of_slo", "seconds"]


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """What the paper leaves open, and our choices; none was chosen by Table 2 or Figure 4."""

    latency: Latency = "of_slo"
    """Unit of tau: P95 TTFT and P95 ITL over their objectives, or P95 seconds of a prefill and of a round's decode."""
    objective: Objective = "max"
    uses_all: bool = True
    method: Method | None = None
    """None: direct simulation for small clusters, closed forms for large ones."""
    solver: SolverName = "enumeration"
    """All are exact. Enumeration needs nothing installed, so that every machine plans alike."""

    def __post_init__(self) -> None:
        for name, kind in (("latency", Latency), ("objective", Objective)):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(get_args(kind))}")
        if self.method is not None and self.method not in get_args(Method):
            raise UserError(f"method={self.method!r} is unknown: use one of {', '.join(get_args(Method))}")
        if self.solver not in SOLVERS:
            raise UserError(f"solver={self.solver!r} is unknown: use one of {', '.join(SOLVERS)}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    deployment: Deployment
    value: float
    """Z."""
    prefill: PhaseLatency
    decode: PhaseLatency
    solver: SolverName


def plan(
    model: PerformanceModel,
    workload: PlanningWorkload,
    degrees: Sequence[int],
    num_gpus: int,
    *,
    top: int = 1,
    config: PlannerConfig | None = None,
) -> tuple[Plan, ...]:
    """The best ``top`` deployments, best first; fewer where there are no more."""
    config = config or PlannerConfig()
    table = coefficients(model, workload, degrees, num_gpus, config.method)
    return solve(table, num_gpus, top=top, config=config)


def solve(table: Coefficients, num_gpus: int, *, top: int = 1, config: PlannerConfig | None = None) -> tuple[Plan, ...]:
    """Each further plan by cutting off those found (no-good cuts)."""
    config = config or PlannerConfig()
    require(top >= 1, f"top={top} must be at least 1")
    program = Program(
        prefill={key: getattr(latency, config.latency) for key, latency in table.prefill.items()},
        decode={key: getattr(latency, config.latency) for key, latency in table.decode.items()},
        num_gpus=num_gpus,
        uses_all=config.uses_all,
        objective=config.objective,
    )
    found: list[Choice] = []
    while len(found) < top:
        choice = SOLVERS[config.solver](program, found)
        if choice is None:
            break
        found.append(choice)
    return tuple(
        Plan(
            deployment=Deployment.disaggregated(*prefill, *decode),
            value=program.value(prefill, decode),
            prefill=table.prefill[prefill],
            decode=table.decode[decode],
            solver=config.solver,
        )
        for prefill, decode in found
    )
