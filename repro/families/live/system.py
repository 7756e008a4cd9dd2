"""AMPD on live workers: from a cell to processes and their sessions."""

import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from engines.ampd.live.intake import Deciding, Limits
from engines.ampd.live.store import RedisServer, Store, client_of, load_redis, redis_program, without_password
from engines.ampd.performance import PerformanceModel, Piecewise
from engines.ampd.system import AmpdConfig
from engines.cluster.hardware import Deployment
from engines.cluster.record import prefill_load, rows_of
from engines.errors import UserError, require
from engines.knobs import Checked, Range, with_knobs
from engines.knobs import resolve as resolve_knobs
from engines.models.qwen2_config import CausalConfig, read_causal_config, tiny_causal
from engines.policies.routing import LeastKvMemory
from engines.policies.views import PrefillQueue, Slo
from repro.families.cluster.ampd import POLICIES, REPLACED, ClusterPolicies
from repro.families.cluster.ampd_record import AR, ROUNDS, round_ttft_s, slo_attainment, tables_of
from repro.families.cluster.ampd_settings import DEFAULT_READING, Objective, SessionKnobs, session_config
from repro.families.cluster.deployments import parse_deployment
from repro.families.cluster.system import PolicyDeployment, PolicySettings, user_policies
from repro.families.live.over_dynamo import Direct, Front, OverDynamo, seen_by_client
from repro.families.platforms import platform
from repro.runs.cell import Cell
from repro.runs.family import Compute, Family, distribution, metrics_in, summary_in, window_s, without_nan
from repro.runs.provenance import why_not_importable
from repro.runs.record import REQUESTS, Obtained, OnProgress, RunRecord
from repro.workloads.served import workload_knobs
from repro.workloads.sessions import SessionWorkload, SessionWorkloadConfig, build_sessions

if TYPE_CHECKING:
    from engines.ampd.live.fleet import Fleet
    from engines.ampd.live.profile import LiveProfile
    from engines.cluster.record import ClusterRun

TINY = "tiny"
_TINY_CONFIG = tiny_causal(d_model=256, n_layers=8)
"""A Qwen2 of 8 M parameters with random weights. It is large enough that a step's work outweighs its overheads."""
_PREFILL, _LINE = (
    Piecewise(knees=(), pieces=(piece,), mean_error=0.0, max_error=0.0)
    for piece in ((1e-2, 1e-4, 1e-8, 1e-6), (1e-3, 1e-5))
)
_UNMEASURED = PerformanceModel(prefill={1: _PREFILL}, decode={1: _LINE}, transfer={(1, 1): _LINE}, decode_context=1)
"""A placeholder for the workers' measured profile, with which we make a user's policies once before we start workers."""
MAX_WORKERS = 16
_NUM_SESSIONS = 20


