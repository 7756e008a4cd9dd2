"""SGLang's and vLLM's prefill batches and routers by hand."""

from dataclasses import dataclass

import pytest
from support.prefill import ask, execute, h200_14b, task

from baselines.ar.sglang import CacheAware, GuardedRungs, SglangConfig, TokenBudget, graphs_only, sglang
from engines.errors import UserError
from engines.laps.batching import LADDER
from engines.laps.latency import StepModel
from engines.laps.system import LengthClass
from engines.policies.views import FALLBACK, Bucket, Chunk, NextStep, PrefillQueue, PrefillTask, Rung, Situation

_, MODEL = h200_14b()


@dataclass(frozen=True)
class View:
    worker_id: int
    num_requests: int = 0
    backlog_tokens: int = 0
    cached: int = 0
    pool: LengthClass | None = None

    def cached_tokens(self, task: PrefillTask) -> int:
        return self.cached


def queue_of(*tokens: int) -> PrefillQueue:
    queue = PrefillQueue()
    for index, each in enumerate(tokens):
        queue.push(task(index, each))
    return queue


def shares(plan: NextStep) -> list[tuple[int, int]]:
    return [(share.task.task_id, share.tokens) for share in plan.shares]


def test_a_batch_takes_requests_in_order_up_to_the_budget_the_last_in_part():
    queue, batching = queue_of(5000, 100, 6000, 10), TokenBudget()
    plan = ask(batching, queue, 0.0)
    assert shares(plan) == [(0, 5000), (1, 100), (2, 3092)]
    assert (plan.decodes, plan.mode, plan.wake_s) == (False, None, None)
    assert shares(ask(batching, queue, 0.1, execute(plan))) == [(2, 2908), (3, 10)]


def test_decodes_neither_ride_along_nor_take_of_the_budget():
    plan = TokenBudget(max_num_batched_tokens=100).next_step(
        Situation(queue_of(500), (), 40, 10**6, lambda each: each.tokens), 0.0
    )
    assert (shares(plan), plan.decodes) == ([(0, 100)], False)


def test_a_graph_is_replayed_up_to_twice_the_tokens():
    choice = GuardedRungs([Rung(64), Rung(100), Rung(1000)])
    for tokens, expected in (
        (32, Rung(64)),
        (31, FALLBACK),
        (65, Rung(100)),
        (101, FALLBACK),
        (500, Rung(1000)),
        (1001, FALLBACK),
    ):
        assert choice.choose([Chunk(0, tokens)]) == expected, tokens


def test_graphs_are_a_switch():
    on = sglang(SglangConfig(prefill_graphs=True), MODEL)
    assert ask(on.make_batching(), queue_of(60, 50), 0.0).mode == Rung(112)
    assert ask(sglang().make_batching(), queue_of(60, 50), 0.0).mode is None
    assert ask(graphs_only(MODEL).make_batching(), queue_of(60, 50), 0.0).mode == Bucket(64, 2)
    assert ask(graphs_only(MODEL, graphs="nearest").make_batching(), queue_of(60, 300), 0.0).mode == FALLBACK
    without = StepModel(base_s=0, request_s=0, floor_s=0, token_s=1, alpha=0, history_s=0, shapes={})
    for model in (None, without):
        with pytest.raises(UserError, match="captured rungs"):
            sglang(SglangConfig(prefill_graphs=True), model)
    with pytest.raises(UserError, match="use sglang"):
        graphs_only(MODEL, graphs="none")
    assert Rung(112) in LADDER


def test_the_cache_aware_router_by_hand():
    request = task(0, 100, history=900)
    route = CacheAware().pick
    assert route(request, [View(0, 10, 0), View(1, 60, 9000, cached=400)], 0.0) == 1  # 40 % of the prompt
    assert route(request, [View(0, 10, 0), View(1, 60, 9000, cached=300)], 0.0) == 0  # not more than 30 %
    # Out of balance by both thresholds: fewest requests.
    assert route(request, [View(0, 10, 99999), View(1, 80, 0, cached=900)], 0.0) == 0
    assert route(request, [View(0, 200, 0), View(1, 280, 0, cached=900)], 0.0) == 1  # by one alone
    for config in ({"cache_threshold": 1.1}, {"balance_abs_threshold": -1}, {"balance_rel_threshold": 0.5}):
        with pytest.raises(UserError, match=f"{next(iter(config))}="):
            CacheAware(**config)
