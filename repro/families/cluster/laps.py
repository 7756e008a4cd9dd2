"""LAPS, its ablations, Reserve, On-time and the prefill systems compared with them: from a cell to instances and their turns."""

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np

from baselines.ar.sglang import CHUNKED_PREFILL_SIZE, PdConfig, SglangConfig, graphs_only, sglang, vllm_pd
from engines.cluster.hardware import StepCost
from engines.cost.kernels import Kernel, check_kernels
from engines.cost.roofline import gpu
from engines.errors import require
from engines.knobs import SOMETHING, Count, Only, Range, build, knobs_of, with_knobs
from engines.laps.batching import Graphs, TemporalConfig, WaitConfig, WithGraphs, graph_choice
from engines.laps.cluster import Decoding, PrefillCluster, PrefillRun
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig, ReserveConfig, StepSize
from engines.laps.system import (
    ControllerConfig,
    LapsConfig,
    Pooling,
    PrefillSystem,
    Spatial,
    edf,
    laps,
    moore_hodgson,
    on_time,
    reserve,
    srpt,
)
from engines.models.shape import ModelShape
from engines.policies.batching import CHUNK_TOKENS
from engines.policies.own import BATCHER, INSTANCE_ROUTER, OPEN_QUEUE
from engines.policies.views import NO_OBJECTIVE_S, OpenQueue, Slo
from repro.families.cluster.laps_record import PREFILL, tables_of, window_of
from repro.families.cluster.laps_settings import (
    BOUNDARY,
    SIMULATED,
    InstanceKnobs,
    PrefillSettings,
    PrefillWorkload,
    draw_workload,
    in_tokens,
    scaled,
    workload_of,
)
from repro.families.cluster.system import PolicyDeployment, PolicySystem, simulated_model
from repro.families.cost import PREFILLS, fitted_to
from repro.families.platforms import Platform, PrefillPart, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.family import Family
from repro.runs.record import OnProgress, RunRecord
from repro.workloads.card import add_note
from repro.workloads.conversations import load_conversation_card

GIVEN_UP_S = 600.0
"""Simulated seconds, besides think time and decoding, after which we give a run up. Otherwise a policy that dispatches nothing would
never end."""
_SLOWEST_TOKEN_S = 0.05
"""The most seconds that we allow for each token of a decoded answer."""
_ON_TORCH = "repro.families.cluster.on_torch"
"""The module of measured runs, imported only for them: a simulation loads no torch and does not depend on this code."""


