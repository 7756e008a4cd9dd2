"""A cell's knobs, resolved against its platform: model, GPUs, objectives, workload."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from engines.ampd.performance import PerformanceModel
from engines.ampd.profiler import profile_hardware
from engines.ar.cluster.cluster import Hardware
from engines.ar.constants import cost_constants
from engines.ar.slo import Reading, Scope, Slo, TtftRule
from engines.bounds import MOST
from engines.errors import UserError, require
from engines.hardware.catalogue import gpu
from engines.models.shape import SHAPES, model_shape
from repro.runs.cell import Cell
from repro.runs.kept import kept
from repro.systems.ar import knobs
from repro.systems.ar.part import ArPart
from repro.systems.platforms import Platform, platform
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.sessions import SessionWorkload, SessionWorkloadConfig, build_sessions, load_session_card
from repro.workloads.sessions.card import Lengths

DEFAULT_READING = Reading(scope="round", ttft="every", itl="p95")
"""Of SLO attainment, where a cell names no other: under it a simulated grid came closest to Figure 4 most often
(``repro reproduce ampd/readings`` scores all sixteen)."""
PLANNING_RATE = 0.6
"""Sessions/s that plans are made for where a cell has no rate. The paper states none; at 0.4 to 0.6 the planner finds most
plans of Table 2."""
DIFFUSION = ("llada", "dream")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run needs besides its policies."""

    platform: Platform
    model: str
    """As the shape spells it."""
    num_gpus: int
    constants: str
    deployment: str | None
    """None: the system's own default."""
    slo: Slo
    reading: Reading
    is_transient: bool
    """Whether arrivals may outrun the workers."""
    workload: SessionWorkloadConfig
    planning_rate: float

    @property
    def hardware(self) -> Hardware:
        assert self.platform.gpu is not None
        return hardware_of(self.model, self.platform.gpu, self.constants)

    @property
    def basis(self) -> str:
        """Digest of the constants and objectives behind the numbers."""
        text = repr((self.hardware.constants, self.hardware.gpu, self.hardware.shape, self.slo, self.reading))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=64)
def hardware_of(model: str, card: str, constants: str) -> Hardware:
    return Hardware(shape=model_shape(model), gpu=gpu(card), constants=cost_constants(constants))


@lru_cache(maxsize=256)
def performance_of(model: str, card: str, constants: str, num_gpus: int, context: int) -> PerformanceModel:
    """A tenth of a second; the runs of a panel share it."""
    return profile_hardware(hardware_of(model, card, constants), num_gpus=num_gpus, decode_context=context)


@kept(maxsize=512)
def sessions_of(config: SessionWorkloadConfig) -> SessionWorkload:
    """The systems of a comparison serve the same sessions."""
    return build_sessions(config)


@kept(maxsize=512)
def profiled_context(config: SessionWorkloadConfig) -> int:
    """Tokens at which decoding is profiled: halfway through a session of the mean length."""
    if config.meets_totals:
        lengths = load_session_card(config.trace).lengths
        return round((lengths.prefill_tokens + lengths.decode_tokens) / 2)
    sessions = sessions_of(config).sessions
    return max(1, round(sum(session.context_tokens for session in sessions) / len(sessions) / 2))


