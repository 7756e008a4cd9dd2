"""``repro plan``, ``plan-cluster`` and ``capacity``: how to divide memory and GPUs, and what rates they serve."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import typer

from engines.cost.roofline import Gpu
from engines.dllm.config import EngineConfig, GenerationConfig, LogitRows, SparsityConfig
from engines.dllm.memory import MemoryPlan, concurrency, divide_memory, logit_rows_at_once
from engines.errors import UserError, require
from engines.knobs import Checked, Memory, Needs, Range, knobs_of, with_knobs
from engines.models.shape import DIFFUSION, LLADA_8B, ModelShape
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, Some, platform_defaults
from repro.cli.output import count_text, number, print_json, print_table, progress_bar, say
from repro.cli.plots import check_plot, save_capacity_plot, save_plot
from repro.cli.sweep import check_regular, readable
from repro.families.cost import CostKnobs
from repro.families.platforms import PLATFORMS, DllmPart, Platform, paper_objectives
from repro.families.platforms import card as card_named
from repro.families.platforms import platform as platform_of
from repro.workloads.knobs import TimeUnit, named_after, place_of

if TYPE_CHECKING:
    from engines.ampd.performance import PerformanceModel
    from engines.ampd.planner import Plan
    from engines.policies.views import Slo
    from repro.capacity.answers import Answer, Search
    from repro.capacity.objectives import Objective
    from repro.capacity.question import Question, Sizes
    from repro.capacity.readings import Change
    from repro.capacity.sites import Plan as CapacityPlan
    from repro.capacity.sites import Site
    from repro.runs.cell import Cell
    from repro.runs.system import Setting
    from repro.workloads.sessions import SessionCard, SessionWorkloadConfig

PLAN_COLUMNS = (
    *("card", "logits", "rows at once", "weights GB", "activations GB", "logits GB", "guard GB"),
    *("KV GB", "KV rows", "requests", "verdict"),
)


PLAN_PARTS = ("weights", "activation", "logits", "guard", "kv")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Checked):
    panel: ClassVar[str] = opt.WHAT
    platform: list[str] | None = None
    """Platform, or a card's YAML file; several times [default: rtx4090 and l40s]."""
    memory_limit: Memory | None = None
    """Another memory size, such as 80GB."""
    input_len: int = 300
    """Prompt length of the requests that are counted."""


def _memory_knobs() -> dict[str, Sequence[type | Some]]:
    memory = Some(EngineConfig, ("max_num_batched_tokens", "max_num_logits"))
    return {opt.ENGINE: (memory, Some(SparsityConfig, ("retention_ratio",)))}


def _case(platform: Platform, memory_limit: int | None, knobs: Mapping[str, Any]) -> tuple[str, int, EngineConfig]:
    """Return the case's name, its memory in bytes, and its engine settings."""
    part = platform.part(DllmPart)
    memory = memory_limit or part.memory_bytes
    config = replace(part.engine, sparsity=with_knobs(SparsityConfig(), knobs))
    return f"{platform.name} {memory / 1e9:g} GB", memory, with_knobs(config, knobs)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A row of the table; sizes are exact bytes, never rounded."""

    label: str
    logits: LogitRows
    logit_rows: int
    plan: MemoryPlan
    requests: int
    """How many requests of the given size fit at once."""
    verdict: str
    obtained: str = "simulated"
    """Computed from shapes; nothing was run."""


def plan_rows(
    label: str, memory_bytes: int, config: EngineConfig, prompt_len: int, generation: GenerationConfig
) -> Iterator[PlanRow]:
    """Yield plans with and without logit decomposition (Figure 2 in numbers). A plan that does not fit becomes a row that says so."""
    total_len = prompt_len + generation.gen_length
    for mode in get_args(LogitRows):
        plan = divide_memory(LLADA_8B, memory_bytes, config, logit_rows=mode)
        requests, rows = concurrency(plan, config, total_len, generation), logit_rows_at_once(config, mode)
        verdict = "fits" if requests else f"KV too small for one request of {total_len} tokens"
        if not plan.fits:
            verdict = f"does not fit: {-plan.kv_bytes} bytes short before any KV"
        yield PlanRow(label=label, logits=mode, logit_rows=rows, plan=plan, requests=requests, verdict=verdict)


def plan(
    *,
    options: PlanOptions,
    knobs: Annotated[Given, Knobs(_memory_knobs, defaults=platform_defaults)],
    json: opt.Json = False,
) -> None:
    """Plan the memory (dLLM-Serve §4.2-4.3) with and without logit decomposition. Simulated: shapes only."""
    platforms = [platform_of(name) for name in options.platform or ["rtx4090", "l40s"]]
    cases = [_case(platform, options.memory_limit, knobs) for platform in platforms]
    part = platforms[0].part(DllmPart)
    longest, input_len = min(config.max_model_len for _, _, config in cases) - part.gen_length, options.input_len
    if not 1 <= input_len <= longest:
        raise UserError(f"input_len={input_len} must be between 1 and {longest}: the model and the token budget set it")
    rows = [row for case in cases for row in plan_rows(*case, input_len, part.generation)]
    if json:
        print_json({"plans": [asdict(row) for row in rows]})
        return
    print_table(
        f"Memory plan of LLaDA-8B, requests of {input_len} + {part.gen_length} tokens (simulated: from shapes)",
        PLAN_COLUMNS,
        [
            (
                *(row.label, row.logits, f"{row.logit_rows:,}"),
                *(number(getattr(row.plan, f"{part}_bytes") / 1e9, 2) for part in PLAN_PARTS),
                *(f"{row.plan.kv_rows:,}", str(row.requests), row.verdict),
            )
            for row in rows
        ],
    )


PLAN_SEED = 10**6
ObjectiveSeconds = Annotated[float, Range(1e-6, 1e6)]
"""Seconds. Integer programs lose precision outside this range."""


CLUSTER_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "rank": lambda row: str(row["rank"]),
    "deployment": lambda row: row["deployment"],
    "P95 TTFT s": lambda row: number(row["ttft_p95_s"], 3),
    "of TTFT SLO": lambda row: f"{row['ttft_p95_of_slo']:.3g}",
    "P95 ITL ms": lambda row: number(row["itl_p95_s"], scale=1e3),
    "of ITL SLO": lambda row: f"{row['itl_p95_of_slo']:.3g}",
    "P95 decode of a round s": lambda row: number(row["round_decode_p95_s"], 2),
}


@dataclass(frozen=True, kw_only=True)
class PlanClusterOptions(CostKnobs, Checked):
    panel: ClassVar[str] = opt.WHAT
    model: str
    """A shape: Qwen3-32B, Llama-3.1-70B, Mixtral-8x7B, Qwen2.5-7B, ..., or a folder with a config.json."""
    trace: str
    """toolbench, gaia, hotpotqa or dureader; or your own sessions, a file or module:NAME as repro capacity takes it."""
    gpus: Annotated[int, Range(1, 4096)]
    """GPUs to divide. A prefill worker and a decode worker need at least one each."""
    hardware: str = "h20"
    """The kind of GPU: h20, b200, h200, h100, a100, l40s or rtx4090, a card's YAML file, module:NAME, or h20x32 and h200x32."""
    constants: str = "physical"
    """Constants of the cost model, or the overheads of a composed one: physical, trial-r2, ..."""


