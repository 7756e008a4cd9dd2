"""vLLM: co-located replicas with continuous batching and a prefix cache; and vLLM-Continuum on top of it."""

from __future__ import annotations

from typing import Literal, get_args

from engines.ar.cluster.batching import Batching, Chunked, PrefillFirst
from engines.ar.cluster.cluster import Cluster, Hardware, Policies
from engines.ar.cluster.policy import Binder, FewestSessions, LeastKvMemory, RoundRobin
from engines.ar.cluster.queue import PrefillQueue
from engines.ar.deployment import Deployment
from engines.ar.task import PrefillTask
from engines.errors import UserError, require

Scheduling = Literal["prefill-first", "chunked"]
"""prefill-first: whole prompts go before decoding and hold it up. chunked: decodes come along in every step, with
prompts in pieces of what is left of the token budget."""
Balance = Literal["memory", "sessions", "round-robin"]
"""Which replica a new session goes to, for life, so that its prefix cache serves all its rounds."""

CHUNK_TOKENS = 2048
PREFILL_TOKENS = 8192
KEEP_S = 10.0
"""Time-to-live of K/V between the rounds of a session; the paper gives none."""


class InFlightFirst(PrefillQueue):
    """Rounds of sessions that have begun go before new sessions; first come, first served among each (AMPD §7.2)."""

    def __init__(self) -> None:
        super().__init__()
        self._num_in_flight = 0

    def push(self, task: PrefillTask) -> None:
        if task.kind == "initial":
            super().push(task)
            return
        self._tasks.insert(self._num_in_flight, task)
        self._num_in_flight += 1
        self._count(task)

    def take(self, now: float) -> PrefillTask:
        self._num_in_flight = max(0, self._num_in_flight - 1)
        return super().take(now)


def vllm(
    hardware: Hardware,
    deployment: Deployment,
    *,
    scheduling: Scheduling = "prefill-first",
    max_num_batched_tokens: int | None = None,
    balance: Balance = "memory",
) -> Cluster:
    """``max_num_batched_tokens`` None is 8192 for whole prompts and 2048 for chunks."""
    return _colocated("vllm", hardware, deployment, scheduling, max_num_batched_tokens, balance, keep_s=None)


def continuum(
    hardware: Hardware,
    deployment: Deployment,
    *,
    scheduling: Scheduling = "prefill-first",
    max_num_batched_tokens: int | None = None,
    balance: Balance = "memory",
    keep_s: float = KEEP_S,
) -> Cluster:
    """Sessions in flight first, and their K/V protected from eviction for ``keep_s`` after each round."""
    require(keep_s >= 0, f"keep_s={keep_s} must not be negative")
    return _colocated("vllm-continuum", hardware, deployment, scheduling, max_num_batched_tokens, balance, keep_s)


def _colocated(
    name: str,
    hardware: Hardware,
    deployment: Deployment,
    scheduling: Scheduling,
    max_num_batched_tokens: int | None,
    balance: Balance,
    keep_s: float | None,
) -> Cluster:
    require(not deployment.prefill, f"deployment={deployment}: {name} is co-located, give no prefill workers")
    if scheduling not in get_args(Scheduling):
        raise UserError(f"scheduling={scheduling!r} is unknown: use one of {', '.join(get_args(Scheduling))}")
    binders: dict[Balance, type[Binder]] = {
        "memory": LeastKvMemory,
        "sessions": FewestSessions,
        "round-robin": RoundRobin,
    }
    if balance not in binders:
        raise UserError(f"balance={balance!r} is unknown: use one of {', '.join(binders)}")
    is_chunked = scheduling == "chunked"
    tokens = max_num_batched_tokens
    if tokens is None:
        tokens = CHUNK_TOKENS if is_chunked else PREFILL_TOKENS
    batching: Batching = (Chunked if is_chunked else PrefillFirst)(max_num_batched_tokens=tokens)
    return Cluster(
        name=name,
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_binder=binders[balance],
            make_local_queue=PrefillQueue if keep_s is None else InFlightFirst,
            local_batching=batching,
            keep_s=keep_s or 0.0,
        ),
    )
