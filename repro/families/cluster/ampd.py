"""AMPD, its planner (AMPD §5, App. A.2), and the systems that we compare it with: from a cell to a deployment, its policies and its sessions."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from baselines.ar.dynamo import DynamoConfig, dynamo
from baselines.ar.vllm import ContinuumConfig, VllmConfig, continuum, vllm
from engines.ampd.planner import Method, PlannerConfig, PlanningWorkload, coefficients, default_method, solve
from engines.ampd.policies import AdaptiveRouter, RoutingConfig, best_ordering
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster.hardware import Deployment
from engines.cluster.prefix import possible_reuse
from engines.cluster.record import ClusterRun, rows_of
from engines.cluster.sessions import OpenLoop
from engines.cluster.simulation import Cluster, StopRule
from engines.errors import require
from engines.knobs import Checked, Range, conditions_of, knobs_of
from engines.policies.batching import LateShare
from engines.policies.own import BINDER, QUEUE, ROUTER
from engines.policies.views import NO_OBJECTIVE_S, PrefillTask, WorkerSnapshot
from repro.families.cluster.ampd_record import AR, tables_of
from repro.families.cluster.ampd_settings import ClusterKnobs, ClusterSettings, Ground, resolve, sessions_of
from repro.families.cluster.deployments import PLANNER, SEARCH, best_plans, parse_deployment, replicated, splits
from repro.families.cluster.system import PolicyDeployment, PolicySystem
from repro.families.cost import DECODES, PREFILLS, Phase
from repro.families.platforms import ArPart, Platform, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.family import Family, metrics_in
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Obtained, OnProgress, RunRecord, empty_table
from repro.runs.system import CARDS, PAPER, SYSTEMS
from repro.runs.tuning import CANDIDATES, Tuned
from repro.workloads.card import add_note
from repro.workloads.sessions import SessionWorkload

POLICIES = (ROUTER, BINDER, QUEUE)
RAN = ("scheduling", "max_num_batched_tokens", "max_num_seqs", "balance", "dispatch", "conditional", "prefix_cache")
"""Knobs of systems whose values tables list for each run."""
REPLACED = {
    "router": (*knobs_of(RoutingConfig), "adaptive_routing", "dispatch"),
    "queue": ("prefill_reordering", "queue_order", "w", *knobs_of(LateShare)),
}


@dataclass(frozen=True, kw_only=True)
class ClusterPolicies:
    router: str | None = None
    """Your own router as module:NAME, made for every run. It can take model, slo and seed."""
    binder: str | None = None
    """Your own binder as module:NAME, which decides where a new session lives, made for every run. It can take model, slo and seed."""
    queue: str | None = None
    """Your own order of waiting prefills as module:NAME: a PrefillQueue, made for every worker. It can take slo."""


_MOST_LIVE_SESSIONS = 20_000
"""With more live sessions than this, arrivals outrun the cluster. We then give the run up, and its record says so."""


@dataclass(frozen=True, kw_only=True)
class ClusterDeployment(PolicyDeployment[ClusterSettings]):
    """A system on a cluster, for one cell. It plans only when it runs: planning may need simulations, which the seeds of a cell share."""

    @property
    def how(self) -> str:
        """planner, search, or a deployment as text."""
        default: str = self.system.deployment
        return default if self.settings.knobs.deployment is None else self.settings.knobs.deployment

    def check(self) -> None:
        """Raise UserError for a deployment that cannot exist, without planning one."""
        settings, ground, how = self.settings, self.settings.ground, self.how
        name, is_disaggregated = self.system.name, self.system.is_disaggregated
        degrees = ground.hardware.degrees()
        smallest = min(degrees)
        if how in (PLANNER, SEARCH):
            require(
                how == SEARCH or is_disaggregated,
                f"deployment={PLANNER!r} plans prefill and decode workers and system={name!r} has none apart: use "
                f"{SEARCH}, or write TP8x2",
            )
            # Any deployment will do, so that wrong options show now.
            deployment = Deployment.colocated(smallest, 1)
            if is_disaggregated:
                deployment = Deployment.disaggregated(smallest, 1, smallest, 1)
            require(
                ground.num_gpus >= deployment.gpus,
                f"num_gpus={ground.num_gpus} do not hold {settings.model}, which takes {deployment.gpus} GPUs of "
                f"{settings.platform.gpu} here: give more",
            )
        else:
            deployment = parse_deployment(how)
            require(
                bool(deployment.prefill) or not is_disaggregated,
                f"deployment={how!r} has no prefill workers, which system={name!r} needs: write P:TP4x2 D:TP8x1",
            )
            require(
                not deployment.prefill or is_disaggregated,
                f"deployment={how!r} has prefill workers and system={name!r} is co-located: write TP8x2",
            )
            require(
                deployment.gpus <= ground.num_gpus,
                f"deployment={how!r} takes {deployment.gpus} GPUs and num_gpus={ground.num_gpus}: give it fewer or them more",
            )
        self.system.build(settings, deployment)
        for pool in (*deployment.prefill, *deployment.decode):
            require(
                pool.degree in degrees,
                f"deployment={how!r} has workers of {pool.degree} GPUs: use degrees of {', '.join(map(str, degrees))}",
            )

    def cluster(self) -> Cluster:
        settings = self.settings
        if self.how == PLANNER:
            (best,) = best_plans(settings.ground, settings.planning_rate)
        deployment = best.deployment if self.how == PLANNER else parse_deployment(self.how)
        cluster: Cluster = self.system.build(settings, deployment)
        return cluster

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        settings, ground, cluster = self.settings, self.settings.ground, self.cluster()
        run = cluster.simulate(
            OpenLoop(sessions=workload.sessions),
            seed=self.cell.seed,
            stop=StopRule(max_live_sessions=_MOST_LIVE_SESSIONS),
        )
        facts = {
            "ran": {"model": settings.model, "deployment": str(cluster.deployment), **_steps_of(settings)},
            "deployment": str(cluster.deployment),
            "planned_for": settings.planning_rate if self.how == PLANNER else None,
            "options": self.options,
            "num_gpus": ground.num_gpus,
            "gpus_used": cluster.deployment.gpus,
            "slo": {
                name: None if limit_s == NO_OBJECTIVE_S else limit_s
                for name, limit_s in (("ttft_s", ground.slo.ttft_s), ("itl_s", ground.slo.itl_s))
            },
            "attainment_reading": str(ground.reading),
            "constants": ground.hardware.constants.name,
            "performance_model_error": ground.performance.max_error,
            "is_transient": settings.knobs.transient,
            **_estimates(settings, run),
            **run.facts,
            **prefix_facts(settings, workload, run),
        }
        return self.record(
            tables_of(run),
            model=settings.model,
            calibration=settings.cost_text,
            platform=settings.platform.cluster_title,
            provenance=workload.provenance,
            facts=facts,
        )


def _steps_of(settings: ClusterSettings) -> dict[str, Scalar]:
    """The knobs by which workers fill their steps and sessions find workers, without those that have no effect."""
    values = vars(settings.own)
    idle = {name for name, condition in conditions_of(type(settings.own)) if condition.unmet(values) is not None}
    effective = {name: values[name] for name in RAN if values.get(name) is not None and name not in idle}
    return {"precision": settings.ground.hardware.shape.precision, **effective}


def _estimates(settings: ClusterSettings, run: ClusterRun) -> dict[str, Any]:
    """How much of a composed run's times is estimated, weighed by what its workers did."""
    hardware = settings.ground.hardware
    seconds: Counter[tuple[Phase, int]] = Counter()
    for degree, prefill_s, decode_s in rows_of(run.workers, "degree", "busy_prefill_s", "busy_decode_s"):
        seconds[PREFILLS, degree] += prefill_s
        seconds[DECODES, degree] += decode_s
    history, tokens = (np.asarray(run.tasks[name], dtype=np.int64) for name in ("history", "tokens"))
    pairs = float((tokens * (history + 0.5 * (tokens + 1))).max()) if len(tokens) else 0.0
    context = max(map(sum, rows_of(run.sessions, "prefill_tokens", "decode_tokens")), default=0)
    return settings.knobs.charged.estimates(hardware.gpu, hardware.shape, seconds, pairs, context)


