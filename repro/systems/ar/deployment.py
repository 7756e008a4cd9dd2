"""A system on a cluster, ready to serve one cell's sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.ar.cluster.simulation import StopRule
from engines.ar.deployment import Deployment
from engines.errors import require
from repro.runs.record import RunRecord
from repro.systems.ar.log import tables_of
from repro.systems.ar.plans import PLANNER, SEARCH, Build, Ground, Placed, parse_deployment, planned, searched
from repro.systems.ar.settings import Settings
from repro.systems.simulated import Options, PolicyDeployment
from repro.workloads.sessions import SessionWorkload

if TYPE_CHECKING:
    from repro.runs.drivers.steps import OnProgress

_MOST_LIVE_SESSIONS = 20_000
"""More at once mean that arrivals outrun the cluster: the run is given up, and says so."""


@dataclass(frozen=True, kw_only=True)
class ClusterDeployment(PolicyDeployment[Build, Settings]):
    """The plan itself is made when it runs: it may take simulations of its own, which the seeds of a cell share."""

    is_disaggregated: bool
    tried: tuple[Options, ...]
    """Options that a search chooses among, besides deployments."""
    how: str
    """planner, search, or a deployment in words."""
    seed: int
    modules: tuple[str, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"deployment": self.how, "num_gpus": self.settings.num_gpus}

    def check(self) -> None:
        """Refuse a deployment that cannot be, without planning one."""
        settings = self.settings
        if self.how not in (PLANNER, SEARCH):
            deployment = parse_deployment(self.how)
            self._check_kind(deployment)
            require(
                deployment.gpus <= settings.num_gpus,
                f"deployment={self.how!r} takes {deployment.gpus} GPUs and num_gpus={settings.num_gpus}: give it fewer or "
                f"them more",
            )
            self._built(deployment, dict(self.options))
            usable = settings.hardware.degrees()
            for pool in (*deployment.prefill, *deployment.decode):
                require(
                    pool.degree in usable,
                    f"deployment={self.how!r} has workers of {pool.degree} GPUs: use degrees of {', '.join(map(str, usable))}",
                )
            return
        require(
            self.how == SEARCH or self.is_disaggregated,
            f"deployment={PLANNER!r} plans prefill and decode workers and system={self.system!r} has none apart: use "
            f"{SEARCH}, or write TP8x2",
        )
        smallest = min(settings.hardware.degrees())
        need = smallest * (2 if self.is_disaggregated else 1)
        require(
            settings.num_gpus >= need,
            f"num_gpus={settings.num_gpus} do not hold {settings.model}, which takes {need} GPUs of "
            f"{settings.platform.gpu} here: give more",
        )
        # The options alone may be wrong: any deployment shows it.
        some = (
            Deployment.disaggregated(smallest, 1, smallest, 1)
            if self.is_disaggregated
            else Deployment.colocated(smallest, 1)
        )
        self._built(some, dict(self.options))

    def placed(self) -> Placed:
        ground = Ground.of(self.settings)
        if self.how == SEARCH:
            return searched(ground, self.build, self.is_disaggregated, self._tried())
        if self.how == PLANNER:
            (best,) = planned(ground, self.settings.planning_rate)
            chosen = f"AMPD's planner at {self.settings.planning_rate:g} sessions/s"
            return Placed(cluster=self._built(best.deployment, dict(self.options)), chosen=chosen, options=self.options)
        cluster = self._built(parse_deployment(self.how), dict(self.options))
        return Placed(cluster=cluster, chosen="as asked for", options=self.options)

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        settings, placed = self.settings, self.placed()
        run = placed.cluster.simulate(
            workload.arrivals, seed=self.seed, stop=StopRule(max_live_sessions=_MOST_LIVE_SESSIONS)
        )
        constants = settings.hardware.constants
        facts = {
            "deployment": str(placed.cluster.deployment),
            "deployment_chosen": placed.chosen,
            "options": dict(placed.options),
            "num_gpus": settings.num_gpus,
            "gpus_used": placed.cluster.deployment.gpus,
            "slo": {"ttft_s": settings.slo.ttft_s, "itl_s": settings.slo.itl_s},
            "attainment_reading": str(settings.reading),
            "constants": constants.name,
            "performance_model_error": Ground.of(settings).performance.max_error,
            "is_transient": settings.is_transient,
            **{
                name: run.facts[name]
                for name in ("num_events", "end_s", "stop_reason", "prefill_load", "overload_reason")
            },
        }
        return self.record(
            tables_of(run),
            calibration=f"{settings.platform.gpu}, uncalibrated: constants {constants.name} ({constants.role}), {constants.note}",
            platform=settings.platform.title,
            provenance=workload.provenance,
            facts=facts,
        )

    def _tried(self) -> tuple[Options, ...]:
        own = dict(self.options)
        merged = {tuple(sorted({**dict(each), **own}.items())) for each in self.tried}
        return tuple(sorted(merged, key=repr))

    def _built(self, deployment: Deployment, options: Mapping[str, Any]) -> Any:
        return self.build(Ground.of(self.settings), deployment, options)

    def _check_kind(self, deployment: Deployment) -> None:
        if self.is_disaggregated:
            require(
                bool(deployment.prefill),
                f"deployment={self.how!r} has no prefill workers, which system={self.system!r} needs: write P:TP4x2 D:TP8x1",
            )
        else:
            require(
                not deployment.prefill,
                f"deployment={self.how!r} has prefill workers and system={self.system!r} is co-located: write TP8x2",
            )
