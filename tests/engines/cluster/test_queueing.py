"""The very cluster code against queueing theory, and against the recursions the theory rests on.

References are exact (``support/waits.py``): Erlang for M/M/k, Crommelin and Franx for M/D/k, and where there is no
formula a long recursion. What the usual approximations are off is tested too.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from support.clusters import LinearCost, poisson_singles
from support.lee_longton import mean_wait, wait_quantile
from support.waits import deterministic, markov, sampled

from engines.ampd.planner import erlang_c
from engines.cluster.decode import DecodeWorker, Sink
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import EventLoop, OpenLoop, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import PrefillWorker
from engines.errors import UserError
from engines.policies.batching import ONE_BY_ONE, Owed
from engines.policies.routing import LeastKvMemory, Local, RemoteOnly
from engines.policies.views import PrefillQueue, PrefillTask

MICRO = LinearCost(token_s=1e-6)
"""A service time of 1 s is a prompt of a million tokens: whole tokens round it by less than one in a million."""
SHARED = RemoteOnly("shared")
Service = Callable[[np.random.Generator, int], np.ndarray]


def pollaczek_khinchine(load: float, cv2: float) -> float:
    """Mean wait of M/G/1; cv2 is 0 for M/D/1 and 1 for M/M/1."""
    return load / (1 - load) * (1 + cv2) / 2


def lindley(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Waits of these very customers before one server."""
    walk = np.concatenate(([0.0], np.cumsum(services[:-1] - np.diff(arrivals))))
    return walk - np.minimum.accumulate(walk)


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


