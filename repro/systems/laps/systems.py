"""LAPS with its ablations, Reserve, and the prefill sides they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from baselines.ar.sglang import CHUNKED_PREFILL_SIZE, SglangConfig, graphs_only, sglang
from baselines.ar.vllm import CHUNK_TOKENS
from baselines.ar.vllm_pd import VllmPdConfig, vllm_pd
from engines.errors import UserError, require
from engines.laps.controller import ControllerConfig
from engines.laps.reserve import ReserveConfig
from engines.laps.step_model import StepModel
from engines.laps.system import Graphs, LapsConfig, PrefillSystem, Spatial, laps, reserve
from engines.laps.temporal import TemporalConfig
from engines.laps.waiting import WaitConfig
from repro.systems.laps import knobs
from repro.systems.laps.settings import Settings
from repro.systems.laps.system import PrefillSystemEntry

Config = TypeVar("Config", WaitConfig, TemporalConfig, ReserveConfig)
SHORT_SHARE = 0.25
"""Of the instances, for the short pool where nothing else is asked: short turns are a quarter of the tokens."""


def build_laps(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    given = dict(options)
    graphs = _graphs(given, "cheapest")
    return laps(_model(settings, graphs, given), _laps_config(settings, graphs, given), name="laps")


def build_disaggregation(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    """No graphs, and so nothing to wait for."""
    given = {"wait": "off", **options}
    return laps(settings.step_model(()), _laps_config(settings, "none", given), name="laps-disaggregation-only")


def build_graphs(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    """SGLang's one queue, with the graphs of LAPS."""
    given = dict(options)
    graphs = _graphs(given, "cheapest")
    budget = _tokens(settings.part.length_scale, CHUNKED_PREFILL_SIZE)
    return graphs_only(
        _model(settings, graphs, given), graphs=graphs, chunked_prefill_size=budget, name="laps-graphs-only"
    )


def build_reserve(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    given = dict(options)
    graphs = _graphs(given, "ladder" if settings.is_simulated else "none")
    model = _model(settings, graphs, given)
    config = scaled_reserve(settings.deadline_s, time_scale=settings.part.time_scale)
    return reserve(model, replace(config, max_num_seqs=settings.part.max_num_seqs, **given), graphs=graphs)


def build_sglang(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    return _sglang(settings, {"routing": "round-robin", **options}, "sglang-pd")


def build_sglang_router(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    return _sglang(settings, {"routing": "least-tokens", **options}, "sglang-pd-router")


def _sglang(settings: Settings, options: Mapping[str, Any], name: str) -> PrefillSystem:
    given = dict(options)
    if "max_num_batched_tokens" in given:
        given["chunked_prefill_size"] = given.pop("max_num_batched_tokens")
    given.setdefault("chunked_prefill_size", _tokens(settings.part.length_scale, CHUNKED_PREFILL_SIZE))
    shapes = settings.shapes("ladder") if given.get("prefill_graphs") else ()
    return sglang(SglangConfig(**given), settings.step_model(shapes), name=name)


def build_vllm(settings: Settings, options: Mapping[str, Any]) -> PrefillSystem:
    return vllm_pd(
        VllmPdConfig(**{"max_num_batched_tokens": _tokens(settings.part.length_scale, CHUNK_TOKENS), **options})
    )


def _graphs(given: dict[str, Any], default: Graphs) -> Graphs:
    return cast(Graphs, given.pop("graphs", default))


def _model(settings: Settings, graphs: Graphs, given: dict[str, Any]) -> StepModel:
    """Knows the graphs that fit the budget."""
    budget_gb = given.pop("graph_budget_gb", None)
    require(
        budget_gb is None or graphs != "none",
        f"graph_budget_gb={budget_gb} has no effect with graphs='none': leave it out",
    )
    require(budget_gb is None or 0 <= budget_gb <= 1000, f"graph_budget_gb={budget_gb} must be between 0 and 1000")
    return settings.step_model(settings.shapes(graphs, budget_gb))


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


def _laps_config(settings: Settings, graphs: Graphs, given: Mapping[str, Any]) -> LapsConfig:
    wait = {
        "variant" if name == "wait" else name: given[name]
        for name in ("wait", "min_window_s", "max_window_s")
        if name in given
    }
    if wait.get("variant") == "off":
        for name in ("min_window_s", "max_window_s"):
            require(name not in wait, f"{name}={wait.get(name)} has no effect with wait='off': leave it out")
    own = {field.name for field in fields(TemporalConfig)}
    part = settings.part
    usual = scaled_laps(
        settings.boundary, settings.deadline_s, length_scale=part.length_scale, time_scale=part.time_scale
    )
    return replace(
        usual,
        graphs=graphs,
        wait=replace(usual.wait, **wait),
        temporal=replace(usual.temporal, **{name: value for name, value in given.items() if name in own}),
        spatial=_spatial(settings, given),
    )


def _spatial(settings: Settings, given: Mapping[str, Any]) -> Spatial | None:
    """Temporal on one instance, or where answers are decoded; else pools."""
    if settings.num_instances == 1 or settings.decode != "none":
        for name in ("num_short", "controller", "pooling"):
            require(
                name not in given,
                f"{name}={given.get(name)!r} has no effect "
                + ("on one instance" if settings.num_instances == 1 else f"with decode={settings.decode!r}")
                + ": leave it out",
            )
        return None
    form = given.get("controller", "mended")
    if form not in ("mended", "printed", "off"):
        raise UserError(f"controller={form!r} is unknown: use one of mended, printed, off")
    return Spatial(
        num_short=given.get("num_short", max(1, round(SHORT_SHARE * settings.num_instances))),
        controller=None if form == "off" else ControllerConfig(form=form),
        pooling=given.get("pooling", "each" if settings.cache == "instance" else "global"),
    )


LAPS = PrefillSystemEntry(
    name="laps",
    title="LAPS",
    summary="length-aware prefill: classes apart, graphs, adaptive waiting; simulated",
    own=knobs.LAPS,
    build=build_laps,
)
LAPS_GRAPHS = PrefillSystemEntry(
    name="laps-graphs-only",
    title="LAPS, graphs only",
    summary="one queue, first come, first served, with LAPS's graphs; simulated",
    own=knobs.GRAPHS,
    build=build_graphs,
)
LAPS_DISAGGREGATION = PrefillSystemEntry(
    name="laps-disaggregation-only",
    title="LAPS, disaggregation only",
    summary="classes apart without graphs or waiting; simulated",
    own={
        name: kind
        for name, kind in knobs.LAPS.items()
        if name not in (*knobs.GRAPHS, "wait", "min_window_s", "max_window_s")
    },
    build=build_disaggregation,
)
RESERVE = PrefillSystemEntry(
    name="reserve",
    title="Reserve",
    summary="shortest remaining prefill first, mixed steps, a share kept for late turns; ours, simulated",
    own=knobs.RESERVE,
    build=build_reserve,
)
SGLANG_PD = PrefillSystemEntry(
    name="sglang-pd",
    title="SGLang PD",
    summary="token-budget batches, first come, first served, instances in turn; simulated",
    own=knobs.SGLANG,
    build=build_sglang,
)
SGLANG_PD_ROUTER = PrefillSystemEntry(
    name="sglang-pd-router",
    title="SGLang PD + router",
    summary="the same behind a router to the least loaded instance; simulated",
    own=knobs.SGLANG,
    build=build_sglang_router,
)
VLLM_PD = PrefillSystemEntry(
    name="vllm-pd",
    title="vLLM PD",
    summary="chunked prefill, first come, first served, instances in turn; simulated",
    own=knobs.VLLM,
    build=build_vllm,
)
