"""vLLM: co-located replicas with continuous batching and a prefix cache. vLLM-Continuum builds on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from engines.cluster.hardware import Deployment, Hardware
from engines.cluster.simulation import Cluster, Policies
from engines.errors import require
from engines.knobs import Checked, Count, Only, Seconds, Tokens
from engines.policies.batching import CHUNK_TOKENS, Chunked, PrefillFirst
from engines.policies.routing import (
    Binder,
    FewestSessions,
    KvCost,
    LeastKvMemory,
    OverlapWeight,
    PromptBinder,
    RoundRobin,
)
from engines.policies.views import Batching, PrefillQueue, PrefillTask, Rule

Scheduling = Literal["prefill-first", "chunked"]
Balance = Literal["memory", "sessions", "round-robin"]
BLOCK_SIZE = 16
"""Tokens of a block of K/V in vLLM."""

_PREFILL_TOKENS = 8192
MAX_NUM_SEQS = 256


class InFlightFirst(PrefillQueue):
    """Puts rounds of sessions that have begun before new sessions, each first come, first served (AMPD §7.2)."""

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

    def rule(self) -> Rule:
        return Rule("queue", limits=(0, 0.0, True))

    def take(self, now: float) -> PrefillTask:
        self._num_in_flight = max(0, self._num_in_flight - 1)
        return super().take(now)


@dataclass(frozen=True, kw_only=True)
class Colocated(Checked):
    """How replicas batch."""

    on_cards: ClassVar[Mapping[str, str]] = {"scheduling": "chunked", "balance": "sessions"}
    """Defaults on a card are vLLM 0.15's. Its data-parallel engines take the one with fewest requests (vllm/v1/engine/core_client.py)."""
    scheduling: Scheduling | None = None
    """chunked: each step holds all decodes, and pieces of prompts in the rest of the token budget. This is vLLM 0.15's way, and the
    default on a card. prefill-first: whole prompts go before decoding and delay it; the default on h20x32 and h200x32."""
    max_num_batched_tokens: Tokens | None = None
    """Tokens of a step; by default those of vLLM 0.15's server: 8192 with 70 GiB or more, 2048 on smaller cards and A100. On h20x32 and
    h200x32 the default is 8192 for whole prompts and 2048 for chunks."""
    max_num_seqs: Count | None = None
    """Requests that a replica serves at once; by default vLLM 0.15's: 1024 if steps have 8192 tokens, else 256."""


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes(Checked):
    """The prefix cache of a worker."""

    prefix_cache: bool = True
    """Keep K/V after a round for prompts that begin alike: the session's next round, and other sessions if hash_ids or system_prompts say
    what they share."""
    block_size: Annotated[Tokens, Only(prefix_cache=True)] = BLOCK_SIZE
    """Tokens of the blocks that sessions share. It must divide the blocks of hash_ids, or they divide it."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(Colocated, SharedPrefixes):
    balance: Literal[Balance, "kv-aware"] = "memory"
    """Which replica a new session goes to. It stays there, so that its prefix cache serves all its rounds; on a card by default the one
    with the fewest sessions. kv-aware uses Dynamo's cost: overlap_weight x blocks to prefill + blocks in use."""
    overlap_weight: Annotated[OverlapWeight, Only(balance="kv-aware")] = 1.0
    """Weight of the blocks to prefill, without those that the cache holds."""


@dataclass(frozen=True, kw_only=True)
class ContinuumConfig(Colocated):
    balance: Balance = "memory"
    """Which replica a new session goes to. It stays there, so that its prefix cache serves all its rounds; on a card by default the one
    with the fewest sessions."""
    keep_s: Seconds = 10.0
    """How long a session's K/V stays between its rounds; the paper gives no time."""


def vllm(hardware: Hardware, deployment: Deployment, config: VllmConfig | None = None) -> Cluster:
    config = config or VllmConfig()
    least_cost = partial(KvCost, overlap_weight=config.overlap_weight)
    make_binder = BINDERS.get(config.balance, least_cost)
    return _colocated("vllm", hardware, deployment, config, make_binder, keep_s=None, keeps=config.prefix_cache)


def continuum(hardware: Hardware, deployment: Deployment, config: ContinuumConfig | None = None) -> Cluster:
    """vLLM-Continuum: begun sessions go first, and their K/V is protected from eviction for ``keep_s`` after each round."""
    config = config or ContinuumConfig()
    return _colocated("vllm-continuum", hardware, deployment, config, BINDERS[config.balance], keep_s=config.keep_s)


BINDERS: Mapping[str, type[Binder]] = {"memory": LeastKvMemory, "sessions": FewestSessions, "round-robin": RoundRobin}


def _colocated(
    name: str,
    hardware: Hardware,
    deployment: Deployment,
    config: Colocated,
    make_binder: Callable[[], Binder | PromptBinder],
    *,
    keep_s: float | None,
    keeps: bool = True,
) -> Cluster:
    require(not deployment.prefill, f"deployment={deployment}: {name} is co-located, give no prefill workers")
    is_chunked = config.scheduling == "chunked"
    tokens = config.max_num_batched_tokens or (CHUNK_TOKENS if is_chunked else _PREFILL_TOKENS)
    batching: Batching = (Chunked if is_chunked else PrefillFirst)(
        max_num_batched_tokens=tokens, max_num_seqs=config.max_num_seqs or MAX_NUM_SEQS
    )
    return Cluster(
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_binder=make_binder,
            make_local_queue=PrefillQueue if keep_s is None else InFlightFirst,
            local_batching=batching,
            keep_s=keep_s or 0.0,
            keeps=keeps,
        ),
    )