def prefix_facts(settings: ClusterSettings, workload: SessionWorkload, run: ClusterRun) -> dict[str, Any]:
    """How many prompt tokens the prefix caches saved, if the sessions say which tokens they share. Otherwise empty, or the reason."""
    if settings.unused_prefixes is not None:
        messages = [f"prompts that begin alike are computed anew: {settings.unused_prefixes}"]
        warnings = {} if hasattr(settings.own, "prefix_cache") else {"warnings": messages}
        return {"prefix_cache": {"is_used": False, "why": settings.unused_prefixes}, **warnings}
    if not settings.workload.with_prefixes:
        return {}
    size = settings.own.block_size
    prompt_tokens = computed = 0
    for kind, history, tokens, num_computed in rows_of(run.tasks, "kind", "history", "tokens", "computed_tokens"):
        if kind != "recompute" and num_computed is not None:
            prompt_tokens += history + tokens
            computed += num_computed
    facts = {
        "is_used": True,
        "block_size": size,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": prompt_tokens - computed,
        "reuse": (prompt_tokens - computed) / prompt_tokens if prompt_tokens else None,
        "possible_reuse": possible_reuse(workload.sessions, size),
        "evicted_tokens": sum(evicted or 0 for evicted in run.workers["kv_evicted"]),
    }
    return {"prefix_cache": facts}