@dataclass(frozen=True, kw_only=True)
class PrefillDeployment(PolicyDeployment[PrefillSettings]):
    def cluster(self, settings: PrefillSettings) -> PrefillCluster:
        knobs, decoding = settings.knobs, None
        if knobs.decode != "none":
            # Only simulations decode answers, because their costs know how long that takes.
            cost = cast(StepCost, settings.cost)
            decoding = Decoding(where=knobs.decode, cost=cost, kv_capacity=settings.kv_capacity)
        return PrefillCluster(
            system=self.system.build(settings),
            cost=settings.cost,
            num_instances=knobs.num_instances,
            slo_s=settings.slo_s,
            boundary=settings.boundary,
            cache=knobs.cache,
            decoding=decoding,
            reprefills_answer=knobs.reprefills_answer,
        )

    def run(self, workload: PrefillWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        config, part, knobs = workload.config, self.settings.part, self.settings.knobs
        until_s = _until_s(workload, knobs.decode)
        # Inside the body, a measured run's settings have an instance.
        serving = nullcontext if self.settings.is_simulated else import_module(_ON_TORCH).serving
        with serving(self.settings) as settings:
            run = self.cluster(settings).simulate(workload.arrivals, until_s=until_s)
        last = [] if config.arrivals is not None else [stream.sessions[-1].session_id for stream in workload.streams]
        window = window_of(run.requests, run.facts["end_s"], last)
        constants, instance = asdict(knobs.constants) if settings.is_simulated else {}, settings.instance
        facts = {
            **({} if settings.shape is None else {"ran": self._ran_knobs(settings, settings.shape)}),
            "num_instances": knobs.num_instances,
            "options": self.options,
            "constants": {name: value for name, value in constants.items() if value != math.inf},
            **({} if instance is None else {"instance": instance.facts, "length_scale": config.length_scale}),
            "slo_s": settings.slo_s,
            "boundary": settings.boundary,
            "decode": knobs.decode,
            "is_transient": knobs.transient,
            "window_s": list(window),
            "closed_loops": [] if config.arrivals is not None else [stream.clients for stream in config.streams],
            "think_s": config.think_s,
            "shares": workload.provenance.shares,
            **_estimates(settings, run),
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

    def _ran_knobs(self, settings: PrefillSettings, shape: ModelShape) -> dict[str, Scalar]:
        """The knobs of what ran."""
        values = vars(settings.own) | vars(getattr(settings.own, "temporal", settings.own))
        step_limits = {name: values[name] for name in ("chunk_tokens", "max_num_batched_tokens") if name in values}
        common = {"model": settings.model, "precision": shape.precision, "num_instances": settings.knobs.num_instances}
        return {**common, **step_limits, **self.options}


def _estimates(settings: PrefillSettings, run: PrefillRun) -> dict[str, Any]:
    """How much of a composed run's times is estimated."""
    if settings.part.gpu is None:
        return {}
    history, tokens = (np.asarray(run.requests[name], dtype=np.int64) for name in ("history", "tokens"))
    pairs = float((tokens * (history + 0.5 * (tokens + 1))).max()) if len(tokens) else 0.0
    context = int((history + tokens).max()) if settings.knobs.decode != "none" and len(tokens) else 0
    shape, charged = settings.simulated_shape, settings.knobs.charged
    return charged.estimates(settings.part.gpu, shape, {(PREFILLS, 1): 1.0}, pairs, context)


def _with_model(knobs: InstanceKnobs, part: PrefillPart, system: str) -> tuple[InstanceKnobs, ModelShape | None]:
    """The knobs with the costs of a simulated instance, and its shape (None if measured, which has its own model). Raises UserError if
    its kernels are not known."""
    model = knobs.model or part.model
    if part.gpu is None:
        require(model == part.model, f"model={model!r} is not measured here: leave it out, or use {part.model}")
        return knobs, None
    shape, charged = simulated_model(model, system, part.gpu, knobs.charged, knobs.precision)
    attention: tuple[Kernel, ...] = ("prompt",) if knobs.decode == "none" else ("prompt", "decode")
    check_kernels(shape, gpu(part.gpu), charged.framework, attention=attention)
    return replace(knobs, charged=charged, constants=fitted_to(part.gpu, knobs.constants)), shape


def _until_s(workload: PrefillWorkload, decode: str) -> float:
    config = workload.config
    if config.arrivals is not None:
        if config.is_replayed:
            sessions = [session for stream in workload.streams for session in stream.sessions]
            return GIVEN_UP_S + max(each.arrival_s + sum(turn.delay_s for turn in each.rounds) for each in sessions)
        assert config.arrivals.rate is not None
        return GIVEN_UP_S + sum(stream.num_turns for stream in workload.streams) / config.arrivals.rate
    waits_s = 0.0
    for stream, conversations in zip(config.streams, workload.streams, strict=True):
        answers = sum(session.decode_tokens for session in conversations.sessions) if decode != "none" else 0
        alone_s = conversations.num_turns * config.think_s + answers * _SLOWEST_TOKEN_S
        waits_s = max(waits_s, alone_s / (stream.clients or 1))
    return GIVEN_UP_S + waits_s


@dataclass(frozen=True, kw_only=True)
class PrefillSystemEntry(PolicySystem):
    """A prefill system. ``build`` makes its policies from a run's settings."""

    family: ClassVar[Family] = PREFILL
    replaced = {"batcher": (*knobs_of(WaitConfig), *knobs_of(TemporalConfig))}
    run_knobs = InstanceKnobs
    usual: Callable[[PrefillPart], Mapping[str, Any]] = lambda part: {}
    """The system's own defaults on a platform, by name."""

    def default_dataset(self, target: Platform) -> str:
        return target.part(PrefillPart).dataset

    def prepare(self, cell: Cell, part: PrefillPart | None = None) -> tuple[PrefillDeployment, PrefillWorkload]:
        """Raises every UserError that a user can cause. ``part`` replaces the platform's."""
        settings = self.settings(cell, part)
        deployment = PrefillDeployment(cell=cell, settings=settings)
        deployment.cluster(settings).system.make_batching()  # shows wrong options before any run
        workload = draw_workload(settings.workload)
        if "workload" in cell.requested and "slo_ttft_s" not in cell.requested:
            remark = f"objective: TTFT {settings.slo_s:g} s, that of platform={cell.platform!r}"
            workload = replace(workload, provenance=add_note(workload.provenance, remark))
        longest, capacity = max(stream.longest_tokens for stream in workload.streams), settings.kv_capacity
        holder = f"a GPU beside {settings.model}" if settings.is_simulated else f"model={settings.model!r}"
        require(
            longest <= capacity,
            f"dataset={cell.dataset.lower()!r} has a conversation of {longest} tokens and {holder} holds "
            f"{capacity}: shorten it, or use a smaller model",
        )
        return deployment, workload

    def settings(self, cell: Cell, part: PrefillPart | None = None) -> PrefillSettings:
        """The settings of a cell. Raises UserError for all that a user can get wrong in them."""
        target = platform(cell.platform)
        part = part or target.part(PrefillPart)
        executor = "torch" if part.gpu is None else "roofline"
        require(
            cell.executor == executor,
            f"executor={cell.executor!r}: system={self.name!r} is {'measured' if executor == 'torch' else 'simulated'} on "
            f"platform={target.name!r}, leave it out or use {executor}",
        )
        beside: dict[str, object] = {"executor": cell.executor, "rate": cell.rate}
        knobs: InstanceKnobs
        knobs, policies, requested = self.resolved(cell, **beside)
        if knobs.workload is None:
            load_conversation_card(cell.dataset)
        knobs, shape = _with_model(knobs, part, self.name)
        require(
            1 <= knobs.num_instances <= part.most_instances,
            f"num_instances={knobs.num_instances} must be between 1 and {part.most_instances} on platform={target.name!r}",
        )
        require(
            knobs.decode == "none" or (cell.rate is None and knobs.arrivals is None),
            f"decode={knobs.decode!r} needs clients in a closed loop: leave the rate and arrivals out",
        )
        slo_s = knobs.slo_ttft_s or part.slo_s
        boundary = knobs.constants.boundary if "boundary" in cell.requested else round(BOUNDARY * part.length_scale)
        paper = scaled(self.own, length_scale=part.length_scale, time_scale=part.time_scale)
        defaults = {"slo_s": slo_s if knobs.deadlines else None, "max_num_seqs": part.max_num_seqs}
        own = build(self.own, {**defaults, **paper, **self.usual(part)})
        beside |= {"num_instances": knobs.num_instances, "decode": knobs.decode}
        # The numbers depend on these besides requests and code: constants and objective, or the model and the scales.
        basis: tuple[object, ...] = part, slo_s, boundary
        if (card := part.gpu) is not None:
            assert shape is not None, "a simulated instance has a shape"
            digests = knobs.charged.basis(card, shape), target.digest
            basis = shape, gpu(card), knobs.constants, slo_s, boundary, *filter(None, digests)
        return PrefillSettings(
            platform=target,
            part=part,
            own=with_knobs(own, requested, **beside),
            policies=policies,
            knobs=knobs,
            shape=shape,
            slo_s=slo_s,
            boundary=boundary,
            workload=workload_of(cell, part, knobs),
            basis=hashlib.sha256(repr(basis).encode()).hexdigest()[:12],
        )


def pools(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """num_short of an eighth and of three eighths of the instances, and of a quarter with controller=off"""
    instances = cell.requested.get("num_instances", 1)
    assert isinstance(instances, int)
    few, usual, many = (max(1, round(share * instances)) for share in (0.125, 0.25, 0.375))
    return {"num_short": few}, {"num_short": many}, {"num_short": usual, "controller": "off"}


POLICIES = (BATCHER, OPEN_QUEUE, INSTANCE_ROUTER)


@dataclass(frozen=True, kw_only=True)
class PrefillPolicies:
    batcher: str | None = None
    """Your own batching policy as module:NAME, made for every instance. It replaces the two queues and the waiting, and can take
    max_num_batched_tokens, max_num_seqs, model and slo."""
    queue: Annotated[str, Only(batcher=SOMETHING)] | None = None
    """Your own order of waiting prefills as module:NAME: an OpenQueue, made for every instance beside your batcher. It can take slo."""
    router: Annotated[str, Only(num_instances=Range(2), pooling=(None, "each"))] | None = None
    """Your own router as module:NAME, made for every run, which picks an instance. It can take model, slo and seed."""


_SHORT_SHARE = 0.25
"""The default share of instances in the short pool, because short turns have a quarter of the tokens."""
_POOLED = Only(num_instances=Range(2), decode="none")
"""Marks a setting of pools. A single instance has none, nor do instances whose answers are decoded."""


@dataclass(frozen=True, kw_only=True)
class GraphKnobs:
    graphs: Graphs | None = None
    """Which captured graph a step replays. nearest: the smallest bucket that holds the batch. cheapest: a bucket, only if predicted
    faster. ladder: a packed size, only if predicted faster. none: no graph."""
    graph_budget_gb: (
        Annotated[float, Range(0, 1000), SIMULATED, Only(graphs=("nearest", "cheapest", "ladder"))] | None
    ) = None
    """GB of memory for captured graphs; enough for all graphs by default."""


@dataclass(frozen=True, kw_only=True)
class PoolKnobs:
    num_short: Annotated[Count, _POOLED] | None = None
    """Instances in the short pool; a quarter of all instances by default."""
    controller: Annotated[Literal["mended", "printed", "off"], _POOLED] = "mended"
    """Which form of Algorithm 2 moves instances between the pools; off leaves the pools as they are."""
    pooling: Annotated[Pooling, _POOLED] | None = None
    """global: instances pull from their pool's queue (LAPS §3.2). each: a request goes to the instance of its pool with the fewest
    outstanding tokens, so that a history stays where it is cached."""


@dataclass(frozen=True, kw_only=True)
class DisaggregationKnobs(PoolKnobs):
    temporal: TemporalConfig = field(default_factory=TemporalConfig)


@dataclass(frozen=True, kw_only=True)
class LapsKnobs(GraphKnobs, DisaggregationKnobs, PrefillPolicies):
    wait: WaitConfig = field(default_factory=WaitConfig)


@dataclass(frozen=True, kw_only=True)
class ReserveKnobs(GraphKnobs):
    reserve: ReserveConfig = field(default_factory=ReserveConfig)


@dataclass(frozen=True, kw_only=True)
class OnTimeKnobs(GraphKnobs):
    on_time: OnTimeConfig = field(default_factory=OnTimeConfig)


def _build_laps(settings: PrefillSettings) -> PrefillSystem:
    """LAPS, with a user's policies in place of its own."""
    policies, part, (model, graphs) = settings.policies, settings.part, _model_and_graphs(settings)
    config = _laps_config(settings, graphs)
    if "router" in policies and config.spatial is not None:
        config = replace(config, spatial=replace(config.spatial, pooling="each"))
    facts = {
        "max_num_batched_tokens": in_tokens(CHUNKED_PREFILL_SIZE, part.length_scale),
        "max_num_seqs": part.max_num_seqs,
        "model": model,
        "slo": Slo(ttft_s=settings.deadline_s or NO_OBJECTIVE_S, itl_s=NO_OBJECTIVE_S),
        "seed": settings.workload.streams[0].conversations.seed,
    }
    changes: dict[str, Any] = {}
    for kind, plugin in policies.items():
        plugin.make_checked(**facts)
        changes[f"make_{kind}"] = partial(plugin.make, **facts)
    if (make_batcher := changes.pop("make_batcher", None)) is not None:
        choice = graph_choice(graphs, model, tuple(model.shapes))
        changes = {"make_queue": OpenQueue, **changes, "make_batching": lambda: WithGraphs(make_batcher(), choice)}
    return replace(laps(model, config), **changes)


def _build_graphs(settings: PrefillSettings) -> PrefillSystem:
    """SGLang's single queue with the graphs of LAPS."""
    model, graphs = _model_and_graphs(settings)
    budget = _sglang_tokens(settings.part)["max_num_batched_tokens"]
    return graphs_only(model, graphs=graphs, max_num_batched_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class SrptKnobs(GraphKnobs):
    size: StepSize = field(default_factory=StepSize)


@dataclass(frozen=True, kw_only=True)
class SrptAgingKnobs(SrptKnobs):
    aging: Annotated[float, Range(0, 1e6)] = 0.05
    """How many seconds of remaining work one second of waiting offsets in the order."""


def _build_sglang(settings: PrefillSettings) -> PrefillSystem:
    captured = settings.shapes("ladder") if settings.own.prefill_graphs else ()
    return sglang(settings.own, settings.step_model(captured))


def _model_and_graphs(settings: PrefillSettings) -> tuple[StepModel, Graphs]:
    """The step model with the graphs that fit the budget, and how a step chooses one of them."""
    graphs = settings.own.graphs
    return settings.step_model(settings.shapes(graphs, settings.own.graph_budget_gb)), graphs


def _with_ladder(
    name: str, title: str, own: type, make: Callable[[StepModel, Graphs, PrefillSettings], PrefillSystem]
) -> PrefillSystemEntry:
    """A system with graphs of packed sizes by default. A CPU gets none, because it has no launches that they would save."""
    return PrefillSystemEntry(
        name=name,
        title=title,
        own=own,
        build=lambda settings: make(*_model_and_graphs(settings), settings),
        usual=lambda part: {"graphs": "none" if part.gpu is None else "ladder"},
    )


def _sglang_tokens(part: PrefillPart) -> dict[str, Any]:
    return {"max_num_batched_tokens": in_tokens(CHUNKED_PREFILL_SIZE, part.length_scale), "routing": "round-robin"}


def _laps_config(settings: PrefillSettings, graphs: Graphs) -> LapsConfig:
    """The configuration of LAPS: temporal disaggregation on one instance or if answers are decoded, else pools of instances."""
    options, spatial = settings.own, None
    knobs = settings.knobs
    if knobs.num_instances > 1 and knobs.decode == "none":
        spatial = Spatial(
            num_short=options.num_short or max(1, round(_SHORT_SHARE * knobs.num_instances)),
            controller=None if options.controller == "off" else ControllerConfig(form=options.controller),
            pooling=options.pooling or ("each" if knobs.cache == "instance" else "global"),
        )
    return LapsConfig(
        boundary=settings.boundary,
        slo_s=settings.deadline_s,
        graphs=graphs,
        wait=getattr(options, "wait", WaitConfig(wait="off")),
        temporal=options.temporal,
        spatial=spatial,
    )


LAPS = PrefillSystemEntry(
    name="laps",
    title="LAPS",
    own=LapsKnobs,
    build=_build_laps,
    usual=lambda part: {"graphs": "cheapest"},
    policies=POLICIES,
)
LAPS_GRAPHS = PrefillSystemEntry(
    name="laps-graphs-only",
    title="LAPS, graphs only",
    own=GraphKnobs,
    build=_build_graphs,
    usual=lambda part: {"graphs": "cheapest"},
)
LAPS_DISAGGREGATION = PrefillSystemEntry(
    name="laps-disaggregation-only",
    title="LAPS, disaggregation only",
    own=DisaggregationKnobs,
    # No graphs, and so nothing to wait for.
    build=lambda settings: laps(settings.step_model(()), _laps_config(settings, "none")),
)
RESERVE = _with_ladder(
    "reserve", "Reserve", ReserveKnobs, lambda model, graphs, run: reserve(model, run.own.reserve, graphs=graphs)
)
ON_TIME = _with_ladder(
    "on-time", "On-time", OnTimeKnobs, lambda model, graphs, run: on_time(model, run.own.on_time, graphs=graphs)
)
SRPT = _with_ladder("srpt", "SRPT", SrptKnobs, lambda model, graphs, run: srpt(model, run.own.size, graphs=graphs))
SRPT_AGING = _with_ladder(
    "srpt-aging",
    "SRPT, aging",
    SrptAgingKnobs,
    lambda model, graphs, run: srpt(model, run.own.size, graphs=graphs, aging=run.own.aging),
)
EDF = _with_ladder("edf", "EDF", SrptKnobs, lambda model, graphs, run: edf(model, run.own.size, graphs=graphs))
MOORE_HODGSON = _with_ladder(
    "moore-hodgson",
    "Moore-Hodgson",
    SrptKnobs,
    lambda model, graphs, run: moore_hodgson(model, run.own.size, graphs=graphs, slo_s=run.deadline_s),
)
SGLANG_PD = PrefillSystemEntry(
    name="sglang-pd", title="SGLang PD", own=SglangConfig, build=_build_sglang, usual=_sglang_tokens
)
SGLANG_PD_ROUTER = PrefillSystemEntry(
    name="sglang-pd-router",
    title="SGLang PD + router",
    own=SglangConfig,
    build=_build_sglang,
    usual=lambda part: {**_sglang_tokens(part), "routing": "least-tokens"},
)
VLLM_PD = PrefillSystemEntry(
    name="vllm-pd",
    title="vLLM PD",
    own=PdConfig,
    build=lambda settings: vllm_pd(settings.own),
    usual=lambda part: {"max_num_batched_tokens": in_tokens(CHUNK_TOKENS, part.length_scale)},
)