@dataclass(frozen=True, kw_only=True)
class SessionOptions(Checked):
    """Which sessions to plan for, and the objectives that they have to meet."""

    panel: ClassVar[str] = opt.WORKLOAD
    rate: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Sessions/s to plan for [default: 0.6 on the number of GPUs in the trace's card]."""
    slo: str | None = None
    """Objectives in place of the next two options, as repro capacity takes them: 'ttft:p95:2000 itl:p95:50'."""
    slo_ttft_s: ObjectiveSeconds | None = None
    """TTFT objective [default: the paper's]."""
    slo_itl_s: ObjectiveSeconds | None = None
    """ITL objective [default: the paper's]."""
    trace_path: Path | None = None
    """JSONL of your own sessions, used as they are in place of the generator."""
    num_sessions: Annotated[int, Range(1, 10**5)] | None = None
    """Sessions in the sample [default: 99, more for more GPUs]."""

    def objectives(self, model: str, trace: str) -> Slo:
        from engines.policies.views import Slo
        from repro.capacity.objectives import parse_objectives, tightest

        if self.slo is not None:
            objectives = parse_objectives(self.slo, ("ttft", "tpot", "itl"))
            limits = tightest(objectives, "ttft"), tightest(objectives, "tpot", "itl")
            require(
                (self.slo_ttft_s, self.slo_itl_s) == (None, None)
                and None not in limits
                and [objective.percentile for objective in objectives] == [95, 95],
                f"slo={self.slo!r} must be all the objectives, one of ttft and one of itl at p95: plans are made for these",
            )
            return Slo(ttft_s=limits[0], itl_s=limits[1])  # type: ignore[arg-type]
        published = paper_objectives().get((model, trace))
        ttft_s = self.slo_ttft_s or (published and published.ttft_ms / 1e3)
        itl_s = self.slo_itl_s or (published and published.itl_ms / 1e3)
        missing = "--slo-ttft-s" if ttft_s is None else "--slo-itl-s"
        if ttft_s is None or itl_s is None:
            require(False, f"{model} on {trace} has no published objective: give {missing}, in seconds")
        return Slo(ttft_s=ttft_s, itl_s=itl_s)  # type: ignore[arg-type]

    def workload(self, trace: str, card: SessionCard | None, gpus: int, rate: float) -> SessionWorkloadConfig:
        """Return the sessions of a card, or those of ``trace``, a user's own file or workload."""
        from repro.families.cluster.ampd_settings import SessionKnobs, session_config
        from repro.runs.cell import Cell

        knobs: dict[str, Any] = {} if self.trace_path is None else {"dataset_path": str(self.trace_path)}
        name, num_sessions = named_after(trace), 0
        if card is None:
            knobs["workload"] = trace
        else:
            name, num_sessions = card.name, max(card.paper_sessions, card.paper_sessions * gpus // card.num_gpus)
        cell = Cell(
            system="ampd",
            dataset=name,
            platform="h20x32",
            executor="roofline",
            rate=rate,
            seed=PLAN_SEED,
            knobs=tuple(knobs.items()),
        )
        return session_config(cell, SessionKnobs(num_prompts=self.num_sessions, **knobs), num_sessions=num_sessions)


@dataclass(frozen=True, kw_only=True)
class SolverOptions(Checked):
    panel: ClassVar[str] = opt.ENGINE
    method: str | None = None
    """How to compute coefficients: direct, cached or closed [default: by the number of GPUs]."""
    top: Annotated[int, Range(1, 100)] = 3
    """How many plans to show."""


Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw the answers into this file, .png or .pdf, with a CSV of the same name beside it.",
        rich_help_panel=opt.RUNS,
    ),
]