@dataclass(frozen=True, kw_only=True)
class ArSystem(PolicySystem):
    """An autoregressive system. ``build`` makes the cluster from a run's settings and a deployment."""

    family: ClassVar[Family] = AR
    replaced = REPLACED
    run_knobs = ClusterKnobs
    is_disaggregated: bool
    deployment: str
    """The default deployment: ``planner`` or ``search``."""

    def place_of(self, cell: Cell) -> str:
        """Which table of free settings applies: the paper's or that of cards (repro.runs.tuning)."""
        return PAPER if platform(cell.platform).part(ArPart).schedules == "paper" else CARDS

    def default_dataset(self, target: Platform) -> str:
        return target.part(ArPart).trace

    def prepare(self, cell: Cell) -> tuple[ClusterDeployment | Tuned, SessionWorkload]:
        """Raises every UserError that a user can cause."""
        settings = resolve(cell, self)
        workload = _workload(settings, cell)
        deployment = ClusterDeployment(cell=cell, settings=settings)
        deployment.check()
        if deployment.how != SEARCH:
            return deployment, workload
        searched = replace(cell.without("deployment"), figure=None, rate=settings.knobs.planning_rate or cell.rate)
        return Tuned(cell=searched, default=deployment), workload

    def reseeded(self, deployment: ClusterDeployment | Tuned, cell: Cell) -> tuple[Any, SessionWorkload] | None:
        """Like ``prepare``, of a cell that differs in its seed alone from the one that ``deployment`` was prepared for. None if the
        sessions come from a user's file, whose times may depend on the seed."""
        if isinstance(deployment, Tuned):
            prepared = self.reseeded(deployment.default, cell)  # type: ignore[arg-type]
            return prepared and (
                replace(deployment, cell=deployment.cell.with_seed(cell.seed), default=prepared[0]),
                prepared[1],
            )
        settings = deployment.settings
        if settings.workload.file is not None:
            return None
        settings = replace(settings, workload=replace(settings.workload, seed=cell.seed))
        own_cell = deployment.cell.with_seed(cell.seed)
        return ClusterDeployment(cell=own_cell, settings=settings), _workload(settings, cell)


def _workload(settings: ClusterSettings, cell: Cell) -> SessionWorkload:
    """Raises UserError if a session does not fit a worker."""
    workload = sessions_of(settings.workload)
    if settings.workload.file is not None:
        absent = [name for name in ("slo_ttft_s", "slo_itl_s") if name not in cell.requested]
        if absent:
            workload = replace(workload, provenance=add_note(workload.provenance, f"no objective: {', '.join(absent)}"))
    hardware = settings.ground.hardware
    capacity = max(hardware.kv_capacity(degree) for degree in hardware.degrees())
    require(
        workload.longest_tokens <= capacity,
        f"dataset={workload.name!r} has a session of {workload.longest_tokens} tokens and a worker of {settings.model} "
        f"holds {capacity}: shorten it, or {'use a larger GPU' if hardware.kv_tokens is None else 'raise kv_tokens'}",
    )
    return workload


def _ground(cell: Cell) -> Ground:
    system = SYSTEMS.get(cell.system)
    assert isinstance(system, ArSystem)
    return resolve(cell, system).ground


