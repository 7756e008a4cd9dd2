"""Autoregressive systems: from a cell to a deployment and its sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from engines.ar.cluster.cluster import Cluster
from engines.ar.cluster.simulation import StopRule
from engines.ar.deployment import Deployment
from engines.ar.session import OpenLoop
from engines.errors import require
from engines.policies.task import NO_OBJECTIVE_S
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.runs.record import RunRecord
from repro.runs.tuning import Tuned
from repro.systems.ar.family import AR, tables_of
from repro.systems.ar.plans import PLANNER, SEARCH, parse_deployment, planned
from repro.systems.ar.settings import ClusterKnobs, Ground, Settings, resolve, sessions_of
from repro.systems.platforms import ArPart, Platform
from repro.systems.simulated import PolicyDeployment, PolicySystem
from repro.workloads.card import remarked
from repro.workloads.sessions import SessionWorkload

if TYPE_CHECKING:
    from repro.runs.drivers.steps import OnProgress

Build = Callable[[Ground, Deployment, Mapping[str, Any]], Cluster]
_MOST_LIVE_SESSIONS = 20_000
"""More at once mean that arrivals outrun the cluster: the run is given up, and says so."""


@dataclass(frozen=True, kw_only=True)
class ClusterDeployment(PolicyDeployment[Build, Settings]):
    """The plan itself is made when it runs: it may take simulations of its own, which the seeds of a cell share."""

    is_disaggregated: bool
    how: str
    """planner, search, or a deployment in words."""
    seed: int

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"deployment": self.how, "num_gpus": self.settings.ground.num_gpus}

    def check(self) -> None:
        """Refuse a deployment that cannot be, without planning one."""
        settings, ground, options = self.settings, self.settings.ground, dict(self.options)
        if self.how not in (PLANNER, SEARCH):
            deployment = parse_deployment(self.how)
            require(
                bool(deployment.prefill) or not self.is_disaggregated,
                f"deployment={self.how!r} has no prefill workers, which system={self.system!r} needs: write P:TP4x2 D:TP8x1",
            )
            require(
                not deployment.prefill or self.is_disaggregated,
                f"deployment={self.how!r} has prefill workers and system={self.system!r} is co-located: write TP8x2",
            )
            require(
                deployment.gpus <= ground.num_gpus,
                f"deployment={self.how!r} takes {deployment.gpus} GPUs and num_gpus={ground.num_gpus}: give it fewer or "
                f"them more",
            )
            self.build(ground, deployment, options)
            usable = ground.hardware.degrees()
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
        smallest = min(ground.hardware.degrees())
        need = smallest * (2 if self.is_disaggregated else 1)
        require(
            ground.num_gpus >= need,
            f"num_gpus={ground.num_gpus} do not hold {settings.model}, which takes {need} GPUs of "
            f"{settings.platform.gpu} here: give more",
        )
        # The options alone may be wrong: any deployment shows it.
        some = (
            Deployment.disaggregated(smallest, 1, smallest, 1)
            if self.is_disaggregated
            else Deployment.colocated(smallest, 1)
        )
        self.build(ground, some, options)

    def cluster(self) -> Cluster:
        ground = self.settings.ground
        if self.how == PLANNER:
            (best,) = planned(ground, self.settings.planning_rate)
        deployment = best.deployment if self.how == PLANNER else parse_deployment(self.how)
        return self.build(ground, deployment, dict(self.options))

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        settings, ground, cluster = self.settings, self.settings.ground, self.cluster()
        run = cluster.simulate(
            OpenLoop(sessions=workload.sessions), seed=self.seed, stop=StopRule(max_live_sessions=_MOST_LIVE_SESSIONS)
        )
        facts = {
            "deployment": str(cluster.deployment),
            "planned_for": settings.planning_rate if self.how == PLANNER else None,
            "options": dict(self.options),
            "num_gpus": ground.num_gpus,
            "gpus_used": cluster.deployment.gpus,
            "slo": {
                name: None if limit_s == NO_OBJECTIVE_S else limit_s
                for name, limit_s in (("ttft_s", ground.slo.ttft_s), ("itl_s", ground.slo.itl_s))
            },
            "attainment_reading": str(ground.reading),
            "constants": ground.hardware.constants.name,
            "performance_model_error": ground.performance.max_error,
            "is_transient": settings.is_transient,
            **run.facts,
        }
        return self.record(
            tables_of(run),
            model=settings.model,
            calibration=settings.cost_text,
            platform=settings.platform.title,
            provenance=workload.provenance,
            facts=facts,
        )


@dataclass(frozen=True, kw_only=True)
class ArSystem(PolicySystem[Build]):
    """``build`` makes the cluster of a deployment and the system's own knobs."""

    family: ClassVar[Family] = AR
    is_disaggregated: bool
    deployment: str
    """Where a cell asks for none: ``planner`` or ``search``."""

    @property
    def knobs(self) -> tuple[type, ...]:
        return ClusterKnobs, self.own

    def default_dataset(self, where: Platform) -> str:
        return where.part(ArPart).trace

    def prepare(self, cell: Cell) -> tuple[ClusterDeployment | Tuned, SessionWorkload]:
        """Every refusal a user can cause is raised here."""
        settings = resolve(cell, self.name, self.own, plugged=self.plugged_in(cell))
        workload = sessions_of(settings.workload)
        if settings.workload.file is not None:
            absent = [name for name in ("slo_ttft_s", "slo_itl_s") if name not in cell.asked]
            if absent:
                workload = replace(
                    workload, provenance=remarked(workload.provenance, f"no objective: {', '.join(absent)}")
                )
        hardware = settings.ground.hardware
        most = max(hardware.kv_capacity(degree) for degree in hardware.degrees())
        require(
            workload.longest_tokens <= most,
            f"dataset={workload.name!r} has a session of {workload.longest_tokens} tokens and a worker of {settings.model} "
            f"holds {most}: shorten it, or use a larger GPU",
        )
        deployment = ClusterDeployment(
            system=self.name,
            title=self.title,
            build=self.build,
            is_disaggregated=self.is_disaggregated,
            settings=settings,
            options=self.options_of(cell),
            basis=settings.basis,
            obtained=settings.charged.obtained,
            how=self.deployment if settings.deployment is None else settings.deployment,
            seed=cell.seed,
            modules=(self.build.__module__, "repro.systems.ar.system", "repro.systems.platforms"),
        )
        deployment.check()
        if deployment.how != SEARCH:
            return deployment, workload
        searched = replace(cell.without("deployment"), figure=None, rate=settings.expected_rate or cell.rate)
        return Tuned(cell=searched, default=deployment), workload