class PlannedCluster(NamedTuple):
    plans: list[Plan]
    performance: PerformanceModel
    constants: str
    profile_s: float
    plan_s: float


def plan_cluster(
    *,
    options: PlanClusterOptions,
    sample: SessionOptions,
    solver: SolverOptions,
    plot: Plot = None,
    json: opt.Json = False,
) -> None:
    """Find the best deployments by AMPD's planner, with the P95 latencies it expects. Simulated."""
    from repro.families.cluster.ampd_settings import PLANNING_RATE
    from repro.families.cluster.system import shape_named
    from repro.workloads.sessions import load_session_card

    if plot is not None:
        check_plot(plot, options.trace)
    is_own = Path(options.trace).is_file() or place_of(options.trace) is not None
    card, shape = None if is_own else load_session_card(options.trace), shape_named(options.model)
    gpu = card_named(platform_of(options.hardware).gpu if options.hardware in PLATFORMS else options.hardware)
    name = named_after(options.trace) if card is None else card.name
    require(
        card is not None or sample.rate is not None, f"trace={options.trace!r} is planned for at a rate: give --rate"
    )
    require(
        shape not in DIFFUSION,
        f"model={shape.name!r} is a diffusion model and has no prefill and decode workers: use an autoregressive one",
    )
    rate = sample.rate or PLANNING_RATE * options.gpus / (1 if card is None else card.num_gpus)
    options, slo = options.on(gpu, shape), sample.objectives(shape.name, name)
    workload = sample.workload(options.trace, card, options.gpus, rate)
    planned = _solve_plans(options, workload, solver, shape, gpu, rate, slo)
    rows = _cluster_plan_rows(planned.plans, slo, shape.name)
    title = f"{shape.name}, {name if card is None else card.title}, {options.gpus} x {gpu}, {rate:g} sessions/s"
    if plot is not None:
        _save_plans(plot, title, rows, options.obtained)
    if json:
        facts = {
            "constants": planned.constants,
            "solver": "enumeration",
            "performance_model_error": planned.performance.max_error,
            "profile_seconds": planned.profile_s,
            "plan_seconds": planned.plan_s,
            "obtained": options.obtained,
        }
        inputs = {"model": shape.name, "trace": name, "gpus": options.gpus, "hardware": gpu.name, "rate": rate}
        print_json({**inputs, "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}, **facts, "plans": rows})
        return
    _print_plans(f"{title} ({options.obtained})", rows, planned)


def _print_plans(title: str, rows: Sequence[Mapping[str, Any]], planned: PlannedCluster) -> None:
    print_table(title, tuple(CLUSTER_COLUMNS), [tuple(text(row) for text in CLUSTER_COLUMNS.values()) for row in rows])
    say(f"to run the first: {rows[0]['ran']}")
    best = planned.plans[0]
    if best.value > 1:
        say(
            f"no split meets both objectives at P95: the best is {best.value:.3g} times over; lower the rate or add GPUs"
        )
    say(
        f"planned in {planned.plan_s:.2f} s, after {planned.profile_s:.2f} s of profiling (worst fit error "
        f"{100 * planned.performance.max_error:.1f} %)"
    )


def _save_plans(plot: Path, title: str, rows: Sequence[Mapping[str, Any]], obtained: str) -> None:
    bars = [{"label": row["deployment"], **row, "obtained": obtained, "valid": True} for row in rows]
    titles = {f"{metric}_p95_of_slo": f"P95 {metric.upper()}, of its objective" for metric in ("ttft", "itl")}
    say(f"files: {', '.join(map(str, save_plot(plot, title, bars, titles)))}", file=sys.stderr)


def _cluster_plan_rows(plans: Sequence[Plan], slo: Slo, model: str) -> list[dict[str, Any]]:
    from repro.runs.system import options_text

    return [
        {
            "rank": rank,
            "deployment": str(plan.deployment),
            "worst_of_slo": plan.value,
            "ttft_p95_s": plan.prefill.seconds,
            "ttft_p95_of_slo": plan.prefill.of_slo,
            "round_decode_p95_s": plan.decode.seconds,
            "itl_p95_of_slo": plan.decode.of_slo,
            "itl_p95_s": plan.decode.of_slo * slo.itl_s,
            "ran": options_text({"model": model, "num_gpus": plan.deployment.gpus, "deployment": str(plan.deployment)}),
        }
        for rank, plan in enumerate(plans, start=1)
    ]


def _solve_plans(
    options: PlanClusterOptions,
    workload: SessionWorkloadConfig,
    solver: SolverOptions,
    shape: ModelShape,
    card: Gpu,
    rate: float,
    slo: Slo,
) -> PlannedCluster:
    from engines.ampd.planner import PlannerConfig, PlanningWorkload, coefficients, solve
    from repro.families.cluster.ampd_settings import hardware_of, performance_of, profiled_context, sessions_of

    config = PlannerConfig(method=solver.method)  # type: ignore[arg-type]
    path, gpus = workload.trace_path, options.gpus
    with readable("trace-path", None if path is None else Path(path), [options.trace]):
        sample = sessions_of(workload)
    if path is not None or workload.file is not None:
        say(sample.provenance.description, file=sys.stderr)
    hardware = hardware_of(shape, card, options.constants, options.framework)
    degrees = hardware.degrees(min_kv_tokens=max(session.context_tokens for session in sample.sessions))
    require(
        gpus >= 2 * min(degrees),
        f"gpus={gpus} do not hold a prefill and a decode worker of {shape.name}, which takes {min(degrees)} x {card} or "
        f"more each: give at least {2 * min(degrees)}",
    )
    start = time.perf_counter()
    performance = performance_of(hardware, gpus, profiled_context(workload))
    profiled = time.perf_counter()
    planning = PlanningWorkload(sessions=sample.sessions, rate=rate, slo=slo)
    table = coefficients(performance, planning, degrees, gpus, config.method)
    plans = solve(table, gpus, top=solver.top, config=config)
    end = time.perf_counter()
    require(bool(plans), f"gpus={gpus}: no split into prefill and decode workers uses them all, give an even number")
    return PlannedCluster([*plans], performance, hardware.constants.name, profiled - start, end - profiled)


@dataclass(frozen=True, kw_only=True)
class Searched(Checked):
    panel: ClassVar[str] = opt.ENGINE
    num_prompts: Annotated[int, Range(1, 10**5)] | None = None
    """Sessions, or turns, in a run [default: more for more GPUs]."""
    seeds: Annotated[int, Range(1, 20)] | None = None
    """Seeds whose rounds are judged together; all rates and plans use the same ones [default: 3, or 1 with --arrivals trace]. If you give
    3 or more, the command also tells how much answers differ between seeds."""
    resolution: Annotated[float, Range(0.005, 0.5)] = 0.05
    """Relative step between rates: a rate is the answer if the next step up is not served."""


@dataclass(frozen=True, kw_only=True)
class CapacityGoal(Checked):
    panel: ClassVar[str] = opt.WHAT
    workload: str
    """Your requests, sessions or conversations, as a file or module:NAME like in repro bench. Or a trace by name: toolbench, gaia,
    hotpotqa, dureader; for diffusion osc, livebench, burst."""
    columns: str | None = None
    """Which column of the file holds what, as repro bench takes it."""
    time_unit: TimeUnit | None = None
    """Unit of the file's times, if its columns do not tell it: s, ms, us or ns."""
    sort: bool = False
    """Sort the file's rows by their times."""
    arrivals: Literal["poisson", "trace"] = "poisson"
    """poisson, or trace: the file's own times, stretched to the rate."""
    autoscale: Annotated[float, Range(above=0, most=168), Needs(arrivals="trace", rate=None)] | None = None
    """Hours per step. Finds the fewest GPUs that serve the file at its own times, and how many each step needs."""
    slo: str
    """Objectives: metric, percentile and limit in ms, like 'ttft:p95:2000 itl:p95:50'. Metrics of a round: ttft, e2el, itl-request (or
    tpot) for its mean gap between tokens, and itl-gap (or itl) for every gap."""
    gpus: str = "1..64"
    """A number, or a range such as 1..64. For a range without a rate, we answer for its largest number and repeated halves of it."""
    rate: Annotated[float, Range(1e-4, 1e6)] | None = None
    """Sessions/s, or turns/s for prefill systems. Finds the fewest GPUs that serve this rate."""
    system: list[str] | None = None
    """ampd, dynamo-sim, vllm-sim or continuum-sim; laps or a baseline of it; dllm-serve, block-diffusion or another of diffusion; several
    times [default: dynamo-sim, vllm-sim]."""
    platform: list[str] | None = None
    """A card (h20, h100, h200, a100, b200, l40s), h20x32, h200x32, your card's YAML file, or module:NAME; several times [default:
    h200]."""
    dataset_name: str | None = None
    """Data set whose card tells the file's format, if it has its own, and draws what the file lacks [default: none]."""
    model: str | None = None
    """A shape: Qwen3-32B, Llama-3.1-70B, Mixtral-8x7B, Qwen2.5-7B, ..., or a folder with a config.json [default: the platform's]."""
    vary: list[str] | None = None
    """NAME=VALUE,VALUE of a knob, model or platform: tells the rate with each value, all else as in the answer; several times."""
    audit: bool = False
    """Leave out each given knob in turn, and tell which ones change no rate."""
    gpu_price: list[str] | None = None
    """Dollars per GPU hour: 2.5 for all, or PLATFORM=2.5; several times."""

    def prices(self, platforms: Sequence[str]) -> Mapping[str, float]:
        """Return dollars per GPU hour by platform."""
        prices: dict[str, float] = {}
        for word in self.gpu_price or ():
            card, _, text = word.rpartition("=")
            try:
                price = float(text)
            except ValueError:
                price = math.nan
            require(0 < price < 1e6, f"gpu_price={word!r} is no price: write dollars an hour, as 2.5 or h200=2.5")
            require(
                card in ("", *platforms), f"gpu_price={word!r} is of no platform asked for: use {', '.join(platforms)}"
            )
            prices |= dict.fromkeys([card] if card else platforms, price)
        return prices

    def changes(self, knobs: Mapping[str, Any]) -> list[Change]:
        """Return the changes of ``vary``, and with ``audit`` one for leaving out each of the knobs ``knobs``."""
        from repro.capacity.readings import Change

        require(
            not self.audit or bool(knobs), "audit has no effect without a --knob of yours: give one, or leave it out"
        )
        changes = []
        for word in self.vary or ():
            name, equals, values = word.partition("=")
            require(bool(name and equals and values), f"vary={word!r} is no change: write NAME=VALUE,VALUE")
            for text in values.split(","):
                value = text if name == "platform" else opt.parse_knobs([f"{name}={text}"], {})[name]
                changes.append(Change(name=name, value=value))
        return changes + [Change(name=name, value=None) for name in (knobs if self.audit else ())]

    def question(self, charged: opt.Charged, search_options: Searched, knobs: Sequence[str]) -> Question:
        from repro.capacity.question import Question

        settings = opt.given_options(model=self.model) | charged.charged
        return Question(
            systems=self.system or ["dynamo-sim", "vllm-sim"],
            platforms=self.platform or ["h200"],
            workload=self.workload,
            dataset=self.dataset_name,
            file_knobs={
                "columns": self.columns,
                "time_unit": self.time_unit,
                "sort": self.sort or None,
                "arrivals": "trace" if self.arrivals == "trace" else None,
            },
            slo=self.slo,
            knobs=settings | opt.parse_knobs(knobs, settings),
            num_prompts=search_options.num_prompts,
            num_seeds=search_options.seeds or (1 if self.arrivals == "trace" else 3),
        )


Served = Sequence[tuple["Answer", dict[str, Any]]]
"""Answers that have a plan, each with its row."""


def capacity(
    *,
    options: CapacityGoal,
    charged: opt.Charged,
    search_options: Searched,
    knob: opt.KnobTexts = None,
    plot: Plot = None,
    json: opt.Json = False,
) -> None:
    """Find the largest rate that deployments serve under objectives, or the fewest GPUs for a rate. Simulated."""
    from repro.capacity.answers import Search
    from repro.capacity.question import parse_sizes

    sizes, question = parse_sizes(options.gpus), options.question(charged, search_options, knob or ())
    prices = {platform_of(name).name: price for name, price in options.prices(question.platforms).items()}
    objectives = question.objectives()
    if plot is not None:
        check_plot(plot, options.workload, *(options.platform or ()))
    check_regular("workload", Path(options.workload))
    with readable("workload", question.path, [] if options.dataset_name is None else [options.dataset_name]):
        sites = question.sites(sizes)
    changes = options.changes(question.knobs)
    for change in changes:
        change.applied_to(question).sites(sizes)
    rate = options.rate if options.autoscale is None else _rate_of_file(sites[0], options.autoscale)
    search = Search(question=question, sizes=sizes, rate=rate, resolution=search_options.resolution)
    answers = _run_search(search, sites)
    if question.is_given:
        site = answers[0].site
        as_served = replace(site, cell=replace(site.cell, rate=answers[0].rate or site.cell.rate))
        say(as_served.provenance.description, file=sys.stderr)
    rows = [_answer_row(answer, objectives, prices.get(answer.site.cell.platform)) for answer in answers]
    inputs = {
        "workload": options.workload,
        "slo": " ".join(map(str, objectives)),
        "unit": sites[0].unit,
        "seeds": question.num_seeds,
        "arrivals": options.arrivals,
        "resolution": search_options.resolution,
    }
    notes = _capacity_notes(answers, rows, options)
    served = [pair for pair in zip(answers, rows, strict=True) if pair[0].plan is not None]
    decision = _decision_facts(served, search_options.resolution, notes)
    steps = _step_rows(served, sizes, options.autoscale, notes) if options.autoscale is not None else []
    if (search_options.seeds or 0) >= FEWEST_SEEDS and rate is None:
        notes += _margin_notes(served, search_options.resolution)
    effects = _effect_rows(question, served, changes, search_options.resolution, notes) if changes else []
    if json:
        print_json({**inputs, "answers": rows, "decides": decision, "effects": effects, "notes": notes})
    else:
        _print_answers(rows, inputs, sites[0].hardware()[0].name, objectives)
        _print_readings(steps, effects)
        for line in notes:
            say(line)
    if plot is not None and rows:
        title = f"{Path(options.workload).name}: {inputs['slo']}"
        files = _draw_readings(plot, title, steps, effects) or save_capacity_plot(
            plot, title, rows, sites[0].unit, rate is not None
        )
        say(f"files: {', '.join(map(str, files))}", file=sys.stderr)


def _run_search(search: Search, sites: Sequence[Site]) -> list[Answer]:
    """Run the search. Prints on stderr beforehand how long it takes, and afterwards what it tried."""
    from repro.capacity.readings import estimate_runs

    estimate, start = estimate_runs(search, sites), time.perf_counter()
    prompts = " to ".join(f"{num:,}" for num in dict.fromkeys(estimate.num_prompts))
    unit = sites[0].unit.partition("/")[0]
    runs = f"some {estimate.likely:,} simulations of {prompts} {unit}, at most {estimate.most:,}"
    say(f"search: {runs}, about {estimate.seconds:.0f} s", file=sys.stderr)
    with progress_bar("deployments") as advance:
        answers = search.answers(sites, advance)
    plans, runs = (sum(getattr(answer, name) for answer in answers) for name in ("num_simulated", "num_runs"))
    say(
        f"search: {count_text(plans, 'plan')} tried in {count_text(runs, 'run')}, {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
    )
    return answers


def _decision_facts(served: Served, resolution: float, notes: list[str]) -> dict[str, Any]:
    """Find which choice makes the best answer beat the next system on as many GPUs of the card, or else its own next best. Adds a
    sentence to ``notes``."""
    from repro.capacity.readings import choices_of

    if not served:
        return {"runs": 0, "choices": []}
    (answer, row), *others = served
    platform, best = answer.site.cell.platform, answer.rate or 0.0
    comparable = [other for other, _ in others if other.site.cell.platform == platform and other.gpus == answer.gpus]
    rival = next((other for other in comparable if other.site.cell.system != answer.site.cell.system), None)
    next_best = None if answer.next_best is None else answer.next_best[0]
    choices, runs = choices_of(answer, next_best if rival is None else rival.plan, resolution)
    choice_rows = [
        {"chosen": _extras(each.chosen, each.instead), "instead": _extras(each.instead, each.chosen), "rate": each.rate}
        for each in choices
    ]
    if sentence := _decision_text(best, choice_rows, rival):
        notes.append(f"{row['system']} on {row['gpus']} x {row['platform']} {sentence}")
    versus = None if rival is None else {"system": rival.site.title, "rate": rival.rate}
    return {"system": row["system"], "versus": versus, "runs": runs, "choices": choice_rows}


def _extras(setting: Setting, other: Setting) -> str:
    """The pairs of a setting that the other setting lacks."""
    from repro.runs.system import setting_text

    pairs = setting_text(tuple(pair for pair in setting if pair not in other))
    return pairs or " and ".join(f"{name} by default" for name, _ in other if name not in dict(setting))


def _decision_text(best: float, choices: Sequence[Mapping[str, Any]], rival: Answer | None) -> str | None:
    """A sentence about the choice that costs most, with the rival that it beats; None if no choice decides."""
    rival_rate = best if rival is None or rival.rate is None else rival.rate
    ahead = "" if rival is None else f"is ahead of {rival.site.title}"
    if not choices or choices[0]["rate"] >= best:
        text = "each choice made as by default serves as much, so the systems themselves decide"
        return f"{ahead}: {text}" if rival_rate < best else None
    choice = choices[0]
    effect = f"with {choice['instead']} it serves {choice['rate']:.4g} /s"
    if rival is None or rival_rate >= best:
        return f"serves {best:.4g} /s mostly because of {choice['chosen']}: {effect}"
    rival_serves = f"and {rival.site.title} {rival_rate:.4g} /s"
    if choice["rate"] < rival_rate:
        return f"{ahead} because of {choice['chosen']}: {effect}, {rival_serves}"
    return f"{ahead} by no one choice: {choice['chosen']} is worth most, but {effect}, {rival_serves}"


def _print_readings(steps: Sequence[Mapping[str, str]], effects: Sequence[Mapping[str, Any]]) -> None:
    if steps:
        print_table("GPUs by step", tuple(steps[0]), [tuple(step.values()) for step in steps])
    if effects:
        cells = [
            (*[str(row[name]) for name in EFFECT], _plan_text(row), number(row["rate"], 3), number(row["percent"]))
            for row in effects
        ]
        print_table("With one change, all else held", (*EFFECT, "plan", "rate /s", "% of as asked"), cells)


def _draw_readings(
    plot: Path, title: str, steps: Sequence[Mapping[str, str]], effects: Sequence[Mapping[str, Any]]
) -> tuple[Path, Path] | None:
    """Draw the effects as points about a line at the rate as asked (a tornado), or the GPUs of steps as bars. None without either."""
    if effects:
        rows = [{name: value for name, value in row.items() if name != "cell"} for row in effects]
        bars = [{"label": " ".join(str(row[name]) for name in EFFECT), **row, "valid": True} for row in rows]
        return save_plot(plot, title, bars, {"percent": "% of the rate as asked"}, {"percent": 100})
    if not steps:
        return None
    columns = list(steps[0])[3:]
    hours = [
        {"label": f"from {row['from h']} h", **{name: int(row[name]) if row[name] != "-" else None for name in columns}}
        for row in steps
    ]
    plotted = [{**row, "obtained": "simulated", "valid": True} for row in hours]
    return save_plot(plot, title, plotted, {name: f"GPUs: {name}" for name in columns})


def _rate_of_file(site: Site, hours: float) -> float:
    """Return sessions/s at the file's own times."""
    from repro.capacity.sites import ClusterSite

    rate = site.file_rate if isinstance(site, ClusterSite) else None
    if rate is None:
        raise UserError(f"autoscale={hours:g} needs sessions of a file whose times differ: leave it out, or give one")
    return rate


def _step_rows(served: Served, sizes: Sizes, hours: float, notes: list[str]) -> list[dict[str, str]]:
    """Add to the rows what each step needs, and to ``notes`` how much that saves. Returns the rows of a table by step."""
    from repro.capacity.readings import needs_by_step

    table: dict[float, dict[str, str]] = {}
    for answer, row in served:
        steps = needs_by_step(answer, sizes.fitting(answer.site), hours)
        label = f"{row['system']}, {row['platform']}"
        fixed = answer.gpus * math.fsum(step["hours"] for step in steps)
        in_steps = math.fsum((step["gpus"] or answer.gpus) * step["hours"] for step in steps)
        row |= {"steps": steps, "fixed_gpu_hours": fixed, "stepped_gpu_hours": in_steps}
        largest = max(step["gpus"] or answer.gpus for step in steps)
        notes.append(
            f"{label}: {count_text(answer.gpus, 'GPU')} all the time: {fixed:.4g} GPU h; steps of {hours:g} h, each within the objectives by "
            f"itself: {in_steps:.4g} ({100 * (1 - in_steps / fixed):.0f} % fewer), with {count_text(largest, 'GPU')} in the largest"
        )
        for step in steps:
            line = table.setdefault(
                step["begin_h"],
                {
                    "from h": f"{step['begin_h']:g}",
                    "sessions": str(step["sessions"]),
                    "sessions/s": f"{step['rate']:.3g}",
                },
            )
            line[label] = "-" if step["gpus"] is None else str(step["gpus"])
    return list(table.values())


FEWEST_SEEDS = 3
"""The fewest seeds that give an interval."""


def _margin_notes(served: Served, resolution: float) -> list[str]:
    """Compare the best rate per number of GPUs with the others: ratios with intervals over seeds. Adds rates by seed to rows."""
    from repro.capacity.readings import rates_by_seed
    from repro.runs.statistics import paired_ratio

    best: dict[int, dict[str, Any]] = {}
    notes = []
    for answer, row in served:
        row["rate_by_seed"] = rates_by_seed(answer, resolution)
        first = best.setdefault(answer.gpus, row)
        ratio = paired_ratio(first["rate_by_seed"], row["rate_by_seed"])
        if first is not row and ratio.mean is not None:
            ends = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.3g}, {ratio.high:.3g}]"
            pair = [f"{entry['system']} on {entry['gpus']} x {entry['platform']}" for entry in (first, row)]
            notes.append(
                f"{pair[0]} serves {ratio.mean:.3g}{ends} times what {pair[1]} does (95 %, {count_text(ratio.n, 'seed')})"
            )
    return notes