@dataclass(frozen=True, kw_only=True)
class LiveKnobs(SessionKnobs, ClusterPolicies, Checked):
    model: str = TINY
    """tiny, or a checkpoint's folder."""
    deployment: str = "P:TP1x1 D:TP1x1"
    """Workers as P:TP1x1 D:TP1x1. Ask for no more workers than the machine has cores."""
    frontend: Literal["dynamo"] | None = None
    """dynamo: send requests over HTTP to Dynamo's frontend, with the coordinator as its router. By default we call the coordinator."""
    redis: str | None = None
    """The address of a running Redis server; by default one is started."""
    kv_tokens: Annotated[int, Range(1, 10**7)] = 32768
    """Tokens of K/V that each worker can hold."""
    lease_s: Annotated[float, Range(0.5, 600)] = 5.0
    """Seconds after which a silent worker's work goes to another."""
    pin: bool = False
    """Pin each worker to a core of its own."""
    slo_ttft_s: Objective = 0.5
    """Objective of the time to the first token, in seconds."""
    slo_itl_s: Objective = 0.05
    """Objective of the time between tokens, in seconds."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings(PolicySettings):
    own: AmpdConfig
    knobs: LiveKnobs
    deployment: Deployment
    workload: SessionWorkloadConfig
    obtained: ClassVar[Obtained] = "measured"

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.knobs.slo_ttft_s, itl_s=self.knobs.slo_itl_s)

    @property
    def num_homes(self) -> int:
        return sum(pool.replicas for pool in self.deployment.decode)

    @property
    def num_prefills(self) -> int:
        return sum(pool.replicas for pool in self.deployment.prefill)

    @property
    def roles(self) -> dict[int, str]:
        """The role of each worker by id. Homes (decode workers) come first, as in a simulation."""
        roles = dict.fromkeys(range(self.num_homes), "decode")
        return roles | dict.fromkeys(range(self.num_homes, self.num_homes + self.num_prefills), "prefill")

    @property
    def config(self) -> str | CausalConfig:
        return _TINY_CONFIG if self.knobs.model == TINY else self.knobs.model

    @property
    def vocab_size(self) -> int:
        config = self.config
        return (config if isinstance(config, CausalConfig) else read_causal_config(Path(config))).vocab_size


def _basis(model: str, slo: Slo) -> str:
    """A digest of model, objectives and Redis scripts (without comments), on which the numbers depend besides Python and workload."""
    texts = [(files("engines.ampd.live") / name).read_text() for name in ("state.lua", "operations.lua")]
    scripts = [[line for line in text.splitlines() if not line.lstrip().startswith("--")] for text in texts]
    text = repr((_TINY_CONFIG if model == TINY else model, slo, DEFAULT_READING, scripts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve(cell: Cell, system: str) -> LiveSettings:
    """The settings of a cell. Raises UserError for all that a user can get wrong."""
    target = platform(cell.platform)
    require(
        cell.executor == target.executor == "torch" and target.gpu is None,
        f"platform={target.name!r}, executor={cell.executor!r}: system={system!r} runs workers on this machine's cores, use "
        "cpu-tiny and torch",
    )
    requested = cell.requested
    plugins = user_policies(requested, POLICIES, REPLACED)
    plugged = (plugin.knobs for plugin in plugins.values())
    knobs = resolve_knobs(LiveKnobs, requested, AmpdConfig, *plugged, workload_knobs(requested), system=system)
    slo = Slo(ttft_s=knobs.slo_ttft_s, itl_s=knobs.slo_itl_s)
    for plugin in plugins.values():
        module, _, name = plugin.where.partition(":")
        if plugin.kind.name == "queue" or knobs.frontend is not None:
            reason = why_not_importable(module, name, is_remote=plugin.kind.name != "queue")
            require(reason is None, f"{plugin.kind.name}={plugin.where!r} {reason}")
        plugin.make_checked(model=_UNMEASURED, slo=slo, seed=cell.seed)
    deployment = parse_deployment(knobs.deployment)
    pools = (*deployment.prefill, *deployment.decode)
    require(
        all(pool.degree == 1 for pool in pools) and sum(pool.replicas for pool in pools) <= MAX_WORKERS,
        f"deployment={str(deployment)!r}: live workers have degree 1 and are at most {MAX_WORKERS}: write P:TP1x1 D:TP1x1",
    )
    require(bool(deployment.prefill), f"deployment={str(deployment)!r} has no prefill workers: write P:TP1x1 D:TP1x1")
    require(
        knobs.frontend is None or knobs.model == TINY or (Path(knobs.model) / "tokenizer.json").is_file(),
        f"model={knobs.model!r} has no tokenizer.json, which frontend={knobs.frontend!r} reads: give a checkpoint's folder with one",
    )
    return LiveSettings(
        platform=target,
        own=with_knobs(AmpdConfig(), requested),
        policies=plugins,
        basis=_basis(knobs.model, slo),
        knobs=knobs,
        deployment=deployment,
        workload=session_config(cell, knobs, num_sessions=_NUM_SESSIONS),
    )


def workers_lived(record: RunRecord) -> Iterator[str]:
    facts = record.facts
    if lost := facts["lost_workers"]:
        roles = facts["roles"]
        names = ", ".join(f"{roles[str(worker)]} worker {worker}" for worker in lost)
        yield f"{names} died or fell silent: what was measured is less than {facts['deployment']}"


def goodput(record: RunRecord) -> float | None:
    share = slo_attainment(record)
    is_of_rounds = record.facts["attainment_reading"].startswith("round/")
    counted = record.tables[ROUNDS]["round"] if is_of_rounds else record.requests["status"]
    seconds = window_s(record)
    return None if share is None or seconds is None else round(share * len(counted)) / seconds


_METRICS: Mapping[str, Compute] = {
    "round_ttft_s": lambda record: distribution(without_nan(round_ttft_s(record))),
    "input_len": lambda record: distribution(record.tables[ROUNDS]["prefill_tokens"]),
    "output_len": lambda record: distribution(record.tables[ROUNDS]["decode_tokens"]),
    "lost_workers": lambda record: len(record.facts["lost_workers"]),
    "goodput": goodput,
}
LIVE = replace(
    AR,
    name="live",
    metrics=(*AR.metrics, *metrics_in(Path(__file__).with_name("metrics.csv"), "live", _METRICS)),
    checks=(*AR.checks, workers_lived),
    shown=summary_in(Path(__file__).with_name("summary.csv"), "live"),
)
"""The family of live systems. ITL is the 95th percentile of a round's gaps, TPOT their mean. Both are averaged over rounds."""


_START_S = 300.0
ANSWER_S = 2.0
"""Seconds in which a user's own Redis server must answer."""
MAX_LEN = 4096
_NUM_SLOTS = 128


