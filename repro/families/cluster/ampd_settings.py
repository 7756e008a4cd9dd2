"""A cell's knobs, resolved against its platform: model, GPUs, objectives, workload."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

from engines.ampd.performance import PerformanceModel, profile_hardware
from engines.cluster.hardware import PHYSICAL, CostConstants, Hardware, cost_constants
from engines.cluster.record import ItlStat, Reading, Scope, TtftRule
from engines.cluster.sessions import contexts_of
from engines.cost.kernels import check_kernels
from engines.cost.roofline import Gpu, gpu
from engines.errors import UserError, require
from engines.knobs import SOMETHING, Checked, Count, Needs, Only, Range, Seconds, build, knobs_of, no_effect, with_knobs
from engines.models.shape import ModelShape, Precision, model_shape
from engines.policies.views import NO_OBJECTIVE_S, Slo
from repro.families.cluster.system import PolicySettings, PolicySystem, simulated_model
from repro.families.cost import CostKnobs, fit_of, fitted_to
from repro.families.platforms import ArPart, Platform, platform
from repro.files import file_cache
from repro.runs.cell import Cell
from repro.runs.record import Obtained
from repro.workloads.draws import ArrivalConfig, arrivals_of
from repro.workloads.knobs import Rate, TraceKnobs, UntoldAnswers
from repro.workloads.rounds import TraceFile, block_of
from repro.workloads.served import trace_of, trace_source
from repro.workloads.sessions import (
    SYSTEM_BLOCK,
    Lengths,
    SessionCard,
    SessionWorkload,
    SessionWorkloadConfig,
    Source,
    build_sessions,
    load_session_card,
)

Objective = Annotated[float, Range(1e-6, 1e6)]
"""An objective in seconds."""


@dataclass(frozen=True, kw_only=True)
class SessionKnobs(TraceKnobs, UntoldAnswers):
    """The sessions of a run, and their objectives."""

    num_prompts: Annotated[int, Range(1, 10**6)] | None = None
    """How many sessions to run."""
    dataset_source: Source | None = None
    """embedded or local; local if a file is given."""
    dataset_path: str | None = None
    """A file of recorded sessions."""
    delay_mean_s: Seconds | None = None
    """Mean seconds between an answer and the next round."""
    slo_ttft_s: Objective | None = None
    """Objective of the time to the first token, in seconds."""
    slo_itl_s: Objective | None = None
    """Objective of the time between tokens, in seconds."""
    transient: bool = False
    """Accept arrivals that outrun the workers. The results then hold only for this number of sessions."""


_OF_DATA_SET = Only(workload=None)
"""Marks a setting of data sets. A workload file keeps its own lengths."""
DEFAULT_READING = Reading(scope="round", ttft="every", itl="p95")
"""The default meaning of SLO attainment. With this reading a simulated grid came closest to Figure 4 most often
(``repro reproduce ampd/readings`` scores all)."""


@dataclass(frozen=True, kw_only=True)
class ClusterKnobs(SessionKnobs, Checked):
    model: str | None = None
    """A shape by its name, or a folder with a config.json."""
    precision: Precision = "bf16"
    """The number format in which layers store and multiply matrices: bf16, fp8 (one scale per tensor), fp8-block or fp8-dynamic."""
    num_gpus: int | None = None
    """GPUs of the deployment."""
    constants: str | None = None
    """A reading of the cost model. With composed steps it only sets their overheads."""
    kv_tokens: Annotated[int, Range(1, 10**9)] | None = None
    """Tokens of K/V that each worker can hold. By default, as many as fit in its memory beside the weights."""
    charged: CostKnobs = field(default_factory=CostKnobs)
    deployment: str | None = None
    """Workers as P:TP4x2 D:TP8x1 or TP8x2; planner for AMPD's plan; search for the best, with all other free settings (docs/tuning.md)."""
    counted: Annotated[Lengths, _OF_DATA_SET] | None = None
    """How to read the lengths on a card: as tokens per session or per round."""
    meets_totals: Annotated[bool, _OF_DATA_SET] | None = None
    """Scale sessions to the means of the trace's card. By default this is done for the card's own sessions, not for those of a file."""
    system_prompts: Annotated[Count, _OF_DATA_SET] | None = None
    """How many system prompts there are. Each session of a card begins with one of them and shares it with others; none by default."""
    system_tokens: Annotated[int, Range(16, 10**6), Needs(system_prompts=SOMETHING)] = 1024
    """Tokens of each system prompt, in front of the first prompt of a session."""
    planning_rate: Rate | None = None
    """Sessions/s that the planner, or deployment=search, expects; the request rate by default."""
    slo_scope: Scope = DEFAULT_READING.scope
    """Whether attainment counts rounds or sessions that meet the objectives."""
    ttft_rule: TtftRule = DEFAULT_READING.ttft
    """Whether every TTFT has to meet its objective, or their mean."""
    itl_stat: ItlStat = DEFAULT_READING.itl
    """Which statistic of the times between tokens has to meet its objective."""