EFFECT = ("system", "platform", "gpus", "change")


def _effect_rows(
    question: Question, served: Served, changes: Sequence[Change], resolution: float, notes: list[str]
) -> list[dict[str, Any]]:
    """Return a row for each change of each answer. Adds to ``notes`` which changes had no effect."""
    from repro.capacity.readings import answers_with_changes

    effects = []
    for answer, _ in served:
        with progress_bar("changes") as advance:
            baseline, *variants = answers_with_changes(question, answer, changes, resolution, advance)
        rows: list[dict[str, Any]] = []
        for change, variant in zip((None, *changes), (baseline, *variants), strict=True):
            percent = 100 * (variant.rate or 0.0) / baseline.rate if baseline.rate else None
            rows.append(
                {"change": variant.site.label, "percent": percent, **_answer_row(variant, question.objectives(), None)}
            )
            if change is not None and (variant.rate, variant.at) == (baseline.rate, baseline.at):
                label = f"{rows[-1]['system']} on {rows[-1]['platform']}"
                text = f"{change.name} changed no number, without it the rate is the same"
                notes.append(f"{label}: {text if change.value is None else f'{change} changed no number'}")
        effects += sorted(rows, key=lambda row: -abs((row["percent"] or 0) - 100))
    return effects


def _plan_text(row: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (row["plan"] or "none", row["schedule"])))