@dataclass(frozen=True, kw_only=True)
class LiveDeployment(PolicyDeployment[LiveSettings]):
    front: Front
    is_tied_here: ClassVar[bool] = True

    @property
    def basis(self) -> str:
        return f"{self.settings.basis}{self.front.basis}"

    def check_machine(self) -> None:
        """Raise UserError unless there are a Redis client and, either running or installed, a Redis server."""
        load_redis()
        if self.settings.knobs.redis is None:
            redis_program()
        else:
            url = self.settings.knobs.redis
            try:
                with client_of(url, ANSWER_S) as client:
                    client.ping()
            except (load_redis().RedisError, OSError) as error:
                raise UserError(
                    f"redis={without_password(url)!r} does not answer ({error}): start it, or correct the address"
                ) from None
        self.front.check_machine()

    def run(self, workload: SessionWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        from engines.ampd.live.coordinator import random_prompts
        from engines.ampd.live.decisions import replay
        from engines.ampd.live.profile import profile_live
        from engines.ampd.live.record import answers, collect

        self.check_machine()
        settings, sessions = self.settings, workload.sessions
        prompts = random_prompts(settings.vocab_size, self.cell.seed)
        with self._fleet() as (store, fleet, url):
            profile = profile_live(store, settings.roles, prompts, on_turn=lambda ended: fleet.check())
            deciding = Deciding(
                url=url,
                prefix=store.prefix,
                **self._policies(profile),
                estimator=profile.performance,
                window_s=settings.own.window_s,
                lease_s=settings.knobs.lease_s,
            )
            served = self.front.serve(deciding, sessions, prompts, store, fleet)
            losses, ended = store.losses(), fleet.exit_codes
            fleet.stop()  # with which workers report for the last time
            started_s, mark, end_s = served.began, served.mark, served.end_s
            run = collect(store, sessions, started_s, settings.roles, {"end_s": end_s}, since=mark)
            replayed = replay(
                store.log()[mark.decision :], **self._policies(profile), make_queue=lambda worker: self._make_queue()
            )
            ids = [answers(store, session) for session in sessions]
            simulated = compared(run, self._simulated(profile, workload))
            client_facts = None
            if served.exchanges is not None:
                run, client_facts = seen_by_client(served.exchanges, run, store)
            store.clear()
        facts = {
            "deployment": str(settings.deployment),
            "roles": {str(worker): role for worker, role in settings.roles.items()},
            "slo": {"ttft_s": settings.slo.ttft_s, "itl_s": settings.slo.itl_s},
            "attainment_reading": str(DEFAULT_READING),
            "is_transient": settings.knobs.transient,
            "end_s": end_s,
            "stop_reason": None,
            **prefill_load(rows_of(run.workers, "role", "busy_prefill_s"), max(run.sessions["arrival_s"])),
            "decisions": {**replayed.decisions, "not_made_again": len(replayed.mismatches)},
            "answers": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12],
            # The store has not yet missed a worker that died within a lease of the end.
            "lost_workers": [*losses.workers, *sorted({*ended} - {*losses.workers})],
            "prefills_taken_back": losses.num_taken_back,
            "profile": _facts_of_profile(profile),
            "simulated": simulated,
        }
        if client_facts is not None:
            facts["frontend"] = {**served.facts, **client_facts}
        manifest: dict[str, Any] = {"model": settings.knobs.model, "calibration": None, "platform": "this CPU"}
        record = self.record(tables_of(run), provenance=workload.provenance, facts=facts, **manifest)
        return record.with_columns(REQUESTS, submit_lag_s=served.lags_s)

    @contextmanager
    def _fleet(self) -> "Iterator[tuple[Store, Fleet, str]]":
        """Start the workers. Yield their store, the fleet, and the address of their Redis."""
        from engines.ampd.live.fleet import Fleet
        from engines.ampd.live.worker import WorkerSpec

        settings, prefix = self.settings, f"{{ampd:{uuid.uuid4().hex[:12]}}}"
        with ExitStack() as stack:
            url = settings.knobs.redis
            if url is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ampd-redis-"))
                url = stack.enter_context(RedisServer(Path(folder))).url
            store = Store.connect(url, prefix)
            store.call("create", settings.own.window_s)
            cores = sorted(os.sched_getaffinity(0))
            specs = [
                WorkerSpec(
                    worker_id=worker,
                    role=role,  # type: ignore[arg-type]
                    url=url,
                    prefix=prefix,
                    model=settings.config,
                    make_queue=self._make_queue,
                    num_tokens=settings.knobs.kv_tokens,
                    max_len=MAX_LEN,
                    num_slots=_NUM_SLOTS,
                    lease_s=settings.knobs.lease_s,
                    core=cores[worker % len(cores)] if settings.knobs.pin else None,
                )
                for worker, role in settings.roles.items()
            ]
            assert len(specs) <= MAX_WORKERS
            with Fleet(specs, store, start_s=_START_S) as fleet:
                yield store, fleet, url

    @property
    def _make_queue(self) -> Callable[[], PrefillQueue]:
        settings = self.settings
        make = settings.own.make_queue if (plugin := settings.policies.get("queue")) is None else plugin.make
        return partial(make, slo=settings.slo)

    def _policies(self, profile: "LiveProfile") -> dict[str, Any]:
        """A new router and binder: a user's own, else AMPD's."""
        settings = self.settings
        makes: dict[str, Callable[..., Any]] = {
            "router": settings.own.make_router,
            "binder": lambda **_: LeastKvMemory(),
            **{kind: plugin.make for kind, plugin in settings.policies.items() if kind != "queue"},
        }
        facts = {"model": profile.performance, "slo": settings.slo, "seed": self.cell.seed}
        return {kind: make(**facts) for kind, make in makes.items()}

    def _simulated(self, profile: "LiveProfile", workload: SessionWorkload) -> "ClusterRun":
        from engines.ampd.live.profile import simulate_live

        settings = self.settings
        return simulate_live(
            profile,
            workload.sessions,
            num_homes=settings.num_homes,
            num_prefills=settings.num_prefills,
            **self._policies(profile),
            estimator=profile.performance,
            make_queue=self._make_queue,
            kv_capacity=settings.knobs.kv_tokens,
            window_s=settings.own.window_s,
        )