PLANNING_RATE = 0.6
"""Sessions/s that we plan for if a cell has no rate. The paper states none. At 0.4 to 0.6 the planner finds most plans of Table 2."""


OTHER_SEED = 10**6
"""The seed of the samples that we plan with. Reported runs have smaller seeds."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """All that a system is built on, besides its deployment. It is hashable, so that we plan once for all seeds."""

    hardware: Hardware
    num_gpus: int
    slo: Slo
    reading: Reading
    workload: SessionWorkloadConfig
    """The workload to plan with, whose seed differs from the run's."""

    @property
    def performance(self) -> PerformanceModel:
        """The performance model by which policies know the hardware's speed."""
        return performance_of(self.hardware, self.num_gpus, profiled_context(self.workload))

    def sampled(self, turn: int = 0, *, rate: float | None = None) -> SessionWorkload:
        """A sample of sessions with its own seed, at ``rate`` instead of the run's rate if it is given."""
        arrivals = self.workload.arrivals if rate is None else ArrivalConfig(kind="poisson", rate=rate)
        return sessions_of(
            replace(self.workload, arrivals=arrivals, seed=OTHER_SEED + turn, is_sample=rate is not None)
        )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(PolicySettings):
    knobs: ClusterKnobs
    ground: Ground
    workload: SessionWorkloadConfig
    unused_prefixes: str | None
    """Why the system does not use the sessions' common prefixes, if they have any."""
    planning_rate: float

    @property
    def model(self) -> str:
        """The model's name, as the shape spells it."""
        return self.ground.hardware.shape.name

    @property
    def obtained(self) -> Obtained:
        return self.knobs.charged.obtained

    @property
    def cost_text(self) -> str:
        """One sentence on how steps are charged."""
        hardware = self.ground.hardware
        constants, card = hardware.constants, hardware.gpu
        if hardware.kernels is not None:
            overheads = f"overheads of constants {constants.name} ({constants.role})"
            return self.knobs.charged.describe(card, overheads, hardware.shape)
        if constants == constants_on(hardware.gpu, PHYSICAL) != PHYSICAL:
            return f"{card}, {constants.note}"
        return f"{card}, uncalibrated: constants {constants.name} ({constants.role}), {constants.note}"


@lru_cache(maxsize=64)
def hardware_of(
    model: str | ModelShape, card: str | Gpu, constants: str, kernels: str | None = None, kv_tokens: int | None = None
) -> Hardware:
    card_constants = constants_on(gpu(card), cost_constants(constants))
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    return Hardware(shape=shape, gpu=gpu(card), constants=card_constants, kernels=kernels, kv_tokens=kv_tokens)


def constants_on(card: Gpu, constants: CostConstants) -> CostConstants:
    """The physical constants with those fitted to a user's own card. Other readings stay as they are."""
    fit = fit_of(card)
    if fit is None or constants != PHYSICAL:
        return constants
    note = f"{fit.text}; links, memory and exchanges as in constants {constants.name}"
    return replace(fitted_to(card, constants), role="fitted", note=note)


@lru_cache(maxsize=256)
def performance_of(hardware: Hardware, num_gpus: int, context: int) -> PerformanceModel:
    """The performance model of this hardware. It takes a tenth of a second, so the runs of a panel share it."""
    return profile_hardware(hardware, num_gpus=num_gpus, decode_context=context)


_kept_sessions = file_cache(maxsize=512)(build_sessions)


def sessions_of(config: SessionWorkloadConfig) -> SessionWorkload:
    """The sessions of a workload, which all systems of a comparison share. A file's sessions are the same for every seed if nothing is
    drawn."""
    is_drawn = config.arrivals.kind != "trace" or config.delay_mean_s is not None
    if isinstance(config.file, TraceFile) and not is_drawn:
        config = replace(config, seed=0)
    return _kept_sessions(config)


