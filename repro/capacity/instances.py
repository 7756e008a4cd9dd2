"""LAPS's family: turns of conversations on prefill instances, a GPU each. Answers are decoded elsewhere, so a turn has a TTFT and nothing
else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engines.cluster.sessions import Session
from engines.models.shape import ModelShape, model_shape
from repro.capacity.objectives import Sample, Times
from repro.capacity.site import Plan, Ranked, Site, alone_s
from repro.runs.family import column
from repro.runs.record import Obtained
from repro.runs.system import SYSTEMS
from repro.systems.cluster.laps import PrefillDeployment, PrefillSystemEntry
from repro.systems.cluster.laps_record import PREFILL, busy_share, counted
from repro.systems.cluster.laps_settings import PrefillWorkload
from repro.workloads.card import Provenance


@dataclass(frozen=True, kw_only=True)
class InstanceSite(Site):
    unit = "turns/s"
    least_gpus = 1
    least_prompts = 20
    rounds_per_prompt = 1.0

    @cached_property
    def system(self) -> PrefillSystemEntry:
        system = SYSTEMS.get(self.cell.system)
        assert isinstance(system, PrefillSystemEntry)
        return system

    @property
    def most_gpus(self) -> int:
        return self._prepared[0].settings.part.most_instances

    @property
    def provenance(self) -> Provenance:
        return self._prepared[1].provenance

    def fits(self, gpus: int) -> bool:
        return gpus <= self.most_gpus

    def check(self, gpus: int) -> None:
        (plan,) = self.plans(gpus)
        self.system.prepare(self.of_run(plan, 1.0, 0))

    def hardware(self) -> tuple[ModelShape, str]:
        settings = self._prepared[0].settings
        assert settings.part.gpu is not None, "a measured platform is refused"
        return model_shape(settings.model), str(settings.part.gpu)

    @property
    def sessions(self) -> tuple[Session, ...]:
        (stream,) = self._prepared[1].streams
        return stream.sessions

    @cached_property
    def _prepared(self) -> tuple[PrefillDeployment, PrefillWorkload]:
        return self.system.prepare(self.cell)

    @property
    def obtained(self) -> Obtained:
        return self._prepared[0].obtained

    @property
    def alone_s(self) -> float:
        num = sum(len(each.rounds) for each in self.sessions)
        return alone_s(self._prepared[0].settings.cost, self.sessions) / num

    def plans(self, gpus: int) -> tuple[Plan, ...]:
        return (Plan(f"TP1x{gpus}", gpus, (("num_instances", gpus),), math.inf, None, (1, gpus)),)

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        plans = self.plans(gpus)
        return Ranked(plans, len(plans), gpus / self.alone_s)

    def run(self, plan: Plan, rate: float, seed: int) -> Sample:
        deployment, workload = self.system.prepare(self.of_run(plan, rate, seed))
        record = deployment.run(workload)
        arrival_s = column(record, "arrival_s")
        late_s = column(record, "finished_s") - arrival_s
        ttft = Times.of(late_s[counted(record)])
        good = np.ones(len(ttft.values), dtype=np.bool_)
        for each in self.objectives:
            good &= ttft.values <= each.limit_s
        is_sound = not any(reason for check in PREFILL.checks for reason in check(record))
        return Sample(
            times={"ttft": ttft},
            num_rounds=len(good),
            num_good=int(good.sum()),
            longest_s=float(np.max(ttft.values, initial=0.0)),
            load=(busy_share.compute(record) or 0.0) if is_sound else math.inf,
            span_s=float(arrival_s.max() - arrival_s.min()),
            stay_s=float(np.nanmean(late_s)),
        )