def colocated() -> DecodeSimulation:
    built = DecodeSimulation(binder=LeastKvMemory(), router=Local())
    built.add(
        DecodeWorker(
            built, worker_id=0, degree=1, cost=MICRO, queue=PrefillQueue(), batching=ONE_BY_ONE, kv_capacity=10**15
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


def of_recursion(sessions: Sequence[Session], servers: int) -> np.ndarray:
    arrivals = [session.arrival_s for session in sessions]
    return earliest_free(arrivals, [1e-6 * session.prefill_tokens for session in sessions], servers)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("service", [constant, exponential, lognormal])
def test_every_wait_is_that_of_the_recursion(servers, service):
    sessions = list(poisson_singles(2000, 0.9 * servers, service, seed=3))
    run = queue(servers).run(OpenLoop(sessions=sessions))
    assert waits(run) == pytest.approx(of_recursion(sessions, servers), abs=1e-6)


def test_colocated_worker_is_the_same_queue():
    sessions = list(poisson_singles(2000, 0.8, exponential, seed=4))
    assert waits(colocated().run(OpenLoop(sessions=sessions))) == pytest.approx(of_recursion(sessions, 1), abs=1e-6)


class Counter:
    """The least that a prefill worker needs of a simulation, so that a hundred thousand customers take a second."""

    def __init__(self, arrivals: np.ndarray, tokens: np.ndarray, servers: int) -> None:
        self.loop = EventLoop()
        self.owed = Owed()
        self.started_s = [0.0] * len(arrivals)
        self._customers = iter(zip(range(len(arrivals)), arrivals.tolist(), tokens.tolist(), strict=True))
        queue = PrefillQueue()
        self._workers = [
            PrefillWorker(self, worker_id=index, degree=1, cost=MICRO, queue=queue, batching=ONE_BY_ONE, overlaps=False)
            for index in range(servers)
        ]
        self._expect_next()
        self.loop.run()

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None:
        self.started_s[task.order] = now

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        """Nobody decodes."""
        self.owed.ended(task)

    def _expect_next(self) -> None:
        found = next(self._customers, None)
        if found is not None:
            order, arrival_s, tokens = found
            self.loop.at(arrival_s, self._arrive, order, tokens)

    def _arrive(self, order: int, tokens: int) -> None:
        self._expect_next()
        now = self.loop.now
        worker = self._workers[0] if len(self._workers) == 1 else SHARED.pick(self._workers, now)
        task = PrefillTask(order, order, order, 0, "initial", 0, tokens, now, now)
        self.owed.add(task)
        worker.enqueue(task)


def served(
    num: int, servers: int, load: float, service: Service, seed: int, *, first: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Waits of so many customers in the order they came, and those of the recursion; in mean service times. ``first`` of
    them alone are simulated: those who come later change nothing for them."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / (load * servers), num))
    tokens = np.maximum(1, np.rint(service(rng, num))).astype(np.int64)
    found = np.array(Counter(arrivals[:first], tokens[:first], servers).started_s) - arrivals[:first]
    expected = (
        lindley(arrivals, tokens * 1e-6)
        if servers == 1
        else earliest_free(arrivals.tolist(), (tokens * 1e-6).tolist(), servers)
    )
    return found, expected


@pytest.mark.parametrize(
    ("service", "exact"), [(constant, deterministic), (exponential, markov)], ids=["M/D/1", "M/M/1"]
)
def test_million_waits_of_one_server_are_pollaczek_and_khinchines(service, exact):
    """At half load, where a mean of 10^6 waits has a standard error of 0.3 % (M/D/1) and 0.5 % (M/M/1). Of the same
    customers the first 20,000 are simulated, and each waits as long as the recursion says."""
    expected = exact(1, 0.5)
    found, recursion = served(10**6, 1, 0.5, service, seed=1, first=20_000)
    np.testing.assert_allclose(found, recursion[: len(found)], atol=1e-5)
    assert len(found) == 20_000
    assert expected.mean == pytest.approx(pollaczek_khinchine(0.5, 0.0 if service is constant else 1.0))
    assert recursion.mean() == pytest.approx(expected.mean, rel=0.02)
    for share in (0.75, 0.9, 0.95):
        assert np.quantile(recursion, share) == pytest.approx(expected.quantile(share), rel=0.02)


@pytest.mark.parametrize("service", [constant, exponential, lognormal])
def test_tail_of_several_servers(service):
    """M/G/2 at half load: P95 and P99 of 10^5 waits, which have standard errors of 1 to 2.4 %. The first 10,000 are
    simulated, and each is that of the recursion."""
    if service is lognormal:
        known = sampled(lambda rng, num: 1e-6 * lognormal(rng, num), 2, 0.5, num_customers=1000)
        expected = np.quantile(known, (0.95, 0.99)).tolist()
    else:
        exact = (deterministic if service is constant else markov)(2, 0.5)
        expected = [exact.quantile(0.95), exact.quantile(0.99)]
    found, recursion = served(10**5, 2, 0.5, service, seed=2, first=10_000)
    np.testing.assert_allclose(found, recursion[: len(found)], atol=1e-5)
    assert len(found) == 10_000
    assert np.quantile(recursion, (0.95, 0.99)) == pytest.approx(expected, rel=0.05)


def test_wait_of_constant_services_is_erlangs_series():
    """M/D/1 (Erlang 1909): P(W <= t) = (1 - rho) sum of (-x)^k / k! e^x with x = rho (t - k), for short waits."""
    for load in (0.3, 0.7, 0.9):
        wait = deterministic(1, load)
        assert wait.mean == pytest.approx(load / (2 * (1 - load)))
        for time in (0.0, 0.4, 1.0, 2.7, 5.5):
            terms = ((load * (time - k), k) for k in range(int(time) + 1))
            below = (1 - load) * sum((-x) ** k / math.factorial(k) * math.exp(x) for x, k in terms)
            assert wait.exceeds(time) == pytest.approx(1 - below, abs=1e-9)


@pytest.mark.parametrize("exact", [markov, deterministic])
@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (3, 0.6), (8, 0.7)])
def test_exact_waits_are_consistent_and_those_of_the_recursion(exact, servers, load):
    wait = exact(servers, load)
    times = np.linspace(0, 40 / (servers * (1 - load)), 4001)
    beyond = np.array([wait.exceeds(float(time)) for time in times])
    assert (np.diff(beyond) <= 1e-12).all()
    assert np.trapezoid(beyond, times) == pytest.approx(wait.mean, rel=1e-3)
    draw = constant if exact is deterministic else exponential
    found = sampled(lambda rng, num: 1e-6 * draw(rng, num), servers, load, num_queues=1000, num_customers=1000)
    assert found.mean() == pytest.approx(wait.mean, rel=0.03)


def test_erlang_c_is_the_share_that_waits():
    for servers, load in ((1, 0.4), (8, 0.8)):
        assert markov(servers, load).exceeds(0.0) == pytest.approx(erlang_c(servers, servers * load))
        for share in (0.9, 0.99):
            assert wait_quantile(share, servers, load, 1.0) == pytest.approx(markov(servers, load).quantile(share))


def test_approximations_of_constant_services_are_off_by_less_than_a_tenth():
    """Lee and Longton's mean is 6 % low, an exponential tail of M/D/1 7 % high: no yardsticks for a simulation."""
    assert mean_wait(8, 0.8, 0.0) / deterministic(8, 0.8).mean == pytest.approx(0.94, abs=0.01)
    assert wait_quantile(0.95, 1, 0.7, 0.0) / deterministic(1, 0.7).quantile(0.95) == pytest.approx(1.07, abs=0.01)


def test_erlang_c_against_its_definition():
    for servers, offered in ((1, 0.4), (2, 1.5), (5, 4.0), (30, 25.0)):
        terms = [offered**count / math.factorial(count) for count in range(servers)]
        last = offered**servers / math.factorial(servers) * servers / (servers - offered)
        assert erlang_c(servers, offered) == pytest.approx(last / (sum(terms) + last))


def test_closed_forms_agree_where_they_overlap():
    assert mean_wait(1, 0.6, 0.3) == pytest.approx(pollaczek_khinchine(0.6, 0.3))
    assert mean_wait(1, 0.5, 1.0) == pytest.approx(1.0)
    assert wait_quantile(0.5, 4, 0.25, 1.0) == 0.0
    # M/M/1: P(W > t) = rho exp(-(1 - rho) t).
    assert wait_quantile(0.95, 1, 0.8, 1.0) == pytest.approx(math.log(0.8 / 0.05) / 0.2)


@pytest.mark.parametrize("load", [1.0, 1.2])
def test_load_without_end_is_refused(load):
    with pytest.raises(UserError, match="needs more than 2 servers: the queue grows without bound"):
        erlang_c(2, 2 * load)
