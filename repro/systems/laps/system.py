"""Prefill systems: from a cell to instances and their turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from engines.ar.cost import StepCost
from engines.cost.cards import gpu
from engines.errors import require
from engines.laps.cluster import Decoding, PrefillCluster
from engines.laps.system import PrefillSystem
from engines.models.shape import model_shape
from repro.runs.cell import Cell
from repro.runs.family import Family
from repro.runs.record import RunRecord
from repro.systems.laps.family import PREFILL, tables_of, window_of
from repro.systems.laps.settings import InstanceKnobs, Settings, resolve
from repro.systems.laps.turns import PrefillWorkload, draw_workload
from repro.systems.platforms import Platform, PrefillPart
from repro.systems.simulated import PolicyDeployment, PolicySystem
from repro.workloads.card import remarked

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
    def facts(self) -> Mapping[str, Any]:
        return {"num_instances": self.settings.num_instances}

    def cluster(self, settings: Settings) -> PrefillCluster:
        decoding = None
        if settings.decode != "none":
            # Answers are decoded in a simulation alone, whose costs know how long that takes.
            cost = cast(StepCost, settings.cost)
            decoding = Decoding(where=settings.decode, cost=cost, kv_capacity=settings.kv_capacity)
        return PrefillCluster(
            system=self.build(settings, dict(self.options)),
            cost=settings.cost,
            num_instances=settings.num_instances,
            slo_s=settings.slo_s,
            boundary=settings.boundary,
            cache=settings.cache,
            decoding=decoding,
            reprefills_answer=settings.reprefills_answer,
        )

    def run(self, workload: PrefillWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        config, part = workload.config, self.settings.part
        until_s = _until_s(workload, self.settings.decode)
        # A measured run's settings have an instance in the body.
        serving = nullcontext if self.settings.is_simulated else import_module(_ON_TORCH).serving
        with serving(self.settings) as settings:
            run = self.cluster(settings).simulate(workload.arrivals, until_s=until_s)
        last = [] if config.arrivals is not None else [each.sessions[-1].session_id for each in workload.streams]
        window = window_of(run.requests, run.facts["end_s"], last)
        constants, instance = asdict(settings.constants) if settings.is_simulated else {}, settings.instance
        facts = {
            "num_instances": settings.num_instances,
            "options": dict(self.options),
            "constants": {name: value for name, value in constants.items() if value != math.inf},
            **({} if instance is None else {"instance": instance.facts, "length_scale": config.length_scale}),
            "slo_s": settings.slo_s,
            "boundary": settings.boundary,
            "decode": settings.decode,
            "is_transient": settings.is_transient,
            "window_s": list(window),
            "closed_loops": [] if config.arrivals is not None else [stream.clients for stream in config.streams],
            "think_s": config.think_s,
            "shares": workload.provenance.shares,
            **run.facts,
        }
        basis: dict[str, Any] = {"calibration": None, "device": "cpu", "dtype": "float32", "weights": "random"}
        if instance is None:
            basis = {"calibration": settings.cost_text}
        return self.record(
            tables_of(run, window),
            model=settings.model,
            **basis,
            platform=part.title,
            provenance=workload.provenance,
            slos={"ttft": {"ttft_s": settings.slo_s}},
            facts=facts,
        )


def _until_s(workload: PrefillWorkload, decode: str) -> float:
    config = workload.config
    if config.arrivals is not None:
        if config.is_replayed:
            sessions = [session for each in workload.streams for session in each.sessions]
            return GIVEN_UP_S + max(each.arrival_s + sum(turn.delay_s for turn in each.rounds) for each in sessions)
        assert config.arrivals.rate is not None
        return GIVEN_UP_S + sum(each.num_turns for each in workload.streams) / config.arrivals.rate
    waits_s = 0.0
    for stream, each in zip(config.streams, workload.streams, strict=True):
        answers = sum(session.decode_tokens for session in each.sessions) if decode != "none" else 0
        alone_s = each.num_turns * config.think_s + answers * _SLOWEST_TOKEN_S
        waits_s = max(waits_s, alone_s / (stream.clients or 1))
    return GIVEN_UP_S + waits_s


@dataclass(frozen=True, kw_only=True)
class PrefillSystemEntry(PolicySystem[Build]):
    """``build`` makes the policies of a run's settings and the system's own knobs."""

    family: ClassVar[Family] = PREFILL

    @property
    def knobs(self) -> tuple[type, ...]:
        return InstanceKnobs, self.own

    def default_dataset(self, where: Platform) -> str:
        return where.part(PrefillPart).dataset

    def prepare(self, cell: Cell, part: PrefillPart | None = None) -> tuple[PrefillDeployment, PrefillWorkload]:
        """Every refusal a user can cause is raised here. ``part`` replaces the platform's."""
        settings = resolve(cell, self.name, self.own, part, self.plugged_in(cell))
        # What is behind the numbers besides requests and code: constants and objective, or the model and the scales.
        basis: tuple[object, ...] = settings.part, settings.slo_s, settings.boundary
        if (card := settings.part.gpu) is not None:
            basis = model_shape(settings.model), gpu(card), settings.constants, settings.slo_s, settings.boundary
            if settings.charged.framework is not None:
                basis = *basis, settings.charged.basis(card)
            if settings.platform.digest:
                basis = *basis, settings.platform.digest
        deployment = PrefillDeployment(
            system=self.name,
            title=self.title,
            build=self.build,
            settings=settings,
            options=self.options_of(cell),
            basis=hashlib.sha256(repr(basis).encode()).hexdigest()[:12],
            obtained=settings.charged.obtained if settings.is_simulated else "measured",
            modules=(self.build.__module__, __name__, *(() if settings.is_simulated else (_ON_TORCH,))),
        )
        deployment.cluster(settings).system.make_batching()  # shows wrong options before any run
        workload = draw_workload(settings.workload)
        if "workload" in cell.asked and "slo_ttft_s" not in cell.asked:
            said = f"objective: TTFT {settings.slo_s:g} s, that of platform={cell.platform!r}"
            workload = replace(workload, provenance=remarked(workload.provenance, said))
        longest, most = max(each.longest_tokens for each in workload.streams), settings.kv_capacity
        where = f"a GPU beside {settings.model}" if settings.is_simulated else f"model={settings.model!r}"
        require(
            longest <= most,
            f"dataset={cell.dataset.lower()!r} has a conversation of {longest} tokens and {where} holds "
            f"{most}: shorten it, or use a smaller model",
        )
        return deployment, workload