def all_splits(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """the 16 splits of all GPUs with the least worst phase by closed forms, the even one among them"""
    return tuple({"deployment": str(deployment)} for deployment in splits(_ground(cell), CANDIDATES))


def all_replicated(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """replicas of every degree that holds the longest session"""
    return tuple({"deployment": str(deployment)} for deployment in replicated(_ground(cell)))


@dataclass(frozen=True, kw_only=True)
class AmpdKnobs(AmpdConfig, ClusterPolicies):
    pass


def build_ampd(settings: ClusterSettings, deployment: Deployment) -> Cluster:
    ground, policies = settings.ground, settings.policies
    cluster = ampd(ground.hardware, deployment, ground.slo, ground.performance, settings.own)
    facts = {"model": ground.performance, "slo": ground.slo}
    changes: dict[str, Any] = {}
    for plugin in policies.values():
        # Each run makes its policies. We make them once here, so that wrong ones show before any run.
        plugin.make_checked(**facts, seed=0)
    if (router := policies.get("router")) is not None:
        changes["make_router"] = lambda seed: router.make(**facts, seed=seed)
    if (binder := policies.get("binder")) is not None:
        changes["make_binder"] = partial(binder.make, **facts)
    if (queue := policies.get("queue")) is not None:
        changes["make_prefill_queue"] = changes["make_local_queue"] = partial(queue.make, **facts)
    cluster = replace(cluster, policies=replace(cluster.policies, **changes))
    if router is None:
        cluster.policies.make_router(0)
    cluster.policies.make_prefill_queue()
    return cluster


def build_dynamo(settings: ClusterSettings, deployment: Deployment) -> Cluster:
    ground = settings.ground
    cluster = dynamo(ground.hardware, deployment, ground.performance, settings.own)
    cluster.policies.make_router(0)
    return _with_shared_blocks(settings, cluster)


def build_vllm(settings: ClusterSettings, deployment: Deployment) -> Cluster:
    return _with_shared_blocks(settings, vllm(settings.ground.hardware, deployment, settings.own))


def _with_shared_blocks(settings: ClusterSettings, cluster: Cluster) -> Cluster:
    """The cluster with workers that share blocks, if the sessions say which. Prefill workers then keep caches of their own."""
    if not settings.workload.with_prefixes:
        return cluster
    policies = replace(cluster.policies, block_size=settings.own.block_size, history="own-cache")
    return replace(cluster, policies=policies)


AMPD = ArSystem(
    name="ampd",
    title="AMPD",
    own=AmpdKnobs,
    build=build_ampd,
    is_disaggregated=True,
    deployment=PLANNER,
    policies=POLICIES,
)
DYNAMO_SIM = ArSystem(
    name="dynamo-sim", title="Dynamo", own=DynamoConfig, build=build_dynamo, is_disaggregated=True, deployment=SEARCH
)
VLLM_SIM = ArSystem(
    name="vllm-sim", title="vLLM", own=VllmConfig, build=build_vllm, is_disaggregated=False, deployment=SEARCH
)
CONTINUUM_SIM = ArSystem(
    name="continuum-sim",
    title="vLLM-Continuum",
    own=ContinuumConfig,
    build=lambda settings, deployment: continuum(settings.ground.hardware, deployment, settings.own),
    is_disaggregated=False,
    deployment=SEARCH,
)


# -- the planner ------------------------------------------------------------------------------------------

# The planner is also a system of its own: the deployments it ranks and, on request, the seconds it takes. It plans for the cell's rate.
# The cell's seed chooses the sample of sessions. Plans that serve a workload use the sample of seed 0.

_MOST_GPUS = 4096
"""The most GPUs that we plan for. It exceeds the platform's own number, because plans of large clusters are of interest."""
MOST_PLANS = 100
"""A limit, because each further plan is one more program to solve."""
NUM_DECISIONS = 2000
"""How many decisions we time, for the router and for the queue each."""


@dataclass(frozen=True, kw_only=True)
class PlannerKnobs(Checked):
    top: Annotated[int, Range(1, MOST_PLANS)] = 3
    """How many plans to rank."""
    method: Method | None = None
    """How the program is solved. By default the number of GPUs decides."""
    timed: bool = False
    """Measure how long the planner and its policies take."""


PLANNING = Family(
    name="planning", serves=False, metrics=metrics_in(Path(__file__).with_name("metrics.csv"), "planning", {})
)


@dataclass(frozen=True, kw_only=True)
class Planning(PolicyDeployment[ClusterSettings]):
    """A run of the planner. It profiles the hardware before the clock starts, because profiling is not planning."""

    @property
    def basis(self) -> str:
        return hashlib.sha256(repr((self.settings.basis, PlannerConfig())).encode()).hexdigest()[:12]

    @property
    def obtained(self) -> Obtained:
        return "measured" if self.settings.own.timed else self.settings.obtained

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        knobs: PlannerKnobs = self.settings.own
        ground, rate = self.settings.ground, self.cell.rate
        assert rate is not None, "refused where it was asked for"
        hardware, model = ground.hardware, ground.performance
        degrees = hardware.degrees(min_kv_tokens=workload.longest_tokens)
        demand = PlanningWorkload(sessions=workload.sessions, rate=rate, slo=ground.slo)
        start = time.process_time()
        table = coefficients(model, demand, degrees, ground.num_gpus, knobs.method)
        middle = time.process_time()
        candidates = solve(table, ground.num_gpus, top=knobs.top)
        end = time.process_time()
        plans = [
            {
                "deployment": str(plan.deployment),
                "worst_of_slo": plan.value,
                "ttft_p95_s": plan.prefill.seconds,
                "itl_p95_s": plan.decode.of_slo * ground.slo.itl_s,
                "round_decode_p95_s": plan.decode.seconds,
            }
            for plan in candidates
        ]
        seconds: dict[str, float | None] = dict.fromkeys(("coefficients_s", "solve_s", "routing_s", "ordering_s"))
        if knobs.timed:
            seconds |= {"coefficients_s": middle - start, "solve_s": end - middle, **_decisions(ground)}
        return RunRecord(
            tables={REQUESTS: empty_table(REQUEST_COLUMNS)},
            manifest={
                "obtained": self.obtained,
                "calibration": self.settings.cost_text,
                "dataset": asdict(workload.provenance),
                "model": hardware.shape.name,
                "facts": {
                    **seconds,
                    "plans": plans,
                    "num_gpus": ground.num_gpus,
                    "method": knobs.method or default_method(ground.num_gpus),
                    "solver": "enumeration" if candidates else None,
                    "performance_model_error": model.max_error,
                },
            },
        )


def _decisions(ground: Ground) -> dict[str, float]:
    """Seconds of one decision in its slowest case: no worker has slack, and the first prefill of three is late."""
    router = AdaptiveRouter(ground.performance, ground.slo)
    late_s, over_s = 2 * ground.slo.ttft_s, 2 * ground.slo.itl_s
    degree = max(ground.hardware.degrees())
    busy = [
        WorkerSnapshot(worker_id=index, degree=degree, ttft_s=late_s, backlog_s=float(index)) for index in range(1, 9)
    ]
    home = WorkerSnapshot(worker_id=0, degree=degree, itl_s=over_s)
    tasks = [
        PrefillTask(index, index, index, 1, "incremental", 1000, 500, 0.0, estimate_s=0.2 * (index + 1))
        for index in range(3)
    ]
    return {
        "routing_s": _seconds_per_call(lambda: router.route(tasks[0], home, busy, 1.0)),
        "ordering_s": _seconds_per_call(lambda: best_ordering(tasks, 0.7, 1.0, 3)),
    }


def _seconds_per_call(call: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(NUM_DECISIONS):
        call()
    return (time.process_time() - start) / NUM_DECISIONS


@dataclass(frozen=True, kw_only=True)
class Planner(PolicySystem):
    family: ClassVar[Family] = PLANNING
    run_knobs = ClusterKnobs

    def prepare(self, cell: Cell) -> tuple[Planning, SessionWorkload]:
        settings = resolve(cell, self, most_gpus=_MOST_GPUS)
        require(cell.rate is not None, "request_rate=inf: the planner needs a number of sessions/s")
        given = cell.requested
        for name in ("deployment", "transient", "planning_rate"):
            require(
                name not in given, f"{name}={given.get(name)!r} has no effect with system={self.name!r}: leave it out"
            )
        ground = settings.ground
        smallest = min(ground.hardware.degrees())
        require(
            ground.num_gpus >= 2 * smallest,
            f"num_gpus={ground.num_gpus} do not hold a prefill and a decode worker of {settings.model}: give at least {2 * smallest}",
        )
        return Planning(cell=cell, settings=settings), ground.sampled(cell.seed, rate=cell.rate)


AMPD_PLANNER = Planner(name="ampd-planner", title="AMPD's planner", own=PlannerKnobs)
PLANNER_SYSTEM = "repro.systems.ar.planning:AMPD_PLANNER"
"""The name of this system in cells, including stored ones. It was the module's first path (``repro.runs.system``)."""
