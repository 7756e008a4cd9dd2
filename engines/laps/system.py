"""What makes a prefill system, and LAPS, its ablations, Reserve and On-time as such (LAPS §3, Figure 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from engines.knobs import Checked, Count, Range, Tokens
from engines.laps.batching import AdaptiveWait, ClassQueue, TemporalConfig, TemporalDisaggregation, WaitConfig
from engines.laps.controller import ControllerConfig
from engines.laps.graphs import BATCHES, Graphs, WithGraphs, graph_choice
from engines.laps.ours import OnTime, OnTimeConfig, Reserve, ReserveConfig, StepSize
from engines.laps.step_model import StepModel
from engines.policies.instances import InstanceRouter, LeastTokens, LeastTokensInPool, RoundRobin
from engines.policies.step import Batching, Bucket, Chunk
from engines.policies.task import OpenQueue, PrefillQueue

Pooling = Literal["global", "each"]
"""global: instances pull from their pool's queue (LAPS §3.2). each: requests are pushed to the instance of the pool
with the least outstanding tokens, which keeps a history where it is cached."""


@dataclass(frozen=True, kw_only=True)
class Spatial(Checked):
    """Pools of instances that serve one class each."""

    num_short: Count
    """n_s at the start."""
    controller: ControllerConfig | None = None
    """None: the pools stay as they are."""
    pooling: Pooling = "global"


@dataclass(frozen=True, kw_only=True)
class PrefillSystem:
    """Factories, as policies keep state: every instance of every run has its own."""

    name: str
    make_batching: Callable[[], Batching]
    make_queue: Callable[[], PrefillQueue] = PrefillQueue
    make_router: Callable[[], InstanceRouter] = RoundRobin
    work_s: Callable[[int, int], float] | None = None
    """Predicted work of (history, tokens), for tasks' estimates."""
    spatial: Spatial | None = None


@dataclass(frozen=True, kw_only=True)
class LapsConfig(Checked):
    """Defaults mend what the printed text leaves broken; every switch has the printed setting."""

    boundary: Tokens = 256
    """L_m."""
    slo_s: Annotated[float, Range(above=0, most=1e6)] | None = 0.4
    graphs: Graphs = "cheapest"
    wait: WaitConfig = field(default_factory=WaitConfig)
    """``slo_s`` of this configuration replaces its own."""
    temporal: TemporalConfig = field(default_factory=TemporalConfig)
    spatial: Spatial | None = None


def laps(model: StepModel, config: LapsConfig | None = None, *, name: str = "laps") -> PrefillSystem:
    """``model`` knows the captured shapes (``StepModel.profile(cost, shapes_of(graphs))``)."""
    config = config or LapsConfig()
    captured = tuple(model.shapes)
    choice = graph_choice(config.graphs, model, captured)
    depths = sorted({shape.batch for shape in captured if isinstance(shape, Bucket)}) or list(BATCHES)
    wait = replace(config.wait, slo_s=config.slo_s)

    def service_s(requests: int, tokens: int) -> float:
        return model.step_s((Chunk(0, tokens),), 0, 0) + model.request_s * (requests - 1)

    return PrefillSystem(
        name=name,
        make_queue=lambda: ClassQueue(config.boundary),
        make_batching=lambda: WithGraphs(
            TemporalDisaggregation(AdaptiveWait(wait, depths, service_s), config.temporal), choice
        ),
        make_router=lambda: LeastTokens() if config.spatial is None else LeastTokensInPool(boundary=config.boundary),
        work_s=model.work_s,
        spatial=config.spatial,
    )


def srpt(
    model: StepModel, size: StepSize | None = None, *, graphs: Graphs = "ladder", name: str = "srpt"
) -> PrefillSystem:
    """Shortest remaining prefill first: Reserve's steps where no deadline and no wait counts, so that only the order differs."""
    size = size or StepSize()
    config = ReserveConfig(
        slo_s=None, aging=0.0, **{field.name: getattr(size, field.name) for field in fields(StepSize)}
    )
    return reserve(model, config, graphs=graphs, name=name)


def reserve(
    model: StepModel, config: ReserveConfig | None = None, *, graphs: Graphs = "ladder", name: str = "reserve"
) -> PrefillSystem:
    config = config or ReserveConfig()
    choice = graph_choice(graphs, model, tuple(model.shapes))
    Reserve(model, config)  # shows wrong options before any run
    return PrefillSystem(
        name=name,
        make_queue=OpenQueue,
        make_batching=lambda: WithGraphs(Reserve(model, config), choice),
        make_router=LeastTokens,
        work_s=model.work_s,
    )


def on_time(
    model: StepModel, config: OnTimeConfig | None = None, *, graphs: Graphs = "ladder", name: str = "on-time"
) -> PrefillSystem:
    config = config or OnTimeConfig()
    choice = graph_choice(graphs, model, tuple(model.shapes))
    return PrefillSystem(
        name=name,
        make_queue=OpenQueue,
        make_batching=lambda: WithGraphs(OnTime(model, config), choice),
        make_router=LeastTokens,
        work_s=model.work_s,
    )