@file_cache(maxsize=512)
def profiled_context(config: SessionWorkloadConfig) -> int:
    """The context, in tokens, at which we profile decoding: halfway through a session of mean length."""
    if config.meets_totals:
        lengths = load_session_card(config.trace).lengths
        return round((lengths.prefill_tokens + lengths.decode_tokens + config.system_tokens) / 2)
    contexts = contexts_of(sessions_of(config).sessions)
    return max(1, round(int(contexts.sum()) / len(contexts) / 2))


def resolve(cell: Cell, system: PolicySystem, *, most_gpus: int | None = None) -> ClusterSettings:
    """Return the platform's defaults with the cell's knobs over them. Raises UserError for knobs that cannot be. ``most_gpus`` replaces
    the platform's number."""
    target = platform(cell.platform)
    part = target.part(ArPart)
    require(
        cell.executor == "roofline",
        f"executor={cell.executor!r}: system={system.name!r} is simulated here, leave it out or use roofline",
    )
    require(target.gpu is not None, f"platform={target.name!r} names no GPU to simulate: use h20x32")
    assert target.gpu is not None
    knobs: ClusterKnobs
    knobs, policies, requested = system.resolved(cell, executor=cell.executor)
    card = None if knobs.workload is not None else load_session_card(cell.dataset)
    shape, charged = simulated_model(knobs.model or part.model, system.name, target.gpu, knobs.charged, knobs.precision)
    hardware = hardware_of(shape, target.gpu, knobs.constants or part.constants, charged.framework, knobs.kv_tokens)
    check_kernels(shape, hardware.gpu, charged.framework, hardware.degrees(), attention=("prompt", "decode"))
    num_gpus = _num_gpus(knobs.num_gpus, target, card, most_gpus)
    workload = session_config(
        cell, knobs, num_sessions=part.num_sessions, meets_totals=knobs.meets_totals, counted=knobs.counted
    )
    defaults = _default_steps(part, gpu(target.gpu), system.own, requested)
    own: Any = with_knobs(build(system.own, defaults), requested)
    workload, why_unused = _shared_prefixes(workload, knobs, own, system.name, requested)
    reading = Reading(scope=knobs.slo_scope, ttft=knobs.ttft_rule, itl=knobs.itl_stat)
    slo = _objectives(shape.name, None if card is None else card.name, part, knobs)
    basis = repr((hardware.constants, hardware.gpu, hardware.shape, slo, reading)) + charged.basis(target.gpu, shape)
    basis += hardware.constants.engine.identity + target.digest
    return ClusterSettings(
        platform=target,
        knobs=replace(knobs, charged=charged),
        ground=Ground(
            hardware=hardware, num_gpus=num_gpus, slo=slo, reading=reading, workload=replace(workload, seed=OTHER_SEED)
        ),
        own=own,
        policies=policies,
        workload=workload,
        unused_prefixes=why_unused,
        planning_rate=knobs.planning_rate or cell.rate or replayed_rate(workload) or PLANNING_RATE,
        basis=hashlib.sha256(basis.encode()).hexdigest()[:12],
    )


