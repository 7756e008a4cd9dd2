"""Autoregressive systems: from a cell to a deployment and its sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engines.errors import require
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.systems.ar.deployment import ClusterDeployment
from repro.systems.ar.family import AR
from repro.systems.ar.knobs import ClusterKnobs
from repro.systems.ar.part import ArPart
from repro.systems.ar.plans import Build
from repro.systems.ar.settings import Settings, resolve, sessions_of
from repro.systems.platforms import Platform
from repro.systems.simulated import Options, PolicySystem
from repro.workloads.sessions import SessionWorkload


@dataclass(frozen=True, kw_only=True)
class ArSystem(PolicySystem[Build]):
    """``build`` makes the cluster of a deployment and the system's own knobs."""

    family: ClassVar[Family] = AR
    is_disaggregated: bool
    deployment: str
    """Where a cell asks for none: ``planner`` or ``search``."""
    tried: tuple[Options, ...] = ((),)
    """Options that a search chooses among, besides deployments."""

    @property
    def knobs(self) -> tuple[type, ...]:
        return ClusterKnobs, self.own

    def default_dataset(self, where: Platform) -> str:
        return where.part(ArPart).trace

    def prepare(self, cell: Cell) -> tuple[ClusterDeployment, SessionWorkload]:
        """Every refusal a user can cause is raised here."""
        settings = resolve(cell, self.name, self.own)
        workload = sessions_of(settings.workload)
        _check_lengths(settings, workload)
        deployment = self.on(settings, cell)
        deployment.check()
        return deployment, workload

    def on(self, settings: Settings, cell: Cell) -> ClusterDeployment:
        router = cell.knob_values.get("router")
        plugged = (str(router).partition(":")[0],) if router is not None else ()
        return ClusterDeployment(
            system=self.name,
            title=self.title,
            build=self.build,
            is_disaggregated=self.is_disaggregated,
            tried=self.tried,
            settings=settings,
            options=self.options_of(cell),
            how=self.deployment if settings.deployment is None else settings.deployment,
            seed=cell.seed,
            modules=(self.build.__module__, "repro.systems.ar.system", "repro.systems.ar.platforms", *plugged),
        )


def _check_lengths(settings: Settings, workload: SessionWorkload) -> None:
    """A session that no worker could hold is refused here, not in the middle of its run."""
    longest = workload.longest_tokens
    hardware = settings.hardware
    most = max(hardware.kv_capacity(degree) for degree in hardware.degrees())
    require(
        longest <= most,
        f"dataset={workload.name!r} has a session of {longest} tokens and a worker of {settings.model} holds {most}: "
        "shorten it, or use a larger GPU",
    )
