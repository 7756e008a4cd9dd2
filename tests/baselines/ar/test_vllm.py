import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clusters import hardware, serve, session, simulation, task

from baselines.ar.vllm import InFlightFirst, VllmConfig, continuum, vllm
from engines.cluster.hardware import Deployment
from engines.cluster.sessions import OpenLoop
from engines.errors import UserError
from engines.policies.views import PrefillQueue

PLAN = Deployment.colocated(4, 2)


@given(st.lists(st.sampled_from(("initial", "incremental", "take")), max_size=40))
def test_in_flight_first_against_two_queues(actions):
    queue = InFlightFirst()
    new: list[int] = []
    begun: list[int] = []
    for index, action in enumerate(actions):
        if action == "take":
            if new or begun:
                expected = (begun or new).pop(0)
                assert queue.peek(0.0).task_id == expected
                assert queue.take(0.0).task_id == expected
        else:
            (new if action == "initial" else begun).append(index)
            queue.push(task(index, kind=action))
        assert [each.task_id for each in queue] == begun + new


def test_in_flight_session_overtakes_new_ones():
    """Session 0's second round is ready at 0.15, when session 1 runs until 0.2 and session 2 waits."""
    sessions = [session(0, 0.0, (100, 1, 0.05), (50, 1)), session(1, 0.06, (100, 1)), session(2, 0.07, (100, 1))]
    fifo = serve(simulation(), *sessions)
    begun = serve(simulation(make_queue=InFlightFirst), *sessions)
    second = fifo.tasks["kind"].index("incremental")
    assert fifo.tasks["started_s"][second] == pytest.approx(0.3)
    assert begun.tasks["started_s"][second] == pytest.approx(0.2)


def test_continuum_alone_lets_sessions_in_flight_go_first():
    made = [kind(hardware(), PLAN).policies.make_local_queue() for kind in (vllm, continuum)]
    assert [type(queue) for queue in made] == [PrefillQueue, InFlightFirst]


def test_everything_is_local_and_sessions_stay():
    sessions = [session(index, 0.2 * index, (500, 20, 0.1), (300, 20)) for index in range(30)]
    for cluster in (
        vllm(hardware(), PLAN),
        vllm(hardware(), PLAN, VllmConfig(scheduling="chunked")),
        continuum(hardware(), PLAN),
    ):
        found = cluster.simulate(OpenLoop(sessions=sessions))
        assert all(found.tasks["is_local"])
        assert found.transfers["task_id"] == []
        assert found.tasks["computed_tokens"] == found.tasks["tokens"]


def test_chunks_spare_the_next_token_a_long_wait():
    sessions = [session(0, 0.0, (200, 200)), session(1, 1.0, (8000, 2))]
    longest = {
        scheduling: vllm(
            hardware(), Deployment.colocated(8, 1), VllmConfig(scheduling=scheduling, max_num_batched_tokens=1024)
        )
        .simulate(OpenLoop(sessions=sessions))
        .gaps.gap_s.max()
        for scheduling in ("prefill-first", "chunked")
    }
    assert longest["chunked"] < longest["prefill-first"] / 4


@pytest.mark.parametrize("balance", ["memory", "sessions", "round-robin"])
def test_every_balance_uses_both_replicas(balance):
    sessions = [session(index, 0.2 * index, (500, 20)) for index in range(30)]
    found = vllm(hardware(), PLAN, VllmConfig(balance=balance)).simulate(OpenLoop(sessions=sessions))
    assert min(found.workers["num_prefills"]) > 8


def test_vllm_is_co_located():
    with pytest.raises(UserError, match="is co-located"):
        vllm(hardware(), Deployment.disaggregated(2, 1, 2, 1))
