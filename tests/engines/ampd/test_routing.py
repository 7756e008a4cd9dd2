"""Algorithm 1 branch by branch, and eqs. (1) and (2) by hand."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from support.clusters import task
from support.tables import data_beside

from engines.ampd.policies import AdaptiveRouter, RoutingConfig, ahead_s, local_cost_s, remote_cost_s
from engines.policies.routing import Decision
from engines.policies.views import Slo, WorkerSnapshot

SLO = Slo(ttft_s=1.0, itl_s=0.04)
CONFIG = RoutingConfig()


@dataclass(frozen=True)
class HandModel:
    """T_pre is 1 ms a token over the degree plus 0.1 ms a token of history; T_kv is 5 ms + 0.01 ms a token, over
    the smaller degree."""

    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        return tokens * 1e-3 / degree + history * 1e-4

    def transfer_s(self, tokens: int, source_degree: int, target_degree: int) -> float:
        return 0.0 if tokens <= 0 else 5e-3 + tokens * 1e-5 / min(source_degree, target_degree)


def router(config: RoutingConfig = CONFIG, seed: int = 0) -> AdaptiveRouter:
    return AdaptiveRouter(HandModel(), SLO, config, seed=seed)


def home(**state: float) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=0, degree=2, **state)


def prefill(worker_id: int, **state: float) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=worker_id, degree=4, **state)


@pytest.mark.parametrize(("config", "decode", "workers", "decision"), data_beside(__file__, "routes"))
def test_who_decides_and_where_it_goes(config, decode, workers, decision):
    states = [prefill(7 + index, **state) for index, state in enumerate(workers)]
    for order in itertools.permutations(states):
        assert router(replace(CONFIG, **config)).route(task(), home(**decode), order, 5.0) == Decision(*decision)


def test_lines_1_to_3_skip_workers_without_slack():
    workers = [prefill(7, ttft_s=0.91), prefill(8, ttft_s=0.2), prefill(9, ttft_s=2.0)]
    for seed in range(20):
        assert router(seed=seed).route(task(), home(), workers, 5.0) == Decision(8, False, "ttft-slack")


def test_line_1_visits_in_random_order():
    workers = [prefill(index) for index in (7, 8, 9)]
    one = router(seed=3)
    picks = Counter(one.route(task(), home(), workers, 5.0).worker_id for _ in range(3000))
    assert all(900 < picks[index] < 1100 for index in (7, 8, 9))
    again = router(seed=3)
    repeated = Counter(again.route(task(), home(), workers, 5.0).worker_id for _ in range(3000))
    assert repeated == picks


def test_lines_6_to_9_take_the_least_cost():
    """Local: 0.5 + 0.1 + backlog; remote: 0.25 + 0.1 + 10 ms + 7.5 ms of K/V + backlog."""
    asked = task(history=1000, tokens=1000, kind="incremental")
    busy = home(itl_s=1.0, backlog_s=0.0)
    expected_remote = 0.25 + 0.1 + (5e-3 + 1000 * 1e-5 / 2) * 2
    assert local_cost_s(HandModel(), asked, busy) == pytest.approx(0.6)
    assert local_cost_s(HandModel(), asked, replace(busy, backlog_s=1.25)) == pytest.approx(0.6 + 1.25)
    assert remote_cost_s(HandModel(), asked, busy, prefill(7)) == pytest.approx(expected_remote)
    # Without a history nothing is read; what runs counts in the order by load alone.
    running = prefill(7, running_s=3.0, backlog_s=2.0)
    initial_s = remote_cost_s(HandModel(), task(history=0, tokens=400), home(), running)
    assert initial_s == pytest.approx(0.1 + (5e-3 + 400 * 1e-5 / 2) + 2.0)
    assert ahead_s(running, 0.0) == 5.0
    costs = {7: 0.30, 8: 0.24, 9: 0.26}
    workers = [prefill(index, ttft_s=9.0, backlog_s=backlog) for index, backlog in costs.items()]
    # 0.6 locally against 0.37 + 0.24 on worker 8: local wins by 10 ms.
    assert router().route(asked, busy, workers, 5.0) == Decision(0, True, "cost")
    busier = replace(busy, backlog_s=0.02)
    assert router().route(asked, busier, workers, 5.0) == Decision(8, False, "cost")


def test_equal_costs_stay_local_and_then_go_to_the_first_worker():
    asked, busy = task(tokens=400), home(itl_s=1.0)
    local_s = local_cost_s(HandModel(), asked, busy)
    idle_s = remote_cost_s(HandModel(), asked, busy, prefill(7))
    equal = [prefill(index, ttft_s=9.0, backlog_s=local_s - idle_s) for index in (9, 7, 8)]
    assert remote_cost_s(HandModel(), asked, busy, equal[0]) == local_s
    assert router().route(asked, busy, equal, 5.0) == Decision(0, True, "cost")
    assert router().route(asked, replace(busy, backlog_s=1e-6), equal, 5.0) == Decision(9, False, "cost")
