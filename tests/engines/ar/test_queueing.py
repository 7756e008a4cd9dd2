"""The very cluster code against queueing theory, and against the recursions the theory rests on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from support.clusters import LinearCost, poisson_singles

from engines.ar.cluster.batching import ONE_BY_ONE
from engines.ar.cluster.dispatch import RemoteOnly
from engines.ar.cluster.instance import Instance
from engines.ar.cluster.policy import LeastKvMemory, Local
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.queue import PrefillQueue
from engines.ar.cluster.record import ClusterRun
from engines.ar.cluster.simulation import Simulation
from engines.ar.cluster.sink import Sink
from engines.ar.queueing import erlang_c, mean_wait_s, pollaczek_khinchine_s, wait_quantile_s
from engines.ar.session import OpenLoop, Session
from engines.errors import UserError

MICRO = LinearCost(token_s=1e-6)
"""A service time of 1 s is a prompt of a million tokens: whole tokens round it by less than one in a million."""
Service = Callable[[np.random.Generator, int], np.ndarray]


def constant(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.full(num, 1e6)


def exponential(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.exponential(1e6, num)


def lognormal(rng: np.random.Generator, num: int) -> np.ndarray:
    return 1e6 * np.exp(0.6 * rng.standard_normal(num) - 0.18)


def queue(servers: int) -> Simulation:
    """Prefill workers that share one queue, before a decode side that takes no time."""
    built = Simulation(binder=LeastKvMemory(), router=RemoteOnly("shared"))
    built.add_home(Sink(built, worker_id=0))
    shared = PrefillQueue()
    for index in range(servers):
        built.add_prefill(
            PrefillWorker(
                built, worker_id=1 + index, degree=1, cost=MICRO, queue=shared, batching=ONE_BY_ONE, overlaps=False
            )
        )
    return built


def colocated() -> Simulation:
    built = Simulation(binder=LeastKvMemory(), router=Local())
    built.add_home(
        Instance(
            built, worker_id=0, degree=1, cost=MICRO, queue=PrefillQueue(), batching=ONE_BY_ONE, kv_capacity=10**15
        )
    )
    return built


def waits(run: ClusterRun) -> np.ndarray:
    return np.array(run.tasks["started_s"]) - np.array(run.tasks["ready_s"])


def earliest_free(sessions: Iterable[Session], servers: int) -> np.ndarray:
    """Kiefer and Wolfowitz: each customer goes to the server that is free first (Lindley's recursion for one)."""
    free = [0.0] * servers
    found = []
    for session in sessions:
        start = max(session.arrival_s, free[0])
        found.append(start - session.arrival_s)
        heapq.heapreplace(free, start + session.prefill_tokens * 1e-6)
    return np.array(found)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("service", [constant, exponential, lognormal])
def test_every_wait_is_that_of_the_recursion(servers: int, service: Service) -> None:
    sessions = list(poisson_singles(5000, 0.9 * servers, service, seed=3))
    run = queue(servers).run(OpenLoop(sessions=sessions))
    assert waits(run) == pytest.approx(earliest_free(sessions, servers), abs=1e-6)


def test_colocated_worker_is_the_same_queue() -> None:
    sessions = list(poisson_singles(5000, 0.8, exponential, seed=4))
    assert waits(colocated().run(OpenLoop(sessions=sessions))) == pytest.approx(earliest_free(sessions, 1), abs=1e-6)


@pytest.mark.parametrize(("service", "cv2"), [(constant, 0.0), (exponential, 1.0)])
def test_mean_wait_of_one_server_is_pollaczek_and_khinchine(service: Service, cv2: float) -> None:
    """30,000 arrivals: the mean wait scatters by about 3 %. ``benchmarks/cluster.py queues`` does 10^6, within 2 %."""
    run = queue(1).run(OpenLoop(sessions=poisson_singles(30_000, 0.5, service, seed=11)))
    assert waits(run).mean() == pytest.approx(pollaczek_khinchine_s(0.5, 1.0, cv2), rel=0.1)


def test_tail_of_many_servers_is_erlangs() -> None:
    run = queue(4).run(OpenLoop(sessions=poisson_singles(60_000, 2.0, exponential, seed=5)))
    waited = waits(run)
    assert (waited > 1e-9).mean() == pytest.approx(erlang_c(4, 2.0), rel=0.06)
    for quantile in (0.9, 0.95):
        expected = wait_quantile_s(quantile, 4, 2.0, 1.0)
        assert np.quantile(waited, quantile) == pytest.approx(expected, rel=0.08)


def test_erlang_c_against_its_definition() -> None:
    for servers, offered in ((1, 0.4), (2, 1.5), (5, 4.0), (30, 25.0)):
        terms = [offered**count / math.factorial(count) for count in range(servers)]
        last = offered**servers / math.factorial(servers) * servers / (servers - offered)
        assert erlang_c(servers, offered) == pytest.approx(last / (sum(terms) + last))


def test_closed_forms_agree_where_they_overlap() -> None:
    assert mean_wait_s(1, 0.6, 1.0, 0.3) == pytest.approx(pollaczek_khinchine_s(0.6, 1.0, 0.3))
    assert mean_wait_s(1, 0.5, 1.0, 1.0) == pytest.approx(1.0)
    assert wait_quantile_s(0.5, 4, 1.0, 1.0) == 0.0
    # M/M/1: P(W > t) = rho exp(-(1 - rho) t).
    assert wait_quantile_s(0.95, 1, 0.8, 1.0) == pytest.approx(math.log(0.8 / 0.05) / 0.2)


@pytest.mark.parametrize("rate", [1.0, 1.2])
def test_load_without_end_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="grows without bound"):
        pollaczek_khinchine_s(rate, 1.0, 0.0)
    with pytest.raises(UserError, match="needs more than 2 servers"):
        mean_wait_s(2, 2 * rate, 1.0)
