"""The very cluster code against queueing theory, and against the recursions the theory rests on.

References are exact (``support/waits.py``): Erlang for M/M/k, Crommelin and Franx for M/D/k.

What must hold for every run: nothing is lost, invented, or left to chance.
"""

import heapq
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import LinearCost, TokenEstimator, links, poisson_singles, session, session_lists, simulation
from support.waits import deterministic, markov

from engines.ampd.planner import erlang_c
from engines.cluster.decode import Sink
from engines.cluster.record import ClusterRun, observe
from engines.cluster.sessions import OpenLoop, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import PrefillWorker
from engines.policies.batching import ONE_BY_ONE, Chunked, PrefillFirst
from engines.policies.routing import Decision, LeastKvMemory, Local, RemoteOnly, RoundRobin
from engines.policies.views import Batching, DecodeView, PrefillQueue, PrefillTask

MICRO = LinearCost(token_s=1e-6)
"""A service time of 1 s is a prompt of a million tokens: whole tokens round it by less than one in a million."""


def pollaczek_khinchine(load: float, cv2: float) -> float:
    """Mean wait of M/G/1; cv2 is 0 for M/D/1 and 1 for M/M/1."""
    return load / (1 - load) * (1 + cv2) / 2


def constant(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.full(num, 1e6)


def exponential(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.exponential(1e6, num)


def lognormal(rng: np.random.Generator, num: int) -> np.ndarray:
    return 1e6 * np.exp(0.6 * rng.standard_normal(num) - 0.18)


def queue(servers: int) -> DecodeSimulation:
    """Prefill workers that share one queue, before a decode side that takes no time."""
    built = DecodeSimulation(binder=LeastKvMemory(), router=RemoteOnly("shared"))
    built.add(Sink(built, worker_id=0))
    shared = PrefillQueue()
    for index in range(servers):
        built.add(
            PrefillWorker(
                built, worker_id=1 + index, degree=1, cost=MICRO, queue=shared, batching=ONE_BY_ONE, overlaps=False
            )
        )
    return built


def waits(run: ClusterRun) -> np.ndarray:
    return np.array(run.tasks["started_s"]) - np.array(run.tasks["ready_s"])


def earliest_free(arrivals: Iterable[float], services: Iterable[float], servers: int) -> np.ndarray:
    """Kiefer and Wolfowitz: each customer goes to the server that is free first (Lindley's recursion for one)."""
    free = [0.0] * servers
    found = []
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(arrival, free[0])
        found.append(start - arrival)
        heapq.heapreplace(free, start + service)
    return np.array(found)


def of_recursion(sessions: Iterable[Session], servers: int) -> np.ndarray:
    each = [(session.arrival_s, 1e-6 * session.prefill_tokens) for session in sessions]
    return earliest_free(*zip(*each, strict=True), servers)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("service", [constant, exponential, lognormal])
def test_every_wait_is_that_of_the_recursion(servers, service):
    sessions = list(poisson_singles(2000, 0.9 * servers, service, seed=3))
    run = queue(servers).run(OpenLoop(sessions=sessions))
    assert waits(run) == pytest.approx(of_recursion(sessions, servers), abs=1e-6)


def test_colocated_worker_is_the_same_queue():
    sessions = list(poisson_singles(2000, 0.8, exponential, seed=4))
    run = simulation(cost=MICRO, kv_capacity=10**15).run(OpenLoop(sessions=sessions))
    assert waits(run) == pytest.approx(of_recursion(sessions, 1), abs=1e-6)


@pytest.mark.parametrize(
    ("service", "exact"), [(constant, deterministic), (exponential, markov)], ids=["M/D/1", "M/M/1"]
)
def test_waits_of_one_server_are_pollaczek_and_khinchines(service, exact):
    """At half load, where a mean of 400,000 waits has a standard error of 0.5 % (M/D/1) and 0.8 % (M/M/1)."""
    expected, found = exact(1, 0.5), of_recursion(poisson_singles(400_000, 0.5, service, seed=1), 1)
    assert expected.mean == pytest.approx(pollaczek_khinchine(0.5, 0.0 if service is constant else 1.0))
    assert found.mean() == pytest.approx(expected.mean, rel=0.02)
    for share in (0.75, 0.9, 0.95):
        assert np.quantile(found, share) == pytest.approx(expected.quantile(share), rel=0.02)


@pytest.mark.parametrize(("service", "exact"), [(constant, deterministic), (exponential, markov)])
def test_tail_of_several_servers(service, exact):
    """M/G/2 at half load: P95 and P99 of 10^5 waits, which have standard errors of 1 to 2.4 %."""
    found = of_recursion(poisson_singles(10**5, 1.0, service, seed=2), 2)
    expected = [exact(2, 0.5).quantile(share) for share in (0.95, 0.99)]
    assert np.quantile(found, (0.95, 0.99)) == pytest.approx(expected, rel=0.05)


def test_erlang_c_against_its_definition():
    for servers, offered in ((1, 0.4), (2, 1.5), (5, 4.0), (30, 25.0)):
        terms = [offered**count / math.factorial(count) for count in range(servers)]
        last = offered**servers / math.factorial(servers) * servers / (servers - offered)
        assert erlang_c(servers, offered) == pytest.approx(last / (sum(terms) + last))


COST = LinearCost(token_s=1e-4, decode_s=5e-3, slope_s=2e-6, floor_s=6e-3)
BATCHINGS: tuple[Batching, ...] = (
    ONE_BY_ONE,
    PrefillFirst(max_num_batched_tokens=300, max_num_seqs=5),
    Chunked(max_num_batched_tokens=64, max_num_seqs=6),
)


@dataclass(frozen=True)
class ByTask:
    """Local or remote by the task's session and round alone: no state decides."""

    local_in_8: int
    num_prefills: int

    def route(self, task: PrefillTask, home: DecodeView, prefills: object, now: float) -> Decision:
        mixed = (task.session_id * 5 + task.round_index * 3) % 8
        if mixed < self.local_in_8 or not self.num_prefills:
            return Decision(home.worker_id, True, "by-task")
        return Decision(100 + mixed % self.num_prefills, False, "by-task")


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, object]:
    num_prefills = draw(st.integers(0, 2))
    return {
        "homes": draw(st.integers(1, 3)),
        "prefills": num_prefills,
        "router": ByTask(draw(st.integers(0, 8)), num_prefills),
        "batching": draw(st.sampled_from(BATCHINGS)),
        "prefill_batching": draw(st.sampled_from(BATCHINGS)),
        "kv_links": draw(st.sampled_from((None, links(1e-5, latency_s=1e-3)))),
        "overlaps": draw(st.booleans()),
        "estimator": TokenEstimator(1e-4),
        "cost": COST,
    }


def run_on(cluster: dict[str, object], sessions: list[Session], **more: object) -> tuple[DecodeSimulation, ClusterRun]:
    built = simulation(binder=RoundRobin(), **{**cluster, **more})
    return built, built.run(OpenLoop(sessions=sessions))


def check_conserved(built: DecodeSimulation, run: ClusterRun, sessions: list[Session]) -> None:
    assert run.facts["stop_reason"] is None
    assert run.sessions["session_id"] == [each.session_id for each in sessions]
    assert run.sessions["status"] == ["ok"] * len(sessions)
    # Every round of every session once, in order, none before it is ready.
    expected = sorted((each.session_id, index) for each in sessions for index in range(len(each.rounds)))
    assert sorted(zip(run.rounds["session_id"], run.rounds["round"], strict=True)) == expected
    by_round = {
        (each.session_id, index): (entry, sum(sum(earlier[:2]) for earlier in each.rounds[:index]))
        for each in sessions
        for index, entry in enumerate(each.rounds)
    }
    gaps = np.bincount(run.gaps.row, weights=run.gaps.tokens, minlength=len(expected))
    elapsed = np.bincount(run.gaps.row, weights=run.gaps.tokens * run.gaps.gap_s, minlength=len(expected))
    for row, key in enumerate(zip(run.rounds["session_id"], run.rounds["round"], strict=True)):
        entry, history = by_round[key]
        assert run.rounds["history"][row] == history
        assert run.rounds["ready_s"][row] < run.rounds["first_token_s"][row] <= run.rounds["finished_s"][row]
        # As many gaps as tokens after the first, and they fill the time between the first and the last.
        assert gaps[row] == entry.decode_tokens - 1
        assert elapsed[row] == pytest.approx(run.rounds["finished_s"][row] - run.rounds["first_token_s"][row], abs=1e-9)
    observed = observe(run)
    assert (observed.e2el_s > 0).all()
    # Memory is as empty as before, and was never overdrawn.
    for home in built._homes:
        assert home.kv.held + home.kv.idle == 0
        assert home.kv.peak <= home.kv.capacity
        assert home.num_sessions == 0


@settings(max_examples=80)
@given(clusters(), session_lists())
def test_sessions_rounds_and_tokens_are_conserved(cluster, sessions):
    built, run = run_on(cluster, sessions)
    check_conserved(built, run, sessions)
    # With room for all, every prefill runs once, over its history as it was.
    assert set(run.tasks["kind"]) <= {"initial", "incremental"}
    assert run.tasks["computed_tokens"] == run.tasks["tokens"]
    assert sum(run.workers["prefilled_tokens"]) == sum(each.prefill_tokens for each in sessions)
    remote = [not is_local for is_local in run.tasks["is_local"]]
    if cluster["kv_links"] is not None:
        moved = dict.fromkeys(("history", "increment"), 0)
        for content, tokens, num_bytes in zip(
            run.transfers["content"], run.transfers["tokens"], run.transfers["bytes"], strict=True
        ):
            moved[content] += tokens
            assert num_bytes == tokens  # 1 byte a token in these links
        assert moved["increment"] == sum(np.array(run.tasks["tokens"])[remote])
        assert moved["history"] == sum(np.array(run.tasks["history"])[remote])


@settings(max_examples=70)
@given(clusters(), session_lists(), st.integers(0, 400), st.sampled_from((0.0, 0.5)), st.booleans())
def test_little_memory_loses_nothing(cluster, sessions, spare, keep_s, has_own_cache):
    """Room for the longest session and a little more: caches are evicted, sequences preempted, all end all the same."""
    capacity = max(each.context_tokens for each in sessions) + 1 + spare
    own_cache = capacity if has_own_cache else None
    built, run = run_on(cluster, sessions, kv_capacity=capacity, keep_s=keep_s, own_cache=own_cache)
    check_conserved(built, run, sessions)
    for worker in built._prefills:
        assert worker.kv is None or (worker.kv.held == 0 and worker.kv.peak <= capacity)
    computed, asked = sum(run.tasks["computed_tokens"]), sum(run.tasks["tokens"])
    assert has_own_cache or computed >= asked  # a recomputation finds what its prefill worker cached
    assert sum(run.workers["prefilled_tokens"]) == computed


def test_a_recomputation_in_chunks_is_no_longer_than_what_its_own_cache_lacks():
    """Session 8 is preempted, and the prefill worker still has 62 of its 65 tokens: a chunk of 64 never ended it."""
    sessions = [session(index, 0.0, (1, 1)) for index in range(7)]
    sessions += [session(7, 0.0, (1, 1), (1, 2)), session(8, 0.0, (63, 3))]
    capacity = max(each.context_tokens for each in sessions) + 1
    cluster = {
        "prefills": 1,
        "router": ByTask(local_in_8=0, num_prefills=1),
        "batching": ONE_BY_ONE,
        "prefill_batching": Chunked(max_num_batched_tokens=64, max_num_seqs=6),
        "estimator": TokenEstimator(token_s=0.0001),
        "cost": LinearCost(token_s=0.0001, decode_s=0.005, slope_s=2e-06, floor_s=0.006),
    }
    check_conserved(*run_on(cluster, sessions, kv_capacity=capacity, keep_s=0.0, own_cache=capacity), sessions)


def test_who_lost_its_memory_goes_before_who_has_not_begun():
    """vLLM puts a preempted request in front of its queue."""
    sessions = [session(0, 0.0, (40, 60)), session(1, 0.001, (40, 60)), session(2, 0.002, (50, 5))]
    cluster = {
        "prefills": 0,
        "router": Local(),
        "batching": Chunked(max_num_batched_tokens=48, max_num_seqs=8),
        "cost": LinearCost(token_s=0.0001, decode_s=0.005, slope_s=2e-06, floor_s=0.006),
    }
    built, run = run_on(cluster, sessions, kv_capacity=120, keep_s=0.0)
    check_conserved(built, run, sessions)
    tasks = sorted(zip(run.tasks["started_s"], run.tasks["session_id"], run.tasks["kind"], strict=True))
    assert [each[1:] for each in tasks[2:]] == [(1, "recompute"), (2, "initial")]


@settings(max_examples=40)
@given(clusters(), session_lists())
def test_macro_steps_equal_micro_steps(cluster, sessions):
    """An event for every decode step instead of one for a run of them: the same times, but for rounding."""
    _, macro = run_on(cluster, sessions)
    _, micro = run_on(cluster, sessions, max_run_steps=1)
    assert micro.facts["num_events"] >= macro.facts["num_events"]
    for column in ("ready_s", "first_token_s", "finished_s"):
        assert macro.rounds[column] == pytest.approx(micro.rounds[column], abs=1e-9)
    for column in ("worker_id", "is_local", "computed_tokens"):
        assert macro.tasks[column] == micro.tasks[column]
    ours, theirs = observe(macro), observe(micro)
    assert ours.session_itl_s["mean"] == pytest.approx(theirs.session_itl_s["mean"], abs=1e-9, nan_ok=True)
    # Inside a run a gap stands for the mean of its run: the context grows by a few tokens only.
    assert ours.session_itl_s["max"] == pytest.approx(theirs.session_itl_s["max"], rel=0.03, nan_ok=True)


@settings(max_examples=15)
@given(clusters(), session_lists())
def test_same_run_same_bytes(cluster, sessions):
    first, second = (run_on(cluster, sessions)[1] for _ in range(2))
    assert pickle.dumps(first) == pickle.dumps(second)
