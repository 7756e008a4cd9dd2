"""A prefill system on its instances, ready to serve one cell's turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engines.laps.cluster import PrefillCluster
from engines.laps.record import PrefillRun
from engines.laps.system import PrefillSystem
from engines.policies.step import StepTimes
from repro.runs.record import Obtained, RunRecord
from repro.systems.laps.decoding import simulate_with_decode
from repro.systems.laps.log import Window, closing_s, tables_of, window_of
from repro.systems.laps.settings import UNMEASURED, Settings
from repro.systems.laps.workload import PrefillWorkload
from repro.systems.simulated import PolicyDeployment

if TYPE_CHECKING:
    from repro.runs.drivers.steps import OnProgress

GIVEN_UP_S = 600.0
"""Simulated time, besides what users think and answers take, after which a run is given up: a policy that dispatches nothing never
ends."""
_SLOWEST_TOKEN_S = 0.05
"""The longest that a token of an answer takes, where it is decoded."""
_ON_TORCH = "repro.systems.laps.on_torch"
"""The module of measured runs: a simulation loads no torch, nor depends on its code."""
Build = Callable[[Settings, Mapping[str, Any]], PrefillSystem]


@dataclass(frozen=True, kw_only=True)
class PrefillDeployment(PolicyDeployment[Build, Settings]):
    @property
    def obtained(self) -> Obtained:
        return "simulated" if self.settings.is_simulated else "measured"

    @property
    def modules(self) -> tuple[str, ...]:
        return (
            self.build.__module__,
            "repro.systems.laps.system",
            *(() if self.settings.is_simulated else (_ON_TORCH,)),
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"num_instances": self.settings.num_instances}

    def check_options(self) -> None:
        """Shows wrong ones before any run."""
        settings = self.settings
        cost: StepTimes = settings.cost if settings.is_simulated else UNMEASURED
        self._cluster(settings, cost).system.make_batching()

    def _cluster(self, settings: Settings, cost: StepTimes) -> PrefillCluster:
        return PrefillCluster(
            system=self.build(settings, dict(self.options)),
            cost=cost,
            num_instances=settings.num_instances,
            slo_s=settings.slo_s,
            boundary=settings.boundary,
            cache=settings.cache,
            reprefills_answer=settings.reprefills_answer,
        )

    def serving(self) -> AbstractContextManager[Settings]:
        """In its body there is an instance to measure on, where it is not simulated."""
        if self.settings.is_simulated:
            return nullcontext(self.settings)
        serving: AbstractContextManager[Settings] = import_module(_ON_TORCH).serving(self.settings)
        return serving

    def run(self, workload: PrefillWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        with self.serving() as settings:
            return self._run(settings, workload)

    def _run(self, settings: Settings, workload: PrefillWorkload) -> RunRecord:
        cluster, until_s = self._cluster(settings, settings.cost), _until_s(workload, settings.decode)
        if settings.decode == "none":
            run = cluster.simulate(workload.arrivals, until_s=until_s)
        else:
            run = simulate_with_decode(
                cluster, settings.roofline, workload, settings.decode, settings.kv_capacity, until_s=until_s
            )
        window = window_of(run.requests["arrival_s"], closing_s(run, workload.last_sessions))
        return self.record(
            tables_of(run, window),
            **self._basis_of(settings),
            platform=settings.part.title,
            provenance=workload.provenance,
            slos={"ttft": {"ttft_s": settings.slo_s}},
            facts=self._facts(settings, workload, run, window),
        )

    @staticmethod
    def _basis_of(settings: Settings) -> dict[str, Any]:
        if settings.instance is not None:
            return {"calibration": None, "device": "cpu", "dtype": "float32", "weights": "random"}
        gpu, kappa = settings.part.gpu, settings.constants.kappa
        return {"calibration": f"{gpu}, uncalibrated: constants assumed, mixing penalty {kappa:g}"}

    def _facts(self, settings: Settings, workload: PrefillWorkload, run: PrefillRun, window: Window) -> dict[str, Any]:
        config, instance = workload.config, settings.instance
        constants = asdict(settings.constants) if settings.is_simulated else {}
        return {
            "num_instances": settings.num_instances,
            "options": dict(self.options),
            "constants": {name: value for name, value in constants.items() if not _is_infinite(value)},
            **({} if instance is None else {"instance": instance.facts, "length_scale": config.length_scale}),
            "slo_s": settings.slo_s,
            "boundary": settings.boundary,
            "decode": settings.decode,
            "is_transient": settings.is_transient,
            "window_s": list(window),
            "closed_loops": [] if config.arrivals is not None else [stream.clients for stream in config.streams],
            "think_s": config.think_s,
            "shares": workload.provenance.shares,
            "end_s": run.facts["end_s"],
            "num_events": run.facts["num_events"],
        }


def _until_s(workload: PrefillWorkload, decode: str) -> float:
    config = workload.config
    if config.arrivals is not None:
        assert config.arrivals.rate is not None
        return GIVEN_UP_S + sum(each.num_turns for each in workload.streams) / config.arrivals.rate
    waits_s = 0.0
    for stream, each in zip(config.streams, workload.streams, strict=True):
        answers = sum(session.decode_tokens for session in each.sessions) if decode != "none" else 0
        alone_s = each.num_turns * config.think_s + answers * _SLOWEST_TOKEN_S
        waits_s = max(waits_s, alone_s / (stream.clients or 1))
    return GIVEN_UP_S + waits_s


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)
