""""""

from collections import Counter
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clusters import hardware, profiled, session, task
from support.refusals import refuses
from support.tables import data_beside

from baselines.ar.dynamo import ConditionalRouter, DynamoConfig, KvAware, dynamo
from baselines.ar.vllm import InFlightFirst, VllmConfig, continuum, vllm
from engines.cluster.hardware import Deployment
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import OpenLoop, Session
from engines.errors import UserError
from engines.knobs import with_knobs
from engines.policies.routing import Dispatch, RemoteOnly
from engines.policies.views import PrefillQueue, WorkerSnapshot

DATA = data_beside(__file__, "ar")

HOME = WorkerSnapshot(worker_id=0, kv_tokens=500, kv_capacity=1000)


def workers(*backlogs: float) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(worker_id=10 + index, backlog_s=backlog) for index, backlog in enumerate(backlogs)]


def test_dispatch_in_turn_and_at_random():
    turns = RemoteOnly("round-robin")
    assert [turns.pick(workers(0, 0, 0), 0.0).worker_id for _ in range(4)] == [10, 11, 12, 10]
    random = RemoteOnly("random", seed=4)
    picks = Counter(random.pick(workers(9, 0, 0), 0.0).worker_id for _ in range(3000))
    assert all(900 < count < 1100 for count in picks.values())


def test_only_tasks_of_a_shared_queue_wait_for_a_worker_that_is_free():
    parts = hardware(), Deployment.disaggregated(2, 2, 4, 1), profiled(num_gpus=8)
    made = [dynamo(*parts, DynamoConfig(dispatch=each)).policies for each in get_args(Dispatch)]
    assert [each.history for each in made] == ["overlapped", "overlapped", "overlapped", "serial"]
    assert [each.shares_prefill_queue for each in made] == [False, False, False, True]


@pytest.mark.parametrize(("history", "tokens", "stays"), DATA["isl_bounding"])
def test_isl_bounding_keeps_what_is_short_and_mostly_cached(history, tokens, stays):
    """Both tests are strict: below 2,048 tokens, and below 0.7 of the prompt."""
    decision = ConditionalRouter(DynamoConfig(conditional="isl_bounding")).route(
        task(history=history, tokens=tokens), HOME, workers(0), 0.0
    )
    assert decision.is_local is stays


@pytest.mark.parametrize(("queued", "stays"), [(819, False), (820, True)])
def test_prefill_load_keeps_what_the_chosen_worker_is_too_busy_for(queued, stays):
    """0.1 of a batch of 8,192 tokens; one request at a time never stays."""
    config = DynamoConfig(conditional="prefill_load", prefill_busy_threshold=0.1)
    worker = WorkerSnapshot(worker_id=10, backlog_tokens=queued)
    assert ConditionalRouter(config).route(task(history=9000, tokens=10), HOME, [worker], 0.0).is_local is stays


def test_a_decode_worker_filled_to_its_limit_is_not_too_full():
    router = ConditionalRouter(DynamoConfig(conditional="isl_bounding", decode_busy_threshold=0.75))
    for kv_tokens, stays in ((650, True), (651, False)):
        home = WorkerSnapshot(worker_id=0, kv_tokens=kv_tokens, kv_capacity=1000)
        assert router.route(task(history=900, tokens=100), home, workers(0), 0.0).is_local is stays


def served(config: DynamoConfig, sessions: list[Session]) -> ClusterRun:
    cluster = dynamo(hardware(), Deployment.disaggregated(2, 2, 4, 1), profiled(num_gpus=8), config)
    return cluster.simulate(OpenLoop(sessions=sessions))


def test_dynamo_never_prefills_on_a_decode_worker():
    sessions = [session(index, 0.3 * index, (800, 20), (400, 20)) for index in range(40)]
    for dispatch in get_args(Dispatch):
        found = served(DynamoConfig(dispatch=dispatch), sessions)
        assert not any(found.tasks["is_local"])
        assert found.workers["busy_prefill_s"][0] == 0.0
        assert min(found.workers["num_prefills"][1:]) > 10, dispatch


def test_shared_queue_never_leaves_a_worker_idle():
    """No way to dispatch begins the average prefill earlier when histories are empty."""
    sessions = [session(index, 0.11 * index, (200 + 977 * index % 1500, 1)) for index in range(200)]
    waits = {}
    for dispatch in get_args(Dispatch):
        found = served(DynamoConfig(dispatch=dispatch), sessions)
        started = zip(found.tasks["started_s"], found.tasks["ready_s"], strict=True)
        waits[dispatch] = sum(start - ready for start, ready in started)
    assert waits["shared"] <= min(waits.values()) * 1.001


def test_each_is_for_one_kind_of_deployment():
    with pytest.raises(UserError, match="needs prefill workers"):
        dynamo(hardware(), Deployment.colocated(4, 2), profiled(num_gpus=8))
    with pytest.raises(UserError, match="is co-located"):
        vllm(hardware(), Deployment.disaggregated(2, 1, 2, 1))


@dataclass(frozen=True, kw_only=True)
class Caching(WorkerSnapshot):
    cached: int = 0

    def cached_tokens(self, order: int) -> int:
        return self.cached


@pytest.mark.parametrize(("affinity", "chosen"), [("prefix", 11), ("cost", 12), ("none", 10)])
def test_affinity_weighs_the_cached_prefix_against_the_queue(affinity, chosen):
    """The second has most of the session and the longest queue; the third fewest tokens to prefill, queued and of its own."""
    near = [
        Caching(worker_id=10, backlog_tokens=300),
        Caching(worker_id=11, cached=500, backlog_tokens=900, backlog_s=9.0),
        Caching(worker_id=12, cached=400, backlog_tokens=400, backlog_s=4.0),
    ]
    router = KvAware(router=RemoteOnly("shortest"), affinity=affinity)
    assert router.route(task(history=500, tokens=100), HOME, near, 0.0).worker_id == chosen


def test_a_session_stays_with_its_prefill_worker_and_reads_nothing():
    """Each round after the first computes its prompt and the answer before; without affinity some sessions change workers."""
    sessions = [session(index, 0.15 * index, (800, 20), (400, 20), (300, 2)) for index in range(40)]
    computed = {}
    for affinity in ("prefix", "none"):
        found = served(DynamoConfig(history_read="own-cache", affinity=affinity), sessions)
        assert set(found.transfers["content"]) == {"increment"}
        homes = {}
        for owner, worker in zip(found.tasks["session_id"], found.tasks["worker_id"], strict=True):
            homes.setdefault(owner, set()).add(worker)
        assert ({len(each) for each in homes.values()} == {1}) is (affinity == "prefix")
        computed[affinity] = sum(found.tasks["computed_tokens"])
    assert computed["prefix"] == 40 * (800 + 20 + 400 + 20 + 300)
    assert computed["none"] > computed["prefix"]


def test_what_a_knob_needs_is_asked_for():
    with refuses("affinity='cost'"):
        with_knobs(DynamoConfig(), {"affinity": "cost"})
    with pytest.raises(UserError, match="needs prefill_busy_threshold"):
        DynamoConfig(conditional="prefill_load")


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


def test_continuum_alone_lets_sessions_in_flight_go_first():
    made = [kind(hardware(), PLAN).policies.make_local_queue() for kind in (vllm, continuum)]
    assert [type(queue) for queue in made] == [PrefillQueue, InFlightFirst]
