"""``repro plan-cluster``: how to split GPUs into prefill and decode workers (AMPD §5)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from engines.errors import require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table, say
from repro.systems.cost import CostKnobs

if TYPE_CHECKING:
    from engines.ampd.performance import PerformanceModel
    from engines.ampd.planner import Plan
    from engines.cost.roofline import Gpu
    from engines.models.shape import ModelShape
    from engines.policies.views import Slo
    from repro.workloads.sessions import SessionCard, SessionWorkloadConfig

PLAN_SEED = 10**6
Objective = Annotated[float, Range(1e-6, 1e6)]
"""Seconds; integer programs lose their digits beyond."""


COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "rank": lambda row: str(row["rank"]),
    "deployment": lambda row: row["deployment"],
    "P95 TTFT s": lambda row: number(row["ttft_p95_s"], 3),
    "of TTFT SLO": lambda row: f"{row['ttft_p95_of_slo']:.3g}",
    "P95 ITL ms": lambda row: number(row["itl_p95_s"], scale=1e3),
    "of ITL SLO": lambda row: f"{row['itl_p95_of_slo']:.3g}",
    "P95 decode of a round s": lambda row: number(row["round_decode_p95_s"], 2),
}


@dataclass(frozen=True, kw_only=True)
class Asked(CostKnobs, Checked):
    panel: ClassVar[str] = opt.WHAT
    model: str
    """A shape: Qwen3-32B, Llama-3.1-70B, Mixtral-8x7B, Qwen2.5-7B, ..."""
    trace: str
    """toolbench, gaia, hotpotqa or dureader."""
    gpus: int
    """GPUs to split."""
    hardware: str = "h20"
    """The kind of GPU: h20, b200, h200, h100, a100, l40s or rtx4090, a card's YAML file, or module:NAME."""
    constants: str = "physical"
    """Constants of the cost model, of a composed one its overheads: physical, trial-r2, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            2 <= self.gpus <= 4096,
            f"gpus={self.gpus} must be between 2 and 4096: a prefill and a decode worker need one each",
        )


@dataclass(frozen=True, kw_only=True)
class Sample(Checked):
    """What the sessions are, and what they are held to."""

    panel: ClassVar[str] = opt.WORKLOAD
    rate: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Sessions/s to plan for [default: 0.6 for the GPUs of the trace's card]."""
    slo_ttft_s: Objective | None = None
    """TTFT objective [default: the paper's]."""
    slo_itl_s: Objective | None = None
    """ITL objective [default: the paper's]."""
    trace_path: Path | None = None
    """JSONL of your own sessions, as they are, instead of the generator."""
    num_sessions: Annotated[int, Range(1, 10**5)] | None = None
    """Sessions of the sample [default: 99, more for more GPUs]."""

    def slo(self, model: str, trace: str) -> Slo:
        from engines.policies.views import Slo
        from repro.systems.platforms import paper_objectives

        printed = paper_objectives().get((model, trace))
        ttft_s = self.slo_ttft_s or (printed and printed.ttft_ms / 1e3)
        itl_s = self.slo_itl_s or (printed and printed.itl_ms / 1e3)
        missing = "--slo-ttft-s" if ttft_s is None else "--slo-itl-s"
        if ttft_s is None or itl_s is None:
            require(False, f"{model} on {trace} has no published objective: give {missing}, in seconds")
        return Slo(ttft_s=ttft_s, itl_s=itl_s)  # type: ignore[arg-type]

    def workload(self, card: SessionCard, gpus: int, rate: float) -> SessionWorkloadConfig:
        from repro.workloads.draws import ArrivalConfig
        from repro.workloads.sessions import SessionWorkloadConfig

        usual = max(card.paper_sessions, card.paper_sessions * gpus // card.num_gpus)
        path = self.trace_path
        return SessionWorkloadConfig(
            trace=card.name,
            num_sessions=self.num_sessions or usual,
            seed=PLAN_SEED,
            arrivals=ArrivalConfig(kind="poisson", rate=rate),
            source="embedded" if path is None else "local",
            trace_path=None if path is None else str(path),
            meets_totals=path is None,
        )


@dataclass(frozen=True, kw_only=True)
class Solved(Checked):
    """How plans are found."""

    panel: ClassVar[str] = opt.ENGINE
    method: str | None = None
    """Coefficients: direct, cached or closed [default: by the number of GPUs]."""
    solver: str = "enumeration"
    """enumeration, or scip or highs where '.[planner]' is installed; all are exact."""
    top: int = 3
    """Plans to show."""

    def __post_init__(self) -> None:
        from repro.systems.cluster.planning import MOST_PLANS

        super().__post_init__()
        require(1 <= self.top <= MOST_PLANS, f"top={self.top} must be between 1 and {MOST_PLANS}")


class Planned(NamedTuple):
    plans: list[Plan]
    performance: PerformanceModel
    constants: str
    profile_s: float
    plan_s: float


def plan_cluster(*, asked: Asked, sample: Sample, solved: Solved, json: opt.Json = False) -> None:
    """The best deployments of AMPD's planner, with the P95 latencies it expects. Simulated."""
    from engines.models.shape import model_shape
    from repro.systems.cluster.ampd_settings import PLANNING_RATE
    from repro.systems.cluster.system import DIFFUSION
    from repro.systems.platforms import card as card_named
    from repro.workloads.sessions import load_session_card

    card, shape, gpu = load_session_card(asked.trace), model_shape(asked.model), card_named(asked.hardware)
    require(
        not shape.name.lower().startswith(DIFFUSION),
        f"model={shape.name!r} is a diffusion model and has no prefill and decode workers: use an autoregressive one",
    )
    rate, slo = sample.rate or PLANNING_RATE * asked.gpus / card.num_gpus, sample.slo(shape.name, card.name)
    asked = asked.on(gpu)
    found = _planned(asked, sample, solved, shape, gpu, rate, slo)
    rows = _rows(found.plans, slo)
    if json:
        how = {
            "constants": found.constants,
            "solver": found.plans[0].solver,
            "performance_model_error": found.performance.max_error,
            "profile_seconds": found.profile_s,
            "plan_seconds": found.plan_s,
            "obtained": asked.obtained,
        }
        about = {"model": shape.name, "trace": card.name, "gpus": asked.gpus, "hardware": gpu.name, "rate": rate}
        print_json({**about, "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}, **how, "plans": rows})
        return
    print_table(
        f"{shape.name}, {card.title}, {asked.gpus} x {gpu}, {rate:g} sessions/s ({asked.obtained})",
        tuple(COLUMNS),
        [tuple(said(row) for said in COLUMNS.values()) for row in rows],
    )
    best = found.plans[0]
    if best.value > 1:
        say(
            f"no split meets both objectives at P95: the best is {best.value:.3g} times over; lower the rate or add GPUs"
        )
    say(
        f"planned in {found.plan_s:.2f} s ({best.solver}), after {found.profile_s:.2f} s of profiling (worst fit error "
        f"{100 * found.performance.max_error:.1f} %)"
    )


def _planned(
    asked: Asked, sample: Sample, solved: Solved, shape: ModelShape, card: Gpu, rate: float, slo: Slo
) -> Planned:
    from engines.ampd.planner import PlannerConfig, PlanningWorkload, coefficients, solve
    from repro.cli.data_file import readable
    from repro.systems.cluster.ampd_settings import hardware_of, performance_of, profiled_context, sessions_of
    from repro.workloads.sessions import load_session_card

    config = PlannerConfig(method=solved.method, solver=solved.solver)  # type: ignore[arg-type]
    workload, gpus = sample.workload(load_session_card(asked.trace), asked.gpus, rate), asked.gpus
    with readable("trace-path", sample.trace_path, [asked.trace]):
        drawn = sessions_of(workload)
    if sample.trace_path is not None:
        say(drawn.provenance.description, file=sys.stderr)
    ground = hardware_of(shape.name, card, asked.constants, asked.framework)
    degrees = ground.degrees(min_kv_tokens=max(session.context_tokens for session in drawn.sessions))
    require(
        gpus >= 2 * min(degrees),
        f"gpus={gpus} do not hold a prefill and a decode worker of {shape.name}, which takes {min(degrees)} x {card} or "
        f"more each: give at least {2 * min(degrees)}",
    )
    start = time.perf_counter()
    performance = performance_of(ground, gpus, profiled_context(workload))
    profiled = time.perf_counter()
    planning = PlanningWorkload(sessions=drawn.sessions, rate=rate, slo=slo)
    table = coefficients(performance, planning, degrees, gpus, config.method)
    found = solve(table, gpus, top=solved.top, config=config)
    end = time.perf_counter()
    require(bool(found), f"gpus={gpus}: no split into prefill and decode workers uses them all, give an even number")
    return Planned([*found], performance, ground.constants.name, profiled - start, end - profiled)


def _rows(plans: list[Plan], slo: Slo) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "deployment": str(plan.deployment),
            "worst_of_slo": plan.value,
            "ttft_p95_s": plan.prefill.seconds,
            "ttft_p95_of_slo": plan.prefill.of_slo,
            "round_decode_p95_s": plan.decode.seconds,
            "itl_p95_of_slo": plan.decode.of_slo,
            "itl_p95_s": plan.decode.of_slo * slo.itl_s,
        }
        for rank, plan in enumerate(plans, start=1)
    ]
