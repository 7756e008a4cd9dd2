"""Algorithm 1 branch by branch, and eqs. (1) and (2) by hand."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from support.clusters import task

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


def test_lines_1_to_3_slack_sends_the_task_away():
    """0.9 s is slack still; the decode worker's own slack does not matter then."""
    decision = router().route(task(), home(itl_s=0.0), [prefill(7, ttft_s=0.9)], 5.0)
    assert decision == Decision(7, False, "ttft-slack")


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


def test_lines_4_and_5_decode_slack_keeps_the_task():
    """beta * 40 ms = 34 ms."""
    workers = [prefill(7, ttft_s=1.0)]
    assert router().route(task(), home(itl_s=0.034), workers, 5.0) == Decision(0, True, "itl-slack")
    assert router().route(task(), home(itl_s=0.0341), workers, 5.0).reason == "cost"


def test_lines_6_to_9_take_the_least_cost():
    """Local: 0.5 + 0.1 + backlog; remote: 0.25 + 0.1 + 10 ms + 7.5 ms of K/V + backlog."""
    asked = task(history=1000, tokens=1000, kind="incremental")
    busy = home(itl_s=1.0, backlog_s=0.0)
    expected_remote = 0.25 + 0.1 + (5e-3 + 1000 * 1e-5 / 2) * 2
    assert local_cost_s(HandModel(), asked, busy) == pytest.approx(0.6)
    assert remote_cost_s(HandModel(), asked, busy, prefill(7)) == pytest.approx(expected_remote)
    costs = {7: 0.30, 8: 0.24, 9: 0.26}
    workers = [prefill(index, ttft_s=9.0, backlog_s=backlog) for index, backlog in costs.items()]
    # 0.6 locally against 0.37 + 0.24 on worker 8: local wins by 10 ms.
    assert router().route(asked, busy, workers, 5.0) == Decision(0, True, "cost")
    busier = replace(busy, backlog_s=0.02)
    assert router().route(asked, busier, workers, 5.0) == Decision(8, False, "cost")


def test_equation_1_adds_the_local_queue():
    asked = task(tokens=200)
    assert local_cost_s(HandModel(), asked, home(backlog_s=1.25)) == pytest.approx(0.1 + 1.25)


def test_equation_2_of_an_initial_prefill_reads_no_history():
    asked = task(history=0, tokens=400)
    cost_s = remote_cost_s(HandModel(), asked, home(), prefill(7, backlog_s=2.0))
    assert cost_s == pytest.approx(0.1 + (5e-3 + 400 * 1e-5 / 2) + 2.0)


def test_what_runs_is_not_in_the_printed_costs():
    """Eqs. (1) and (2) sum over the queue; our order by load adds what runs."""
    running = prefill(7, running_s=3.0, backlog_s=1.0)
    assert remote_cost_s(HandModel(), task(tokens=4), home(), running) < 1.1
    assert ahead_s(running, 0.0) == 4.0


def test_without_prefill_workers_everything_is_local():
    assert router().route(task(), home(itl_s=9.0), [], 0.0) == Decision(0, True, "cost")


def test_empty_windows_are_slack():
    assert router().route(task(), home(), [prefill(7)], 0.0).reason == "ttft-slack"


def test_order_by_load_visits_the_shortest_backlog_first():
    config = replace(CONFIG, route_order="load")
    workers = [prefill(7, backlog_s=2.0), prefill(8, running_s=0.4, backlog_s=1.0), prefill(9, backlog_s=1.5)]
    for seed in range(5):
        assert router(config, seed).route(task(), home(), workers, 0.0).worker_id == 8


def test_equal_costs_stay_local_and_then_go_to_the_first_worker():
    asked, busy = task(tokens=400), home(itl_s=1.0)
    local_s = local_cost_s(HandModel(), asked, busy)
    idle_s = remote_cost_s(HandModel(), asked, busy, prefill(7))
    equal = [prefill(index, ttft_s=9.0, backlog_s=local_s - idle_s) for index in (9, 7, 8)]
    assert remote_cost_s(HandModel(), asked, busy, equal[0]) == local_s
    assert router().route(asked, busy, equal, 5.0) == Decision(0, True, "cost")
    assert router().route(asked, replace(busy, backlog_s=1e-6), equal, 5.0) == Decision(9, False, "cost")


def test_order_by_load_visits_equal_workers_by_id():
    config = replace(CONFIG, route_order="load")
    for order in itertools.permutations((7, 8, 9)):
        workers = [prefill(index, backlog_s=1.0 - (index - 7) * 0.5, running_s=(index - 7) * 0.5) for index in order]
        assert router(config).route(task(), home(), workers, 0.0).worker_id == 7


@pytest.mark.parametrize(
    ("window", "state", "has_slack"),
    [
        ("done", {"wait_s": 5.0, "backlog_s": 5.0}, True),
        ("age", {"wait_s": 0.8}, True),
        ("age", {"wait_s": 0.95}, False),
        ("age", {"backlog_s": 5.0}, True),
        ("backlog", {"backlog_s": 0.5, "running_s": 0.45}, False),
        ("backlog", {"backlog_s": 0.5, "running_s": 0.35}, True),
        ("backlog", {"ttft_s": 0.95}, False),
    ],
)
def test_window_signals_of_a_prefill_worker(window, state, has_slack):
    config = replace(CONFIG, window=window)
    decision = router(config).route(task(), home(itl_s=9.0), [prefill(7, **state)], 0.0)
    assert (decision.reason == "ttft-slack") is has_slack


@pytest.mark.parametrize(("window", "is_local"), [("done", True), ("age", False), ("backlog", False)])
def test_starved_decode_looks_idle_only_as_printed(window, is_local):
    """No token for two seconds: the printed window is empty and counts as slack."""
    config = replace(CONFIG, window=window)
    starved = home(itl_s=0.0, age_s=2.0, backlog_s=50.0)
    decision = router(config).route(task(tokens=10), starved, [prefill(7, ttft_s=9.0)], 0.0)
    assert decision.is_local is is_local