def resolve(cell: Cell, system: str, own: Mapping[str, knobs.Kind], *, most_gpus: int | None = None) -> Settings:
    """Platform defaults overridden by the cell's knobs; what cannot be is refused by name. ``most_gpus`` takes the place of
    the platform's own number."""
    given = {name: value for name, value in cell.knob_values.items() if value is not None}
    where = platform(cell.platform)
    part = where.part(ArPart)
    require(
        cell.executor == "roofline",
        f"executor={cell.executor!r}: system={system!r} is simulated here, leave it out or use roofline",
    )
    require(where.gpu is not None, f"platform={where.name!r} names no GPU to simulate: use h20x32")
    knobs.check_knobs(system, own, given)
    card = load_session_card(cell.dataset)
    shape = model_shape(str(given.get("model", part.model)))
    if shape.name.lower().startswith(DIFFUSION):
        usable = ", ".join(each.name for each in SHAPES if not each.name.lower().startswith(DIFFUSION))
        raise UserError(
            f"model={shape.name!r} is a diffusion model, which system={system!r} cannot serve: use {usable}"
        )
    constants = cost_constants(str(given.get("constants", part.constants)))
    num_gpus = int(given.get("num_gpus", min(card.num_gpus, part.num_gpus)))
    most = most_gpus or part.num_gpus
    require(
        1 <= num_gpus <= most,
        f"num_gpus={given.get('num_gpus')} must be between 1 and {most} on platform={where.name!r}",
    )
    planning_rate = float(given.get("planning_rate", cell.rate or PLANNING_RATE))
    require(
        0 < planning_rate <= MOST["rate"],
        f"planning_rate={planning_rate:g} must be above 0 and at most {MOST['rate']:g} sessions/s",
    )
    return Settings(
        platform=where,
        model=shape.name,
        num_gpus=num_gpus,
        constants=constants.name,
        deployment=str(given["deployment"]) if "deployment" in given else None,
        slo=_objectives(shape.name, card.name, part, given),
        reading=_reading(given),
        is_transient=bool(given.get("transient")),
        workload=_workload(cell, part, given),
        planning_rate=planning_rate,
    )


def _objectives(model: str, trace: str, part: ArPart, given: Mapping[str, Any]) -> Slo:
    found = part.objectives.get((model, trace))
    limits: dict[str, float] = {} if found is None else {"ttft_s": found.ttft_ms / 1e3, "itl_s": found.itl_ms / 1e3}
    limits |= {
        name.removeprefix("slo_"): value for name, value in knobs.pick(given, ("slo_ttft_s", "slo_itl_s")).items()
    }
    if missing := sorted({"ttft_s", "itl_s"} - limits.keys()):
        raise UserError(
            f"model={model!r} on dataset={trace!r} has no published objective: give slo_{missing[0]} (and slo_ttft_s, "
            f"slo_itl_s as knobs, in seconds)"
        )
    return Slo(**limits)


def _reading(given: Mapping[str, Any]) -> Reading:
    for name, kind in (("slo_scope", Scope), ("ttft_rule", TtftRule)):
        if given.get(name) is not None and given[name] not in get_args(kind):
            raise UserError(f"{name}={given[name]!r} is unknown: use one of {', '.join(get_args(kind))}")
    return Reading(
        scope=given.get("slo_scope", DEFAULT_READING.scope),
        ttft=given.get("ttft_rule", DEFAULT_READING.ttft),
        itl=given.get("itl_stat", DEFAULT_READING.itl),
    )


def _workload(cell: Cell, part: ArPart, given: Mapping[str, Any]) -> SessionWorkloadConfig:
    num = part.num_sessions if given.get("num_prompts") is None else given["num_prompts"]
    require(1 <= num <= 10**6, f"num_prompts={num} must be between 1 and 1,000,000 sessions")
    counted = given.get("counted")
    if counted is not None and counted not in get_args(Lengths):
        raise UserError(f"counted={counted!r} is unknown: use one of {', '.join(get_args(Lengths))}")
    path = given.get("dataset_path")
    source = given.get("dataset_source", "embedded" if path is None else "local")
    if source not in ("embedded", "local"):
        raise UserError(f"dataset_source={source!r} is unknown for sessions: use embedded or local")
    meets_totals = given.get("meets_totals")
    require(
        meets_totals is None or source == "local",
        f"meets_totals={str(meets_totals).lower()} has no effect with dataset_source={source!r}, whose sessions always meet them: leave it out",
    )
    arrivals = given.get("arrivals", "burst" if cell.rate is None else "poisson")
    extra = {} if given.get("burstiness") is None else {"burstiness": float(given["burstiness"])}
    return SessionWorkloadConfig(
        trace=cell.dataset,
        num_sessions=num,
        seed=cell.seed,
        arrivals=ArrivalConfig(kind=arrivals, rate=cell.rate, **extra),  # type: ignore[arg-type]
        source=source,  # type: ignore[arg-type]
        trace_path=path,
        meets_totals=path is None if meets_totals is None else meets_totals,
        counted=counted,
        delay_mean_s=given.get("delay_mean_s"),
    )