def _default_steps(part: ArPart, card: Gpu, own: type, requested: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a real system on this card. Tokens and requests of a step are those of vLLM 0.15's API server, which
    ``EngineArgs.get_batch_defaults`` (vllm/engine/arg_utils.py) chooses by the card."""
    defaults: dict[str, Any] = dict(getattr(own, "on_cards", {}))
    if part.schedules == "paper" or not defaults:
        return {}
    is_large = card.memory_bytes >= 70 * 2**30 and "a100" not in card.name
    if requested.get("scheduling", "chunked") == "chunked":
        defaults |= (
            {"max_num_batched_tokens": 8192, "max_num_seqs": 1024} if is_large else {"max_num_batched_tokens": 2048}
        )
    return {name: value for name, value in defaults.items() if name in knobs_of(own)}


def _num_gpus(requested: int | None, target: Platform, card: SessionCard | None, limit: int | None) -> int:
    """The number of GPUs that is asked for, else that of the trace. A user's own sessions get the usual number of the platform."""
    platform_gpus = target.part(ArPart).num_gpus
    default = (target.usual_gpus or platform_gpus) if card is None else min(card.num_gpus, platform_gpus)
    num_gpus, limit = default if requested is None else requested, limit or platform_gpus
    require(1 <= num_gpus <= limit, f"num_gpus={num_gpus} must be between 1 and {limit} on platform={target.name!r}")
    return num_gpus


def _shared_prefixes(
    workload: SessionWorkloadConfig, knobs: ClusterKnobs, options: Any, system: str, requested: Mapping[str, Any]
) -> tuple[SessionWorkloadConfig, str | None]:
    """The workload as the system serves it, and why common prefixes are not used, if so. The sessions know which tokens they share if the
    system's workers keep shared blocks. Raises UserError for settings of such workers that have no effect."""
    if knobs.system_prompts is not None:
        workload = replace(workload, system_prompts=knobs.system_prompts, system_tokens=knobs.system_tokens)
    size = named_block(workload)
    keeps_prefixes = getattr(options, "prefix_cache", None)
    if size is None or not keeps_prefixes:
        if "block_size" in requested:
            raise no_effect("block_size", options.block_size, "hash_ids", None, "or give system_prompts")
        reason = f"system={system!r} keeps K/V by session" if keeps_prefixes is None else "prefix_cache=false"
        return workload, None if size is None else reason
    require(
        options.block_size % size == 0 or size % options.block_size == 0,
        f"block_size={options.block_size} must divide {size}, the tokens of the sessions' own blocks, or be a multiple: use {size}",
    )
    require(
        requested.get("history_read") in (None, "own-cache"),
        f"history_read={requested.get('history_read')!r} has no effect where prefill workers share what sessions have in common: leave it "
        "out, or give prefix_cache=false",
    )
    return replace(workload, with_prefixes=True), None


def named_block(workload: SessionWorkloadConfig) -> int | None:
    """Tokens in each of the sessions' named blocks; None if the sessions name no blocks."""
    if workload.file is None:
        return None if workload.system_prompts is None else SYSTEM_BLOCK
    return block_of(trace_of(workload.file, workload.seed).sessions)


def replayed_rate(workload: SessionWorkloadConfig) -> float | None:
    """Sessions/s at a file's own arrival times. None with other arrivals, or if all sessions arrive at once."""
    if workload.file is None or workload.arrivals.kind != "trace":
        return None
    sessions = sessions_of(workload).sessions
    last_s = sessions[-1].arrival_s
    return (len(sessions) - 1) / last_s if last_s > 0 else None


def _objectives(model: str, trace: str | None, part: ArPart, knobs: ClusterKnobs) -> Slo:
    """The given objectives, else those that the platform states for the trace. A file has only those that are given."""
    if trace is None:
        return Slo(ttft_s=knobs.slo_ttft_s or NO_OBJECTIVE_S, itl_s=knobs.slo_itl_s or NO_OBJECTIVE_S)
    objective = part.objectives.get((model, trace))
    ttft_s = knobs.slo_ttft_s or (objective and objective.ttft_ms / 1e3)
    itl_s = knobs.slo_itl_s or (objective and objective.itl_ms / 1e3)
    if ttft_s is None or itl_s is None:
        missing = "slo_itl_s" if itl_s is None else "slo_ttft_s"
        raise UserError(
            f"model={model!r} on dataset={trace!r} has no published objective: give {missing} (and slo_ttft_s, "
            f"slo_itl_s as knobs, in seconds)"
        )
    return Slo(ttft_s=ttft_s, itl_s=itl_s)


def session_config(
    cell: Cell,
    knobs: SessionKnobs,
    *,
    num_sessions: int,
    meets_totals: bool | None = None,
    counted: Lengths | None = None,
) -> SessionWorkloadConfig:
    """The workload of a cell. It has ``num_sessions`` sessions unless the cell asks for another number."""
    path, file = knobs.dataset_path, trace_source(cell.dataset, knobs, cell.requested)
    if file is not None:
        num_sessions = len(trace_of(file, cell.seed).sessions)
    source = knobs.dataset_source or ("embedded" if path is None else "local")
    require(
        meets_totals is None or source == "local",
        f"meets_totals={str(meets_totals).lower()} has no effect with dataset_source={source!r}, whose sessions always meet them: leave it out",
    )
    return SessionWorkloadConfig(
        trace=cell.dataset,
        num_sessions=knobs.num_prompts or num_sessions,
        seed=cell.seed,
        arrivals=arrivals_of(cell.rate, knobs),
        source=source,
        trace_path=path,
        meets_totals=path is None and file is None if meets_totals is None else meets_totals,
        counted=counted,
        delay_mean_s=knobs.delay_mean_s,
        file=file,
    )
