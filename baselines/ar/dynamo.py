"""NVIDIA Dynamo: disaggregation without AMPD's techniques, and with Dynamo's own conditional disaggregation.

The paper's Dynamo always separates the phases (§7.1). Newer versions of Dynamo can run a prefill on the decode worker. The rules below
follow the documentation of version 1.6.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal, get_args

from baselines.ar.vllm import BINDERS, Balance, SharedPrefixes
from engines.cluster.hardware import Deployment, Hardware
from engines.cluster.policies import HistoryRead, Policies
from engines.cluster.simulation import Cluster
from engines.errors import require
from engines.knobs import Only, Range, Tokens
from engines.policies.batching import ONE_BY_ONE, Chunked
from engines.policies.routing import Decision, Dispatch, Estimator, KvCost, RemoteOnly, Router
from engines.policies.views import DecodeView, PrefillTask, PrefillView, Rule

_BypassPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]
_Affinity = Literal["prefix", "cost", "none"]
_CONDITIONAL = Only(conditional=get_args(_BypassPolicy))
Level = Annotated[float, Range(0, 1e6)]


@dataclass(frozen=True, kw_only=True)
class DynamoConfig(SharedPrefixes):
    """Dynamo's settings; those of ``--router-conditional-disagg-config`` have its defaults, and are off by default."""

    on_cards: ClassVar[Mapping[str, str]] = {"scheduling": "chunked", "balance": "round-robin"}
    """Defaults on a card: vLLM 0.15's steps, and the frontend's usual ``--router-mode``."""
    balance: Annotated[Balance, Only(dispatch=get_args(Dispatch))] = "memory"
    """Which decode worker a new session goes to, for life; on a card round-robin by default, like Dynamo's frontend."""
    dispatch: Literal[Dispatch, "kv-aware"] = "shortest"
    """Which prefill worker gets a prefill. kv-aware is Dynamo's cost for workers that only prefill: the fewest tokens queued, running and
    its own, without those that the worker caches. Its decode worker is then the one with the fewest tokens in use or to come."""
    history_read: HistoryRead = "overlapped"
    """How prefill workers get a history. overlapped: from its decode worker, during the prefill before; serial: after it; own-cache: from
    their own prefix cache, and what it lacks is prefilled again."""
    affinity: Annotated[_Affinity, Only(history_read="own-cache", dispatch=get_args(Dispatch))] = "prefix"
    """Among which workers dispatch chooses. prefix: those with the longest cached prefix of the session; cost: those with the fewest
    uncached tokens to prefill, queued and its own; none: all of them."""
    conditional: Annotated[_BypassPolicy | None, Only(dispatch=get_args(Dispatch))] = None
    """When a prefill stays on the decode worker: if it is short (isl_bounding), if prefill workers are busy (prefill_load), or either
    (isl_or_load); never by default."""
    eff_isl_threshold: Annotated[int, Range(0, 10**6), _CONDITIONAL] = 2048
    """Tokens to prefill beyond the decode worker's prefix cache; a prefill with fewer may stay."""
    eff_isl_ratio_threshold: Annotated[float, Range(0, 1), _CONDITIONAL] = 0.7
    """Share of the whole prompt to prefill; a prefill with a smaller one may stay."""
    prefill_busy_threshold: Annotated[Level | None, _CONDITIONAL] = None
    """Batches of prefill tokens at the chosen prefill worker; above this a prefill stays, never by default."""
    decode_busy_threshold: Annotated[Level | None, _CONDITIONAL] = None
    """Share of the decode worker's K/V memory; above this no prefill stays, and by default there is no such limit."""
    scheduling: Literal["one-by-one", "chunked"] = "one-by-one"
    """How prefill workers fill a step. chunked: as many prompts as the token budget holds, the last in part. This is how vLLM 0.15, on
    which Dynamo runs, does it, and the default on a card. one-by-one: one whole prompt, the default on h20x32 and h200x32."""
    max_num_batched_tokens: Annotated[Tokens, Only(scheduling="chunked")] = 8192
    """Tokens of a step of chunked prefills, and of one batch of prefill tokens; 2048 on cards below 70 GiB and A100."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.conditional in (None, "isl_bounding") or self.prefill_busy_threshold is not None,
            f"conditional={self.conditional!r} needs prefill_busy_threshold: give it in batches of prefill tokens",
        )


@dataclass(frozen=True, kw_only=True)
class KvAware:
    """Restricts a router to the workers whose cached prefixes of the session fit best."""

    router: Router
    affinity: _Affinity

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        costs = [self._cost(worker, task) for worker in prefills]
        lowest = min(costs, default=0)
        cheapest = [worker for worker, cost in zip(prefills, costs, strict=True) if cost == lowest]
        return self.router.route(task, home, cheapest, now)

    def _cost(self, worker: PrefillView, task: PrefillTask) -> int:
        """Tokens to prefill on this worker, up to a constant."""
        if self.affinity == "none":
            return 0
        queued = worker.backlog_tokens if self.affinity == "cost" else 0
        return queued - worker.cached_tokens(task.order)


class ConditionalRouter:
    """Keeps a prefill on the decode worker if the policy says so and the decode worker is not too full."""

    def __init__(self, config: DynamoConfig, *, seed: int = 0) -> None:
        assert config.dispatch != "kv-aware", "which knows no bypass"
        self._remote = RemoteOnly(config.dispatch, seed=seed)
        self._short_tokens = 0 if config.conditional == "prefill_load" else config.eff_isl_threshold
        self._short_share = config.eff_isl_ratio_threshold
        threshold = None if config.conditional == "isl_bounding" else config.prefill_busy_threshold
        self._busy_tokens = math.inf if threshold is None else threshold * config.max_num_batched_tokens
        self._full_share = math.inf if config.decode_busy_threshold is None else config.decode_busy_threshold

    def rule(self) -> Rule:
        limits = self._short_tokens, self._short_share, self._busy_tokens, self._full_share
        return self._remote.rule()._replace(kind="conditional", limits=limits)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        worker = self._remote.pick(prefills, now)
        reason = self._bypass_reason(task, worker)
        if reason is not None and home.kv_tokens + task.tokens <= self._full_share * home.kv_capacity:
            return Decision(home.worker_id, True, reason)
        return Decision(worker.worker_id, False, "remote")

    def _bypass_reason(self, task: PrefillTask, worker: PrefillView) -> str | None:
        prompt = task.history + task.tokens
        if task.tokens < self._short_tokens and task.tokens < self._short_share * prompt:
            return "short"
        return "prefill-busy" if worker.backlog_tokens > self._busy_tokens else None


def dynamo(
    hardware: Hardware, deployment: Deployment, estimator: Estimator, config: DynamoConfig | None = None
) -> Cluster:
    """Dynamo's cluster: first come, first served, decode workers chosen by K/V in use. By default history reads overlap like AMPD's."""
    config = config or DynamoConfig()
    require(
        bool(deployment.prefill),
        f"deployment={deployment}: Dynamo needs prefill workers here, see vllm for co-location",
    )
    is_shared = config.dispatch == "shared"
    is_chunked = config.scheduling == "chunked"
    batching = Chunked(max_num_batched_tokens=config.max_num_batched_tokens) if is_chunked else ONE_BY_ONE
    return Cluster(
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_router=lambda seed: _router(config, seed),
            make_binder=partial(KvCost, overlap_weight=0.0)
            if config.dispatch == "kv-aware"
            else BINDERS[config.balance],
            prefill_batching=batching,
            local_batching=batching,
            estimator=estimator,
            shares_prefill_queue=is_shared,
            # A task in a shared queue belongs to no worker until one is free.
            history="serial" if is_shared and config.history_read == "overlapped" else config.history_read,
            keeps=config.prefix_cache,
        ),
    )


def _router(config: DynamoConfig, seed: int) -> Router:
    if config.dispatch == "kv-aware":
        return KvCost()
    is_plain = config.conditional is None
    router = RemoteOnly(config.dispatch, seed=seed) if is_plain else ConditionalRouter(config, seed=seed)
    if config.history_read != "own-cache":
        return router
    return KvAware(router=router, affinity=config.affinity)