def _answer_row(answer: Answer, objectives: Sequence[Objective], price: float | None) -> dict[str, Any]:
    """``price`` is in dollars per GPU hour."""
    site, plan, verdict = answer.site, answer.plan, answer.at
    goodput = None if verdict is None or answer.rate is None else answer.rate * verdict.session_attainment
    hours = answer.gpus / (3.6 * goodput) if goodput else None
    row: dict[str, Any] = {
        "system": site.title,
        "platform": site.cell.platform.rpartition(":")[2].lower(),
        "gpus": answer.gpus,
        "plan": None if plan is None else plan.name,
        "schedule": None if plan is None else plan.schedule or None,
        "rate": answer.rate,
        "attainment": None if verdict is None else verdict.attainment,
        "session_attainment": None if verdict is None else verdict.session_attainment,
        "goodput": goodput,
        "gpu_hours_per_1000_good": hours,
        "dollars_per_1000_good": None if hours is None or price is None else hours * price,
    }
    for goal in objectives:
        row[f"{goal.metric}_p{goal.percentile:g}_s"] = None if verdict is None else verdict.values[str(goal)]
    cell = None if plan is None or answer.rate is None else site.cell_of(plan, answer.rate, 0)
    return row | {
        "longest_ttft_s": None if verdict is None else verdict.longest_s,
        "binds": answer.binds,
        "arrivals_over_stay": None if verdict is None or math.isinf(verdict.stays) else verdict.stays,
        "num_prompts": site.cell.knob_values["num_prompts"],
        "is_monotone": answer.is_monotone,
        "plans": answer.num_plans,
        "simulated_plans": answer.num_simulated,
        "runs": answer.num_runs,
        "obtained": site.obtained,
        "ran": None if cell is None else _options_text(cell, site.hardware()[0]),
        "next_best": answer.next_best and {"plan": _plan_name(answer.next_best[0]), "rate": answer.next_best[1]},
        "cell": cell and cell.written(),
    }


