"""Arrivals, stopping, binding, and what a cluster refuses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.clusters import LinearCost, Scripted, hardware, links, serve, session, simulation
from support.refusals import refuses

from engines.cluster.hardware import Deployment, Pool, place, replications, splits
from engines.cluster.sessions import ClosedLoop, OpenLoop
from engines.cluster.simulation import Cluster, DecodeSimulation, Policies, StopRule
from engines.errors import UserError
from engines.policies.routing import Decision, FewestSessions, LeastKvMemory, RemoteOnly, RoundRobin
from engines.policies.views import DecodeView, PrefillTask, PrefillView, WorkerSnapshot


def test_closed_loop_keeps_its_clients_busy():
    """Two clients, 110 ms a session alone, 200 ms of thought: the second waits for the first one's prefill."""
    sessions = [session(index, 0.0, (100, 2)) for index in range(4)]
    run = simulation().run(ClosedLoop(sessions=sessions, num_clients=2, think_s=0.2))
    assert run.sessions["session_id"] == [0, 1, 2, 3]
    # Its prefill goes before the first one's second token.
    assert run.sessions["finished_s"][:2] == pytest.approx([0.21, 0.21])
    assert run.sessions["arrival_s"] == pytest.approx([0.0, 0.0, 0.41, 0.41])
    assert run.sessions["status"] == ["ok"] * 4


def test_run_is_stopped_at_a_time_and_says_so():
    run = serve(
        simulation(stop=StopRule(until_s=0.15)),
        session(0, 0.0, (100, 2)),
        session(1, 0.0, (100, 2)),
        session(2, 9.0, (1, 1)),
    )
    assert run.facts["stop_reason"] == "stopped at 0.15 s with 2 sessions unfinished"
    assert run.sessions["status"] == ["unfinished"] * 2
    assert run.sessions["finished_s"] == [None, None]
    assert run.rounds["first_token_s"] == [0.1, None]


def test_arrivals_that_outrun_the_cluster_are_given_up():
    """100 ms of prefill every 50 ms."""
    arrivals = (session(index, 0.05 * index, (100, 1)) for index in range(10**6))
    run = simulation(stop=StopRule(max_live_sessions=20)).run(OpenLoop(sessions=arrivals))
    assert "unstable: over 20 sessions at once" in run.facts["stop_reason"]
    assert run.num_sessions < 50


@pytest.mark.parametrize(("most", "is_stopped"), [(2, True), (3, False)])
def test_as_many_sessions_at_once_as_a_run_allows_do_not_end_it(most, is_stopped):
    sessions = [session(index, 0.0, (10, 2)) for index in range(3)]
    run = serve(simulation(stop=StopRule(max_live_sessions=most)), *sessions)
    assert (run.facts["stop_reason"] is not None) == is_stopped


def test_overload_is_marked_with_its_reason():
    """100 ms of prefill every 50 ms, and every 200 ms."""
    busy, calm = (
        serve(simulation(), *(session(index, gap * index, (100, 2)) for index in range(20))) for gap in (0.05, 0.2)
    )
    assert busy.facts["prefill_load"] == pytest.approx(2.0 / 0.95)
    assert "prefills take 2.11 times" in busy.facts["overload_reason"]
    assert calm.facts["prefill_load"] == pytest.approx(2.0 / 3.8)
    assert calm.facts["overload_reason"] is None
    alone = serve(simulation(), session(0, 0.0, (100, 2)))
    assert alone.facts["overload_reason"] is None


def test_binding_is_by_memory_then_sessions_then_id():
    def worker(worker_id: int, kv: int, sessions: int) -> WorkerSnapshot:
        return WorkerSnapshot(worker_id=worker_id, kv_tokens=kv, num_sessions=sessions)

    assert LeastKvMemory().bind([worker(0, 9, 0), worker(1, 5, 7)], 0.0) == 1
    assert LeastKvMemory().bind([worker(0, 5, 2), worker(1, 5, 1)], 0.0) == 1
    assert LeastKvMemory().bind([worker(0, 5, 1), worker(1, 5, 1)], 0.0) == 0
    assert FewestSessions().bind([worker(0, 1, 2), worker(1, 5, 1)], 0.0) == 1
    turns = RoundRobin()
    assert [turns.bind([worker(3, 0, 0), worker(4, 0, 0)], 0.0) for _ in range(3)] == [3, 4, 3]
    with pytest.raises(TypeError, match="turn"):
        RoundRobin(turn=2)


@dataclass(frozen=True)
class Noting(Scripted):
    """Notes the TTFT a router is shown, by worker."""

    shown: list[tuple[float, dict[int, float]]] = field(default_factory=list)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        self.shown.append((now, {each.worker_id: each.windowed_ttft_s(now) for each in prefills}))
        return super().route(task, home, prefills, now)


