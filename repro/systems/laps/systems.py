"""LAPS with its ablations, Reserve and On-time, and the prefill sides they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from baselines.ar.sglang import CHUNKED_PREFILL_SIZE, PdConfig, Routing, SglangConfig, graphs_only, sglang
from baselines.ar.vllm import CHUNK_TOKENS
from baselines.ar.vllm_pd import vllm_pd
from engines.errors import require
from engines.knobs import Count, Only, Range, given_to, knobs_of
from engines.laps.controller import ControllerConfig
from engines.laps.graphs import Graphs
from engines.laps.on_time import OnTimeConfig
from engines.laps.reserve import ReserveConfig, StepSize
from engines.laps.step_model import StepModel
from engines.laps.system import LapsConfig, Pooling, PrefillSystem, Spatial, laps, on_time, reserve, srpt
from engines.laps.temporal import TemporalConfig
from engines.laps.waiting import WaitConfig
from repro.systems.laps import free
from repro.systems.laps.own import POLICIES, OwnPolicies, own_policies, with_own
from repro.systems.laps.settings import SIMULATED, Settings
from repro.systems.laps.system import PrefillSystemEntry

Config = TypeVar("Config", WaitConfig, TemporalConfig, ReserveConfig, StepSize)
_SHORT_SHARE = 0.25
"""Share of the instances for the short pool where nothing else is asked: short turns are a quarter of the tokens."""


@dataclass(frozen=True, kw_only=True)
class GraphKnobs:
    graphs: Graphs | None = None
    """Which graph a step replays. nearest: the covering bucket, whatever it costs. cheapest: only where predicted faster. ladder:
    packed sizes, likewise. none."""
    graph_budget_gb: (
        Annotated[float, Range(0, 1000), SIMULATED, Only(graphs=("nearest", "cheapest", "ladder"))] | None
    ) = None
    """GB of memory for captured graphs; all of them by default."""


@dataclass(frozen=True, kw_only=True)
class PoolKnobs:
    num_short: Count | None = None
    """Instances of the short pool, where there are several; a quarter of them by default."""
    controller: Literal["mended", "printed", "off"] = "mended"
    """Which form of Algorithm 2 moves instances between the pools; off leaves them as they are."""
    pooling: Pooling | None = None
    """global: instances pull from their pool's queue (LAPS §3.2). each: requests are pushed to the instance of the pool with the
    least outstanding tokens, which keeps a history where it is cached."""


@dataclass(frozen=True, kw_only=True)
class DisaggregationKnobs(PoolKnobs):
    temporal: TemporalConfig = field(default_factory=TemporalConfig)


@dataclass(frozen=True, kw_only=True)
class LapsKnobs(GraphKnobs, DisaggregationKnobs, OwnPolicies):
    wait: WaitConfig = field(default_factory=WaitConfig)


@dataclass(frozen=True, kw_only=True)
class ReserveKnobs(GraphKnobs):
    reserve: ReserveConfig = field(default_factory=ReserveConfig)


@dataclass(frozen=True, kw_only=True)
class OnTimeKnobs(GraphKnobs):
    on_time: OnTimeConfig = field(default_factory=OnTimeConfig)


def _build_laps(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    own, (model, graphs) = own_policies(settings, options), _captured(settings, options, "cheapest")
    theirs = own["batcher"].knobs if "batcher" in own else {}
    config = _laps_config(settings, graphs, {name: value for name, value in options.items() if name not in theirs})
    if "router" in own and config.spatial is not None:
        config = replace(config, spatial=replace(config.spatial, pooling="each"))
    return with_own(settings, model, config, own)


def _build_disaggregation(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    """No graphs, and so nothing to wait for."""
    config = _laps_config(settings, "none", {"wait": "off", **options})
    return laps(settings.step_model(()), config, name="laps-disaggregation-only")


def _build_graphs(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    """SGLang's one queue, with the graphs of LAPS."""
    model, graphs = _captured(settings, options, "cheapest")
    budget = _tokens(settings.part.length_scale, CHUNKED_PREFILL_SIZE)
    return graphs_only(model, graphs=graphs, max_num_batched_tokens=budget, name="laps-graphs-only")


@dataclass(frozen=True, kw_only=True)
class SrptKnobs(GraphKnobs):
    size: StepSize = field(default_factory=StepSize)