def _plan_name(plan: CapacityPlan) -> str:
    return " ".join(filter(None, (plan.name, plan.schedule)))


def _options_text(cell: Cell, shape: ModelShape) -> str:
    """A cell's settings written as options, without those that the question sets."""
    from repro.capacity.sites import SET_HERE
    from repro.runs.system import options_text, settings_of

    shown = {"deployment", "num_gpus", "num_instances"}
    names = {name for kind in settings_of(cell.system) for name in knobs_of(kind)}
    defaults = {"model": shape.name, "precision": shape.precision} if "precision" in names else {}
    requested = {name: value for name, value in cell.requested.items() if name in shown or name not in SET_HERE}
    return options_text(defaults | requested)


def _print_answers(
    rows: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any], model: str, objectives: Sequence[Objective]
) -> None:
    columns: dict[str, list[str]] = {
        "system": [row["system"] for row in rows],
        "card": [row["platform"] for row in rows],
        "GPUs": [str(row["gpus"]) for row in rows],
        "plan": [_plan_text(row) for row in rows],
        "rate /s": ["-" if row["rate"] is None else f"{row['rate']:.4g}" for row in rows],
        "met %": [number(row["session_attainment"], scale=100) for row in rows],
        "good /s": ["-" if row["goodput"] is None else f"{row['goodput']:.4g}" for row in rows],
        "GPU h /1000": [number(row["gpu_hours_per_1000_good"], 3) for row in rows],
        "$ /1000": [number(row["dollars_per_1000_good"], 3) for row in rows],
    }
    if {*columns["$ /1000"]} == {"-"}:
        del columns["$ /1000"]
    for objective in objectives:
        name = f"{objective.metric}_p{objective.percentile:g}"
        columns[f"{objective.metric.upper()} p{objective.percentile:g} ms"] = [
            number(row[f"{name}_s"], 0, scale=1e3) for row in rows
        ]
    columns["longest wait s"] = [number(row["longest_ttft_s"], 2) for row in rows]
    # The title tells the limit, so leave it out here.
    binds = [(row["binds"] or "-").split(":") for row in rows]
    columns["binds"] = [f"{name[0].upper()} {name[1]}" if len(name) > 1 else name[0] for name in binds]
    obtained = ", ".join(sorted({row["obtained"] for row in rows}))
    title = (
        f"{model}, {Path(inputs['workload']).name}: {inputs['slo']}; {inputs['unit']} within {100 * inputs['resolution']:g} %, "
        f"{count_text(inputs['seeds'], 'seed')} ({obtained})"
    )
    print_table(title, tuple(columns), list(zip(*columns.values(), strict=True)))
    for row in rows:
        if row["ran"]:
            say(f"{row['system']} on {row['gpus']} x {row['platform']} ran: {row['ran']}")