def test_a_router_is_shown_the_mean_ttft_of_the_last_ten_seconds():
    """From ready to the first token, transfers of K/V among it, of what each worker has prefilled."""
    router = Noting(places=(100, 101, 100, 100, 101) * 9)
    rounds = [(300 + 100 * (index % 4), 3, 0.4) for index in range(9)]
    sessions = [session(index, 1.7 * index, *rounds[: 2 + index % 3]) for index in range(9)]
    run = serve(simulation(prefills=2, router=router, kv_links=links(1e-4)), *sessions)
    tasks = run.tasks
    done = [
        (landed, worker, landed - ready)
        for landed, worker, ready in zip(tasks["landed_s"], tasks["worker_id"], tasks["ready_s"], strict=True)
    ]
    assert len(router.shown) == len(done) > 20
    for now, shown in router.shown:
        for worker_id, ttft_s in shown.items():
            inside = [ttft for landed, worker, ttft in done if worker == worker_id and now - 10 < landed <= now]
            assert ttft_s == pytest.approx(np.mean(inside) if inside else 0.0)
    assert max(ttft_s for _, shown in router.shown for ttft_s in shown.values()) > 0.4


def test_decode_step_of_a_cluster_is_the_cost_model():
    """Sixteen sequences together: a gap is T_dec of sixteen with the tokens that each has by then."""
    platform = hardware()
    cluster = Cluster(
        hardware=platform,
        deployment=Deployment.disaggregated(4, 1, 4, 1),
        policies=Policies(make_router=lambda seed: RemoteOnly()),
    )
    sessions = [session(index, 0.0, (500, 400)) for index in range(16)]
    run = cluster.simulate(OpenLoop(sessions=sessions), max_run_steps=1)
    token_s = {
        row: first + np.concatenate([[0.0], np.cumsum(run.gaps.gap_s[run.gaps.row == row])])
        for row, first in enumerate(run.rounds["first_token_s"])
    }
    for step in (5, 20, 60):  # of the sequence that came last
        start, end = token_s[15][step : step + 2]
        context = sum(500 + int((times <= start + 1e-9).sum()) for times in token_s.values())
        assert end - start == pytest.approx(platform.cost(4).step_s([], 16, context), rel=1e-9)


def test_placement_puts_the_phases_of_a_server_together():
    assert place([4, 4, 4, 4]) == ([0, 0, 1, 1], [])
    assert place([1, 8, 2, 4, 1]) == ([1, 0, 1, 1, 1], [])
    assert place([4, 4], [4, 4]) == ([0, 1], [0, 1])
    assert place([8], [4, 4]) == ([0], [1, 1])
    assert place([8, 8], [8, 8]) == ([0, 2], [1, 3])


def test_enumerated_deployments_use_all_gpus():
    found = list(splits(8, (1, 2, 4, 8), (2, 4, 8)))
    assert all(each.gpus == 8 for each in found)
    assert len(set(found)) == len(found)
    assert Deployment.disaggregated(2, 1, 2, 3) in found
    assert Deployment.disaggregated(4, 1, 4, 1) in found
    assert [str(each) for each in replications(8, (2, 4, 8))] == ["TP2x4", "TP4x2", "TP8x1"]
    assert str(Deployment.disaggregated(4, 2, 8, 1)) == "P:TP4x2 D:TP8x1"


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: Deployment(decode=()), "decode=()"),
        (lambda: Pool(degree=1, replicas=0), "replicas=0"),
        (lambda: Pool(degree=16, replicas=1), "degree=16"),
        (
            lambda: Cluster(hardware=hardware(), deployment=Deployment.colocated(1, 8), policies=Policies()),
            "does not fit 1 x h20, use a degree of 2 or more",
        ),
        (
            lambda: DecodeSimulation(binder=LeastKvMemory(), router=RoundRobin()).run(OpenLoop(sessions=())),
            "no decode workers",
        ),
    ],
)
def test_impossible_deployments_are_refused(do, says):
    with refuses(says):
        do()


def test_session_too_long_for_memory_is_refused_before_it_runs():
    cluster = Cluster(hardware=hardware(), deployment=Deployment.colocated(2, 4), policies=Policies())
    with pytest.raises(UserError, match=r"session 3 grows to 1000002 tokens of K/V"):
        cluster.simulate(OpenLoop(sessions=[session(3, 0.0, (10**6, 2))]))
    most = hardware().kv_capacity(2)
    run = cluster.simulate(OpenLoop(sessions=[session(3, 0.0, (most - 2, 2))]))
    assert run.sessions["status"] == ["ok"]
    with pytest.raises(UserError, match=f"session 3 grows to {most + 1} tokens"):
        cluster.simulate(OpenLoop(sessions=[session(3, 0.0, (most - 1, 2))]))


def test_batch_logs_one_worker_for_all_members():
    """A thousand tokens of ten sequences are a few lines, not ten thousand."""
    run = serve(simulation(cost=LinearCost(slope_s=1e-9)), *(session(index, 0.0, (10, 1000)) for index in range(10)))
    assert run.gaps.tokens.sum() == 10 * 999
    assert len(run.gaps.row) < 200


def test_a_request_counts_before_its_engine_has_seen_it():
    seen = []

    class Asking:
        def bind_prompt(self, order, tokens, decodes):
            seen.append(decodes[0].load_with(order, tokens).to_prefill)
            return decodes[0].worker_id

    built = simulation(binder=Asking(), schedules_ahead=True, cost=LinearCost(decode_s=1.0))
    waited = session(1, 1.2, (500, 2)), session(2, 1.3, (70, 2)), session(3, 5.9, (9, 2))
    run = serve(built, session(0, 0.0, (100, 9)), *waited)
    assert seen == [100, 500, 570, 9]
    # From 0.1 s on a token a second: the second that runs and the one behind it end first.
    assert run.rounds["first_token_s"] == pytest.approx([0.1, 3.6, 3.67, 7.679])
