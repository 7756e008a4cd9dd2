"""Prefill systems: from a cell to instances and their turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engines.errors import require
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.systems.laps.deployment import Build, PrefillDeployment
from repro.systems.laps.family import PREFILL
from repro.systems.laps.knobs import InstanceKnobs
from repro.systems.laps.part import PrefillPart, part_of
from repro.systems.laps.settings import resolve
from repro.systems.laps.workload import PrefillWorkload, draw_workload
from repro.systems.platforms import Platform
from repro.systems.simulated import PolicySystem


@dataclass(frozen=True, kw_only=True)
class PrefillSystemEntry(PolicySystem[Build]):
    """``build`` makes the policies of a run's settings and the system's own knobs."""

    family: ClassVar[Family] = PREFILL

    @property
    def knobs(self) -> tuple[type, ...]:
        return InstanceKnobs, self.own

    def default_dataset(self, where: Platform) -> str:
        return part_of(where).dataset

    def prepare(self, cell: Cell, part: PrefillPart | None = None) -> tuple[PrefillDeployment, PrefillWorkload]:
        """Every refusal a user can cause is raised here. ``part`` replaces the platform's."""
        settings = resolve(cell, self.name, self.own, part)
        deployment = PrefillDeployment(
            system=self.name, title=self.title, build=self.build, settings=settings, options=self.options_of(cell)
        )
        deployment.check_options()
        workload = draw_workload(settings.workload)
        most = settings.kv_capacity
        where = f"a GPU beside {settings.model}" if settings.is_simulated else f"model={settings.model!r}"
        require(
            workload.longest_tokens <= most,
            f"dataset={workload.config.dataset!r} has a conversation of {workload.longest_tokens} tokens and {where} holds "
            f"{most}: shorten it, or use a smaller model",
        )
        return deployment, workload