def _facts_of_profile(profile: "LiveProfile") -> dict[str, Any]:
    fits = {"prefill_remote": profile.remote, "prefill_local": profile.local, "transfer": profile.transfer}
    return {
        **{name: {"mean_error": fit.mean_error, "max_error": fit.max_error} for name, fit in fits.items()},
        "decode": asdict(profile.decode),
        "dispatch_s": profile.dispatch_s,
        "prefill_100_s": profile.performance.prefill_s(0, 100, 1),
        "transfer_1000_s": profile.performance.transfer_s(1000, 1, 1),
    }


def compared(run: "ClusterRun", simulated: "ClusterRun") -> dict[str, dict[str, float]]:
    """Latencies as measured, and as the simulator predicts them from the workers' profile. The error is predicted / measured - 1."""
    import numpy as np

    from engines.cluster.record import observe

    latencies = {}
    views = [observe(side) for side in (run, simulated)]
    for name, latency_of in (
        ("ttft_s", lambda seen: seen.ttft_s),
        ("ttft_initial_s", lambda seen: seen.ttft_s[seen.round_index == 0]),
        ("ttft_incremental_s", lambda seen: seen.ttft_s[seen.round_index > 0]),
        ("itl_s", lambda seen: seen.round_itl_s["mean"]),
        ("itl_p95_s", lambda seen: seen.round_itl_s["p95"]),
        ("e2el_s", lambda seen: seen.e2el_s),
    ):
        for stat, reduce in (("mean", np.nanmean), ("p50", np.nanmedian), ("p90", partial(np.nanquantile, q=0.9))):
            values = [latency_of(view) for view in views]
            if all(np.isfinite(sample).any() for sample in values):
                measured, predicted = (float(reduce(sample)) for sample in values)
                latencies[f"{name} {stat}"] = {
                    "measured": measured,
                    "predicted": predicted,
                    "error": predicted / measured - 1,
                }
    local = [float(np.mean(view.is_local)) for view in views]
    latencies["local_share"] = {"measured": local[0], "predicted": local[1], "error": local[1] - local[0]}
    return latencies


class LiveSystem:
    name = "ampd-live"
    title = "AMPD live"
    knobs = (LiveKnobs, AmpdConfig)
    family: ClassVar[Family] = LIVE

    def prepare(self, cell: Cell) -> tuple[LiveDeployment, SessionWorkload]:
        settings = resolve(cell, self.name)
        workload = build_sessions(settings.workload)
        longest = max(session.context_tokens for session in workload.sessions)
        max_len = min(MAX_LEN, settings.knobs.kv_tokens)
        require(
            longest < max_len,
            f"dataset={workload.name!r} has a session of {longest} tokens and a live worker holds {max_len}: shorten it",
        )
        front: Front = Direct()
        if settings.knobs.frontend is not None:
            front = OverDynamo(
                limits=Limits(vocab_size=settings.vocab_size, max_len=max_len),
                tokenizer=None if settings.knobs.model == TINY else Path(settings.knobs.model),
            )
        return LiveDeployment(cell=cell, settings=settings, front=front), workload


AMPD_LIVE = LiveSystem()
