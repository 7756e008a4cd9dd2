"""SGLang's prefill side under PD disaggregation: token-budget batches, first come, first served, behind its router. Also vLLM's.

Batches hold up to ``max_num_batched_tokens`` (SGLang's chunked_prefill_size), the last prompt in part; decodes never ride along. The
router is plain data parallelism (round robin), least loaded by requests or tokens, or its cache-aware policy. SGLang got prefill graphs
after the versions that the papers used (pull requests 10062 and 31487); ``graphs`` switches them on.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.errors import require
from engines.knobs import Checked, Range, Tokens, check_value
from engines.laps.batching import Graphs, Ladder, WithGraphs, graph_choice
from engines.laps.latency import StepModel
from engines.laps.system import InstanceRouter, InstancesInTurn, InstanceView, LeastRequests, LeastTokens, PrefillSystem
from engines.policies.batching import CHUNK_TOKENS, Chunked
from engines.policies.views import FALLBACK, IDLE, Chunk, NextStep, PrefillTask, Rule, Rung, Situation, StepMode

Routing = Literal["round-robin", "least-requests", "least-tokens", "cache-aware"]
CHUNKED_PREFILL_SIZE = 8192
_MAX_PADDING = 2.0
"""Largest ratio of padded to real tokens at which SGLang replays a graph (pull request 31487)."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget(Chunked):
    """Prefill-first continuous batching: begun prompts, then waiting ones in order, up to the budget."""

    max_num_batched_tokens: Tokens = CHUNKED_PREFILL_SIZE

    def rule(self) -> Rule:
        return super().rule()  # for workers that decode nothing

    def next_step(self, at: Situation, now: float) -> NextStep:
        # A prefill step delays decodes, and has a budget of its own.
        shares = super().next_step(at._replace(decoding=0) if at.decoding else at, now).shares
        return NextStep(shares) if shares else IDLE


class GuardedRungs(Ladder):
    """Replays the next captured size, whatever it costs, unless that pads beyond ``_MAX_PADDING``."""

    def __init__(self, captured: Sequence[Rung]) -> None:
        self.rungs, self.times = sorted(captured), None

    def rule(self) -> Rule:
        return Rule("ladder", limits=(_MAX_PADDING,))

    def choose(self, chunks: Sequence[Chunk]) -> StepMode:
        tokens = sum(chunk.tokens for chunk in chunks)
        index = bisect_left(self.rungs, Rung(tokens))
        if index == len(self.rungs) or self.rungs[index].tokens > _MAX_PADDING * tokens:
            return FALLBACK
        return self.rungs[index]


@dataclass(frozen=True, kw_only=True)
class CacheAware(Checked):
    """SGLang's cache-aware router: picks the instance with the longest cached prefix, else by load.

    Defaults are those of its documentation. By load means fewest requests if the instances are out of balance, and least outstanding
    tokens if no prefix is long enough to follow.
    """

    cache_threshold: Annotated[float, Range(0, 1)] = 0.3
    """Smallest cached share of the prompt that decides."""
    balance_abs_threshold: Annotated[int, Range(least=0)] = 64
    balance_rel_threshold: Annotated[float, Range(least=1)] = 1.5
    """Instances are out of balance if the largest number of requests exceeds the least by the absolute one and times the relative one."""

    def rule(self) -> Rule:
        limits = self.cache_threshold, self.balance_abs_threshold, self.balance_rel_threshold
        return Rule("cache-aware", limits=limits)

    def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
        loads = [instance.num_requests for instance in instances]
        highest, lowest = max(loads), min(loads)
        if highest - lowest > self.balance_abs_threshold and highest > self.balance_rel_threshold * lowest:
            return LeastRequests().pick(task, instances, now)
        best = max(instances, key=lambda each: (each.cached_tokens(task), -each.num_requests, -each.worker_id))
        if best.cached_tokens(task) > self.cache_threshold * (task.history + task.tokens):
            return best.worker_id
        return LeastTokens().pick(task, instances, now)


_ROUTERS: dict[Routing, Callable[[], InstanceRouter]] = {
    "round-robin": InstancesInTurn,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "cache-aware": CacheAware,
}


def make_router(routing: Routing) -> Callable[[], InstanceRouter]:
    check_value(Routing, "routing", routing)
    return _ROUTERS[routing]


@dataclass(frozen=True, kw_only=True)
class PdConfig:
    max_num_batched_tokens: Tokens | None = None
    """Tokens of a step; by default 8192, like SGLang 0.5 on H100 and H200, and 2048 for vllm-pd, as in LAPS's figures."""
    routing: Routing | None = None
    """Which instance a turn goes to."""


@dataclass(frozen=True, kw_only=True)
class SglangConfig(PdConfig):
    """Round-robin ``routing``, the default, is the paper's vanilla data parallelism. The other three are its "SGLang with router"."""

    prefill_graphs: bool = False
    """Replay captured sizes, as newer versions of SGLang do; the paper's baselines did not."""


def sglang(config: SglangConfig | None = None, model: StepModel | None = None) -> PrefillSystem:
    """``model`` names the captured rungs; only ``prefill_graphs`` needs it."""
    config = config or SglangConfig()
    batching = TokenBudget(max_num_batched_tokens=config.max_num_batched_tokens or CHUNKED_PREFILL_SIZE)
    choice = None
    if config.prefill_graphs:
        rungs = [shape for shape in model.shapes if isinstance(shape, Rung)] if model is not None else []
        require(
            bool(rungs), "prefill_graphs=True needs a model with captured rungs: profile it with shapes_of('ladder')"
        )
        choice = GuardedRungs(rungs)
    return PrefillSystem(
        make_batching=lambda: WithGraphs(batching, choice),
        make_router=make_router(config.routing or "round-robin"),
        work_s=None if model is None else model.work_s,
    )


def graphs_only(
    model: StepModel, *, graphs: Graphs = "cheapest", max_num_batched_tokens: int = CHUNKED_PREFILL_SIZE
) -> PrefillSystem:
    """LAPS with only its graphs (Figure 6): SGLang's batches, which replay a captured shape if they fit one."""
    batching = TokenBudget(max_num_batched_tokens=max_num_batched_tokens)
    choice = graph_choice(graphs, model, tuple(model.shapes))
    require(choice is not None, "graphs='none' leaves plain SGLang: use sglang-pd")
    return PrefillSystem(
        make_batching=lambda: WithGraphs(batching, choice), make_router=InstancesInTurn, work_s=model.work_s
    )


def vllm_pd(config: PdConfig | None = None) -> PrefillSystem:
    """vLLM's prefill side: chunked prefill, first come, first served, plain data parallelism."""
    config = config or PdConfig()
    batching = Chunked(max_num_batched_tokens=config.max_num_batched_tokens or CHUNK_TOKENS)
    router = make_router(config.routing or "round-robin")
    return PrefillSystem(make_batching=lambda: batching, make_router=router)