def _capacity_notes(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]], options: CapacityGoal) -> list[str]:
    """Tell how the answers were found, and what is doubtful about them."""
    from repro.capacity.sites import LASTING

    plans, simulated, runs = (sum(row[name] for row in rows) for name in ("plans", "simulated_plans", "runs"))
    notes = [f"{count_text(plans, 'plan')}, {simulated} of them simulated, in {count_text(runs, 'run')}"]
    bursts = {}
    for answer, row in zip(answers, rows, strict=True):
        label = f"{row['system']} on {row['gpus']} x {row['platform']}"
        if answer.plan is None:
            target = "any rate" if options.rate is None else f"{options.rate:g} {answer.site.unit}"
            detail = f" ({row['binds']} is beyond its limit at the lowest)" if row["binds"] else ""
            notes.append(f"{label}: no plan serves {target} within the objectives{detail}")
        elif (row["arrivals_over_stay"] or LASTING) < LASTING:
            bursts[label] = (
                row["arrivals_over_stay"],
                math.ceil(row["num_prompts"] * LASTING / row["arrivals_over_stay"]),
            )
        if answer.next_best is not None and answer.plan is not None:
            detail = f"next best {_plan_name(answer.next_best[0])} {answer.next_best[1]:.4g} /s"
            notes.append(f"{label}: {detail}")
        if not answer.is_monotone:
            notes.append(f"{label}: a fifth less is not served, so the rate is no capacity: add seeds or requests")
    unlimited = {
        name for answer in answers if answer.at is not None for name, value in answer.at.values.items() if value is None
    }
    notes += [f"{name} limits nothing: no answer has a second token" for name in sorted(unlimited)]
    percentile = min(objective.percentile for objective in answers[0].site.objectives)
    missed = {
        f"{100 * row['session_attainment']:.3g} % of {row['system']} on {row['gpus']} x {row['platform']}"
        for row in rows
        if row["session_attainment"] is not None and round(100 * row["session_attainment"], 1) < percentile
    }
    if missed:
        notes.append(
            f"percentiles are of rounds, or of gaps, so fewer {answers[0].site.unit.partition('/')[0]} keep every limit themselves: "
            f"{', '.join(sorted(missed))}"
        )
    if bursts:
        detail = ", ".join(f"{label} {times:.1f}" for label, (times, _) in bursts.items())
        num_prompts = max(num for _, num in bursts.values())
        remedy = "" if options.arrivals == "trace" else f": --num-prompts {num_prompts} mends it"
        notes.append(
            f"arrivals last fewer than {LASTING} times as long as a session ({detail}), so these rates are bursts' and too high{remedy}"
        )
    return notes
