"""Every scheduler, refresh rule, router and batching policy that ships conforms, or for a price that is stated here."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from support.judged import judged
from support.prefill import longest_on_time_s, paid_from_s

from baselines.ar.dynamo import ConditionalRouter, DynamoConfig, KvAware
from baselines.ar.sglang import CacheAware, TokenBudget, graphs_only
from baselines.ar.vllm import InFlightFirst
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.ampd.policies import AdaptiveRouter, ReorderingQueue, RoutingConfig
from engines.dllm.config import DelayedCache, NoCache
from engines.dllm.rows import RowRule
from engines.dllm.scheduling import SCHEDULERS
from engines.laps import system
from engines.laps.batching import ClassQueue, TemporalConfig, WaitConfig, shapes_of
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig, ReserveConfig, longest_wait_s, share_for
from engines.laps.system import LapsConfig, PrefillSystem, laps, on_time, reserve, srpt
from engines.policies import routing
from engines.policies.batching import Chunked, LateShare, OneByOne, OnTimeQueue, PrefillFirst
from engines.policies.views import Batching, OpenQueue, PrefillQueue
from repro import testing
from repro.families.dllm.system import method as method_of
from repro.runs.system import ENTRIES
from repro.testing import Ahead, BatcherConformance, SchedulerConformance
from repro.testing.batchers import SLO, STEPS

EXAMPLES = 6
check_scheduler, check_refresh_rule, check_router, check_batcher = (
    partial(check, examples=EXAMPLES)
    for check in (testing.check_scheduler, testing.check_refresh_rule, testing.check_router, testing.check_batcher)
)


def without_bound(ahead: Ahead) -> float:
    return math.inf


# ---- diffusion LLMs ------------------------------------------------------------------------------------------


class TestPhase(SchedulerConformance):
    examples = EXAMPLES
    make = SCHEDULERS["phase"]


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "phase"])
def test_schedulers(name):
    check_scheduler(SCHEDULERS[name])


def static(config, pool, rule, *, exact_steps):
    size = min(3, config.max_num_seqs)
    return StaticBatchScheduler(config, pool, rule, batch_size=size, exact_steps=exact_steps)


def whole_batches(ahead: Ahead) -> float:
    """One batch for each that came before, as long as its longest member, and the one that runs."""
    return (ahead.requests + 1) * ahead.longest


def test_static_batches():
    """The token budget does not apply to them, and whoever waits pays for the longest member of every batch before his."""
    check_scheduler(static, longest_wait=whole_batches, without=["cap"])
    assert judged("scheduler", "cap", static).failure
    assert judged("scheduler", "no starvation", static).failure


RULES = [NoCache(), *(DelayedCache(delay=delay, window=window) for delay in (0, 1) for window in ("block", "suffix"))]


@pytest.mark.parametrize("rule", RULES)
def test_refresh_rules(rule):
    check_refresh_rule(rule)


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.made_by])
def test_refresh_rules_of_methods(name):
    method = method_of(name)
    rule = method.sampler(next(iter(method.heeds)), {}).rule
    if not isinstance(rule, RowRule):  # whose steps are none of those phases (tests/baselines/test_row_rules.py)
        check_refresh_rule(rule)


# ---- autoregressive systems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        system.InstancesInTurn,
        system.LeastRequests,
        system.LeastTokens,
        system.LeastTokensInPool(boundary=256),
        CacheAware,
        CacheAware(balance_abs_threshold=0),
        routing.Local,
        *(partial(routing.RemoteOnly, dispatch) for dispatch in ("shortest", "round-robin", "random", "shared")),
        AdaptiveRouter,
        *(
            partial(AdaptiveRouter, config=RoutingConfig(route_order="load", window=w))
            for w in ("done", "age", "backlog")
        ),
        *(
            ConditionalRouter(DynamoConfig(conditional=policy, prefill_busy_threshold=0.1))
            for policy in ("isl_bounding", "prefill_load", "isl_or_load")
        ),
        *(KvAware(router=routing.RemoteOnly(), affinity=affinity) for affinity in ("prefix", "cost", "none")),
    ],
)
def test_routers(make):
    check_router(make)


@pytest.mark.parametrize("make", [OneByOne, PrefillFirst, Chunked, TokenBudget, Chunked(max_num_batched_tokens=64)])
@pytest.mark.parametrize("queue", [None, PrefillQueue])
def test_batching_first_come_first_served(make, queue):
    check_batcher(make, **({} if queue is None else {"queue": queue}))


def test_captured_graphs_change_no_order():
    """Here they cost what the same step costs without."""
    model = replace(STEPS, shapes={shape: STEPS.prefill_s(0, shape.tokens) for shape in shapes_of("cheapest")})
    check_batcher(lambda: graphs_only(model).make_batching())


def reordered(ahead: Ahead) -> float:
    """Each of three postponements lets two others go first."""
    return ahead.work + 3 * 2 * ahead.longest + 2 * ahead.step


def alternating(ahead: Ahead) -> float:
    """LAPS §3.2: a window for company, ``max_long_wait_s``, and then every other step, each of one that came before at least."""
    waits_s = TemporalConfig().max_long_wait_s + WaitConfig().max_wait_s
    return waits_s + 2 * (ahead.requests + 2) * ahead.step


class TestLaps(BatcherConformance):
    examples = EXAMPLES
    make = staticmethod(lambda model: laps(model, LapsConfig(boundary=256)).make_batching())
    queue = partial(ClassQueue, 256)
    longest_wait = staticmethod(alternating)


def late_share(ahead: Ahead) -> float:
    config = ReserveConfig()
    return longest_wait_s(config, share_for(config, STEPS), ahead.work, STEPS)


def share_by_arrival(ahead: Ahead) -> float:
    return longest_on_time_s(OnTimeConfig(), ahead.work, ahead.requests, STEPS)


def owed_by_arrival(ahead: Ahead) -> float:
    late = LateShare()
    from_s = paid_from_s(late, SLO.ttft_s, ahead.work)
    return from_s + ahead.work / late.share + 3 / late.share * ahead.longest + 2 * ahead.step


def batching_of(make_system: Callable[[StepModel], PrefillSystem]) -> Callable[..., Batching]:
    return lambda model: make_system(model).make_batching()


WITH_A_BOUND = {
    # vLLM-Continuum: new sessions wait while rounds of others come.
    "in flight first, one by one": (OneByOne, InFlightFirst, without_bound),
    "in flight first, chunked": (Chunked, InFlightFirst, without_bound),
    # AMPD §4.2: among the first ``w`` tasks, each of which is postponed ``w`` times at most.
    "reordering": (OneByOne, partial(ReorderingQueue, ttft_s=0.4, w=3), reordered),
    "reserve": (batching_of(reserve), OpenQueue, late_share),
    # SRPT is what Reserve is without its price: it has no bound.
    "srpt": (batching_of(srpt), OpenQueue, without_bound),
    "on-time": (batching_of(on_time), OpenQueue, share_by_arrival),
    "on-time without a share": (
        batching_of(lambda model: on_time(model, OnTimeConfig(share=0.0))),
        OpenQueue,
        without_bound,
    ),
    "on-time's queue": (OneByOne, partial(OnTimeQueue, ttft_s=SLO.ttft_s, late=LateShare()), owed_by_arrival),
}


@pytest.mark.parametrize("name", WITH_A_BOUND)
def test_batching_with_a_bound_of_its_own(name):
    make, queue, bound = WITH_A_BOUND[name]
    check_batcher(make, queue=queue, longest_wait=bound)
    assert judged("batcher", "no starvation", make, queue=queue).failure


@pytest.mark.parametrize("name", ["reserve", "srpt", "on-time"])
def test_little_memory(name):
    make, _, _ = WITH_A_BOUND[name]
    assert judged("batcher", "little memory", make, examples=25).failure is None
