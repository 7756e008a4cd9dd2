"""A simulated cluster in the live workers' place: profiled by its own tables, its twin is the cluster itself."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.clusters import LinearCost, TokenEstimator, links, serve, session, simulation

from engines.ampd.live.profile import LiveProfile, _fit, simulate_live
from engines.cluster.record import ClusterRun, observe
from engines.cluster.sessions import Session
from engines.policies.routing import LeastKvMemory, Local, RemoteOnly
from engines.policies.views import PrefillQueue

COST = LinearCost(token_s=1e-3, decode_s=10e-3, slope_s=1e-5)
KV = links(2e-5, latency_s=3e-3)


def twin_of(profile: LiveProfile, sessions: list[Session], *, num: int) -> ClusterRun:
    """``num`` homes and as many prefill workers."""
    return simulate_live(
        profile,
        sessions,
        num_homes=num,
        num_prefills=num,
        binder=LeastKvMemory(),
        router=RemoteOnly(),
        estimator=TokenEstimator(),
        make_queue=PrefillQueue,
        kv_capacity=10**9,
    )


def test_twin_of_a_known_cluster_is_that_cluster():
    numbers = itertools.count()
    alone: list[Session] = []
    for history, tokens in itertools.product((0, 100, 500), (20, 100, 400, 800)):
        rounds = ((history, 1), (tokens, 1)) if history else ((tokens, 1),)
        alone.append(session(number := next(numbers), 100.0 * number, *rounds))
    remote = serve(simulation(prefills=1, cost=COST, router=RemoteOnly(), kv_links=KV), *alone)
    local = serve(simulation(cost=COST, router=Local()), *alone)
    steps = [(b, b * c, 10e-3 + 1e-5 * b * c) for b, c in itertools.product((1, 2, 4, 8), (64, 768))]
    profile = _fit(remote, local, steps, 416)

    assert profile.performance.prefill_s(100, 300, 1) == pytest.approx(0.3, rel=1e-6)
    assert profile.performance.transfer_s(500, 1, 1) == pytest.approx(13e-3, rel=1e-6)
    assert profile.performance.decode_s(4, 1) == pytest.approx(10e-3 + 4 * 416e-5, rel=1e-6)
    assert profile.dispatch_s == pytest.approx(0.0, abs=1e-9)

    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.3, 40)).tolist()
    sessions = [
        session(index, times[index], *((int(n), int(rng.integers(1, 30)), 0.2) for n in rng.integers(20, 700, 3)))
        for index in range(40)
    ]
    built = simulation(homes=2, prefills=2, cost=COST, router=RemoteOnly(), kv_links=KV, estimator=TokenEstimator())
    truth = observe(serve(built, *sessions))
    twin = observe(twin_of(profile, sessions, num=2))
    np.testing.assert_allclose(twin.ttft_s, truth.ttft_s, rtol=1e-4)
    np.testing.assert_allclose(twin.round_itl_s["mean"], truth.round_itl_s["mean"], rtol=1e-4)
    np.testing.assert_allclose(twin.e2el_s, truth.e2el_s, rtol=1e-4)

    slow = twin_of(replace(profile, dispatch_s=0.5), [session(0, 0.0, (500, 1), (20, 1))], num=1).transfers
    took = np.array(slow["end_s"]) - np.array(slow["start_s"])
    assert slow["content"] == ["increment", "history", "increment"]
    assert took.round(2).tolist() == [0.51, 0.01, 0.5]  # a dispatch lies with the way back alone
