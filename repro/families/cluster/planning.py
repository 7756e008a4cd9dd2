"""AMPD's planner as a system of its own: the deployments it ranks and, on request, the seconds it takes (AMPD §5, App. A.2).

It plans for the cell's rate. The cell's seed chooses the sample of sessions. Plans that serve a workload use the sample of seed 0.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from engines.ampd.planner import Method, PlannerConfig, PlanningWorkload, coefficients, default_method, solve
from engines.ampd.policies import AdaptiveRouter, best_ordering
from engines.errors import require
from engines.knobs import Checked, Range
from engines.policies.views import PrefillTask, WorkerSnapshot
from repro.families.cluster.ampd_settings import ClusterSettings, Ground, resolve
from repro.runs.cell import Cell
from repro.runs.family import Family, metrics_in
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Obtained, OnProgress, RunRecord, empty_table
from repro.workloads.sessions import SessionWorkload

_MOST_GPUS = 4096
"""The most GPUs that we plan for. It exceeds the platform's own number, because plans of large clusters are of interest."""
MOST_PLANS = 100
"""A limit, because each further plan is one more program to solve."""
NUM_DECISIONS = 2000
"""How many decisions we time, for the router and for the queue each."""


@dataclass(frozen=True, kw_only=True)
class PlannerKnobs(Checked):
    top: Annotated[int, Range(1, MOST_PLANS)] = 3
    """How many plans to rank."""
    method: Method | None = None
    """How the program is solved. By default the number of GPUs decides."""
    timed: bool = False
    """Measure how long the planner and its policies take."""


PLANNING = Family(
    name="planning", serves=False, metrics=metrics_in(Path(__file__).with_name("metrics.csv"), "planning", {})
)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A run of the planner. It profiles the hardware before the clock starts, because profiling is not planning."""

    settings: ClusterSettings
    rate: float
    basis: str
    top: int
    method: Method | None
    is_timed: bool
    modules: ClassVar[tuple[str, ...]] = (__name__, "repro.families.platforms")

    @property
    def obtained(self) -> Obtained:
        return "measured" if self.is_timed else self.settings.charged.obtained

    @property
    def ground(self) -> Ground:
        return self.settings.ground

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"num_gpus": self.ground.num_gpus}

    def check_machine(self) -> None:
        """Accepts any machine."""

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        ground = self.ground
        hardware, model = ground.hardware, ground.performance
        degrees = hardware.degrees(min_kv_tokens=workload.longest_tokens)
        demand = PlanningWorkload(sessions=workload.sessions, rate=self.rate, slo=ground.slo)
        start = time.process_time()
        table = coefficients(model, demand, degrees, ground.num_gpus, self.method)
        middle = time.process_time()
        candidates = solve(table, ground.num_gpus, top=self.top)
        end = time.process_time()
        plans = [
            {
                "deployment": str(plan.deployment),
                "worst_of_slo": plan.value,
                "ttft_p95_s": plan.prefill.seconds,
                "itl_p95_s": plan.decode.of_slo * ground.slo.itl_s,
                "round_decode_p95_s": plan.decode.seconds,
            }
            for plan in candidates
        ]
        seconds = (
            {"coefficients_s": middle - start, "solve_s": end - middle, **self._decisions()} if self.is_timed else {}
        )
        return RunRecord(
            tables={REQUESTS: empty_table(REQUEST_COLUMNS)},
            manifest={
                "obtained": self.obtained,
                "calibration": self.settings.cost_text,
                "dataset": asdict(workload.provenance),
                "model": hardware.shape.name,
                "facts": {
                    **dict.fromkeys(("coefficients_s", "solve_s", "routing_s", "ordering_s")),
                    **seconds,
                    "plans": plans,
                    "num_gpus": ground.num_gpus,
                    "method": self.method or default_method(ground.num_gpus),
                    "solver": "enumeration" if candidates else None,
                    "performance_model_error": model.max_error,
                },
            },
        )

    def _decisions(self) -> dict[str, float]:
        """Seconds of one decision in its slowest case: no worker has slack, and the first prefill of three is late."""
        router = AdaptiveRouter(self.ground.performance, self.ground.slo)
        late_s, over_s = 2 * self.ground.slo.ttft_s, 2 * self.ground.slo.itl_s
        degree = max(self.ground.hardware.degrees())
        busy = [
            WorkerSnapshot(worker_id=index, degree=degree, ttft_s=late_s, backlog_s=float(index))
            for index in range(1, 9)
        ]
        home = WorkerSnapshot(worker_id=0, degree=degree, itl_s=over_s)
        tasks = [
            PrefillTask(index, index, index, 1, "incremental", 1000, 500, 0.0, estimate_s=0.2 * (index + 1))
            for index in range(3)
        ]
        return {
            "routing_s": _seconds_per_call(lambda: router.route(tasks[0], home, busy, 1.0)),
            "ordering_s": _seconds_per_call(lambda: best_ordering(tasks, 0.7, 1.0, 3)),
        }


def _seconds_per_call(call: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(NUM_DECISIONS):
        call()
    return (time.process_time() - start) / NUM_DECISIONS


@dataclass(frozen=True, kw_only=True)
class Planner:
    name: str = "ampd-planner"
    title: str = "AMPD's planner"
    family: ClassVar[Family] = PLANNING

    def prepare(self, cell: Cell) -> tuple[Planning, SessionWorkload]:
        settings = resolve(cell, self.name, PlannerKnobs, most_gpus=_MOST_GPUS)
        require(cell.rate is not None, "request_rate=inf: the planner needs a number of sessions/s")
        assert cell.rate is not None
        given = cell.requested
        knobs: PlannerKnobs = settings.own
        for name in ("deployment", "transient", "planning_rate"):
            require(
                name not in given, f"{name}={given.get(name)!r} has no effect with system={self.name!r}: leave it out"
            )
        ground = settings.ground
        smallest = min(ground.hardware.degrees())
        require(
            ground.num_gpus >= 2 * smallest,
            f"num_gpus={ground.num_gpus} do not hold a prefill and a decode worker of {settings.model}: give at least {2 * smallest}",
        )
        planning = Planning(
            settings=settings,
            rate=cell.rate,
            basis=hashlib.sha256(repr((settings.basis, PlannerConfig())).encode()).hexdigest()[:12],
            top=knobs.top,
            method=knobs.method,
            is_timed=knobs.timed,
        )
        return planning, ground.sampled(cell.seed, rate=cell.rate)


AMPD_PLANNER = Planner()
PLANNER_SYSTEM = "repro.systems.ar.planning:AMPD_PLANNER"
"""The name of this system in cells, including stored ones. It was the module's first path (``repro.runs.system``)."""