def _build_srpt(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    model, graphs = _captured(settings, options, "ladder" if settings.is_simulated else "none")
    usual = _in_time(settings.part.time_scale, StepSize(), "min_step_s", "max_step_s")
    size = given_to(replace(usual, max_num_seqs=settings.part.max_num_seqs), options)
    return srpt(model, size, graphs=graphs)


def _build_reserve(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    model, graphs = _captured(settings, options, "ladder" if settings.is_simulated else "none")
    usual = scaled_reserve(settings.deadline_s, time_scale=settings.part.time_scale)
    config = given_to(replace(usual, max_num_seqs=settings.part.max_num_seqs), options)
    return reserve(model, config, graphs=graphs)


def _build_on_time(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    model, graphs = _captured(settings, options, "ladder" if settings.is_simulated else "none")
    usual = OnTimeConfig(slo_s=settings.deadline_s, max_num_seqs=settings.part.max_num_seqs)
    return on_time(model, given_to(usual, options), graphs=graphs)


def _build_sglang(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    return _sglang(settings, options, "round-robin", "sglang-pd")


def _build_sglang_router(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    return _sglang(settings, options, "least-tokens", "sglang-pd-router")


def _sglang(settings: Settings, options: Mapping[str, Any], routing: Routing, name: str) -> PrefillSystem:
    budget = _tokens(settings.part.length_scale, CHUNKED_PREFILL_SIZE)
    config = given_to(SglangConfig(max_num_batched_tokens=budget, routing=routing), options)
    return sglang(config, settings.step_model(settings.shapes("ladder") if config.prefill_graphs else ()), name=name)


def _build_vllm(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    budget = _tokens(settings.part.length_scale, CHUNK_TOKENS)
    return vllm_pd(given_to(PdConfig(max_num_batched_tokens=budget), options))


def _captured(settings: Settings, options: Mapping[str, Any], default: Graphs) -> tuple[StepModel, Graphs]:
    """A model of a step's time that knows the graphs that fit the budget, and how one of them is chosen."""
    executor = "roofline" if settings.is_simulated else "torch"
    knobs = given_to(GraphKnobs(graphs=default), options, executor=executor)
    graphs = knobs.graphs or default
    return settings.step_model(settings.shapes(graphs, knobs.graph_budget_gb)), graphs


def _tokens(length_scale: float, count: int) -> int:
    """A number of tokens of the paper's, on a platform."""
    return max(1, round(length_scale * count))


def scaled_laps(boundary: int, slo_s: float | None, *, length_scale: float, time_scale: float) -> LapsConfig:
    """The paper's settings where lengths and times are so much of the paper's."""
    wait = _in_time(time_scale, WaitConfig(), "max_window_s", "slack_s", "margin_s", "max_wait_s")
    temporal = _in_time(time_scale, TemporalConfig(), "max_long_wait_s")
    return LapsConfig(
        boundary=boundary,
        slo_s=slo_s,
        wait=replace(wait, token_max=_tokens(length_scale, wait.token_max)),
        temporal=replace(
            temporal,
            chunk_tokens=_tokens(length_scale, temporal.chunk_tokens),
            short_tokens=_tokens(length_scale, temporal.short_tokens),
        ),
    )


def scaled_reserve(slo_s: float | None, *, time_scale: float) -> ReserveConfig:
    """Its times, which are stated for an objective of 0.4 s, where they are so much of that."""
    return replace(_in_time(time_scale, ReserveConfig(), "min_step_s", "max_step_s"), slo_s=slo_s)


def _in_time(scale: float, config: Config, *names: str) -> Config:
    return replace(config, **{name: scale * getattr(config, name) for name in names})


def _laps_config(settings: Settings, graphs: Graphs, options: Mapping[str, Any]) -> LapsConfig:
    part = settings.part
    usual = scaled_laps(
        settings.boundary, settings.deadline_s, length_scale=part.length_scale, time_scale=part.time_scale
    )
    own = {name: value for name, value in options.items() if name not in knobs_of(GraphKnobs)}
    config, knobs = replace(given_to(usual, own), graphs=graphs), given_to(PoolKnobs(), options)
    # Temporal on one instance, or where answers are decoded; else pools.
    if settings.num_instances == 1 or settings.decode != "none":
        for name in knobs_of(PoolKnobs):
            require(
                name not in options,
                f"{name}={options.get(name)!r} has no effect "
                + ("on one instance" if settings.num_instances == 1 else f"with decode={settings.decode!r}")
                + ": leave it out",
            )
        return config
    spatial = Spatial(
        num_short=knobs.num_short or max(1, round(_SHORT_SHARE * settings.num_instances)),
        controller=None if knobs.controller == "off" else ControllerConfig(form=knobs.controller),
        pooling=knobs.pooling or ("each" if settings.cache == "instance" else "global"),
    )
    return replace(config, spatial=spatial)


LAPS = PrefillSystemEntry(
    name="laps", title="LAPS", own=LapsKnobs, build=_build_laps, free=free.LAPS, policies=POLICIES
)
LAPS_GRAPHS = PrefillSystemEntry(
    name="laps-graphs-only", title="LAPS, graphs only", own=GraphKnobs, build=_build_graphs
)
LAPS_DISAGGREGATION = PrefillSystemEntry(
    name="laps-disaggregation-only",
    title="LAPS, disaggregation only",
    own=DisaggregationKnobs,
    build=_build_disaggregation,
    free=free.LAPS_DISAGGREGATION,
)
RESERVE = PrefillSystemEntry(name="reserve", title="Reserve", own=ReserveKnobs, build=_build_reserve, free=free.RESERVE)
ON_TIME = PrefillSystemEntry(name="on-time", title="On-time", own=OnTimeKnobs, build=_build_on_time, free=free.ON_TIME)
SRPT = PrefillSystemEntry(name="srpt", title="SRPT", own=SrptKnobs, build=_build_srpt, free=free.SRPT)
SGLANG_PD = PrefillSystemEntry(
    name="sglang-pd", title="SGLang PD", own=SglangConfig, build=_build_sglang, free=free.SGLANG
)
SGLANG_PD_ROUTER = PrefillSystemEntry(
    name="sglang-pd-router",
    title="SGLang PD + router",
    own=SglangConfig,
    build=_build_sglang_router,
    free=free.SGLANG_ROUTER,
)
VLLM_PD = PrefillSystemEntry(name="vllm-pd", title="vLLM PD", own=PdConfig, build=_build_vllm, free=free.VLLM)
