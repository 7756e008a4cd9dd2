"""Routers and batching policies are held to the prefills that were asked for: each computed whole, once, somewhere."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.clusters import LinearCost
from support.liars import Batches, Routes, forgets_history, pretends, shares
from support.prefill import TokenCost

from baselines.ar.sglang import sglang
from engines.cluster.decode import DecodeWorker
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import PrefillWorker
from engines.errors import RunError
from engines.laps.batching import Nearest, WithGraphs
from engines.laps.cluster import PrefillCluster
from engines.laps.system import PrefillSystem
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Decision, LeastKvMemory
from engines.policies.views import NextStep, PrefillQueue, Share
from engines.server.ar import AtMost

SESSIONS = [Session(i, 0.1 * i, (Round(100, 3), Round(20, 2))) for i in range(3)]
REMOTE = Decision(1, False, "there")


def cluster(router: Any = None, batching: Any = ONE_BY_ONE, queue: Callable[[], PrefillQueue] = PrefillQueue) -> Any:
    """One decode worker, 0, and one prefill worker, 1."""
    simulation = DecodeSimulation(binder=LeastKvMemory(), router=router or Routes(lambda *_: REMOTE))
    made = {"degree": 1, "cost": LinearCost(), "batching": batching}
    simulation.add(DecodeWorker(simulation, worker_id=0, kv_capacity=10_000, queue=queue(), **made))
    simulation.add(PrefillWorker(simulation, worker_id=1, queue=queue(), **made))
    return simulation.run(OpenLoop(sessions=SESSIONS))


def instances(
    router: Any = None, batching: Any = ONE_BY_ONE, queue: Callable[[], PrefillQueue] = PrefillQueue, num: int = 2
) -> Any:
    """Prefill instances of LAPS's kind."""
    system = PrefillSystem(
        make_batching=lambda: batching,
        make_queue=queue,
        make_router=(lambda: router) if router else sglang().make_router,
    )
    return PrefillCluster(system=system, cost=TokenCost(), num_instances=num).simulate(OpenLoop(sessions=SESSIONS))


BATCHES: dict[str, tuple[Any, str]] = {
    "twice": (lambda made, now: NextStep([*made.shares, *made.shares]), "runs prefill 0 twice in one step"),
    "too many": (lambda made, now: shares(made, 2), "runs 200 tokens of prefill 0, which has 100 left"),
    "none": (lambda made, now: shares(made, 0), "runs 0 tokens of prefill 0, which has 100 left"),
    "says it is done": (lambda made, now: pretends(made), "changed prefill 0: left=1, where 100 is due"),
    "no plan": (lambda made, now: None, "batching policy Batches answers None, which is no NextStep"),
    "no share": (lambda made, now: NextStep([(1, 2)]), "which is no share of a prefill"),
    "no shares": (lambda made, now: NextStep(None), "plans None, which are no shares of prefills"),
    "shares once": (lambda made, now: NextStep(each for each in made.shares), "which are no shares of prefills"),
    "beyond all time": (lambda made, now: NextStep((), wake_s=10**400), "0, which is no time"),
    "no time": (lambda made, now: NextStep((), wake_s=float("nan")), "asked again at nan, which is no time"),
    "another": (
        lambda made, now: NextStep([Share(type(made.shares[0].task)(0, 0, 0, 0, "initial", 0, 1, 0.0), 1)]),
        "runs prefill 0, which has ended or was never asked for",
    ),
    "fails": (lambda made, now: 1 / 0, "policy Batches.next_step fails (ZeroDivisionError: division by zero)"),
}


@pytest.mark.parametrize("run", [cluster, instances])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_that_cannot_be_ends_the_run_with_a_sentence(run, name):
    how, said = BATCHES[name]
    with pytest.raises(RunError, match=re.escape(said)):
        run(batching=Batches(how))


@pytest.mark.parametrize("name", ["no plan", "fails"])
@pytest.mark.parametrize(
    "wrap", [lambda own: WithGraphs(own, Nearest([], None)), lambda own: AtMost(batching=own, max_num_seqs=9)]
)
def test_the_policy_within_one_of_ours_is_named(wrap, name):
    how, said = BATCHES[name]
    with pytest.raises(RunError, match=re.escape(said)):
        instances(batching=wrap(Batches(how)))


class Waits:
    def next_step(self, at: object, now: float) -> NextStep:
        return NextStep((), wake_s=now + 1e-9)


@pytest.mark.parametrize("run", [cluster, instances])
def test_a_policy_that_waits_for_ever_is_not_waited_for(run):
    with pytest.raises(RunError, match="asked to be asked again 10000 times, and runs nothing of what waits"):
        run(batching=Waits())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda *_: Decision(7, False, "x"), "router Routes sends a prefill to worker 7, prefill workers are 1"),
        (lambda *_: Decision(1, True, "x"), "sends a prefill to worker 1 as local, its session lives on 0"),
        (lambda *_: (1, False, "x"), "which is no Decision of a worker's id, True or False, and words"),
        (lambda *_: Decision(0, "yes", "x"), "which is no Decision"),
        (lambda task, *_: forgets_history(task) or REMOTE, "changed prefill 0: left="),
        (lambda task, *_: setattr(task, "ready_s", 9.0) or REMOTE, "changed prefill 0: ready_s=9.0, where 0.0 is due"),
        (lambda task, home, prefills: {}[5], "policy Routes.route fails (KeyError: 5)"),
    ],
)
def test_a_route_that_leads_nowhere_or_changes_the_work_is_refused(how, said):
    with pytest.raises(RunError, match=re.escape(said)):
        cluster(Routes(how))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda *_: 5, "router Routes picks instance 5 of 0 to 1"),
        (lambda *_: -1, "router Routes picks instance -1 of 0 to 1"),
        (lambda task, *_: forgets_history(task) or 0, "changed prefill 0: left=1, where 100 is due"),
    ],
)
def test_an_instance_is_one_of_them(how, said):
    with pytest.raises(RunError, match=re.escape(said)):
        instances(Routes(how))


def test_the_router_of_a_lone_instance_is_asked_too():
    with pytest.raises(RunError, match="router Routes picks instance 1 of 0 to 0"):
        instances(Routes(lambda *_: 1), num=1)


class Doubles(PrefillQueue):
    def push(self, task: Any) -> None:
        super().push(task)
        super().push(task)


@pytest.mark.parametrize("run", [cluster, instances])
def test_a_queue_that_gives_a_prefill_out_again_is_found(run):
    with pytest.raises(RunError, match="prefill 0"):
        run(queue=Doubles)


def test_a_router_that_completes_a_running_prefill_is_found():
    def how(task: Any, home: Any, prefills: Any) -> Decision:
        for begun in prefills[0].begun:
            begun.computed = begun.tokens
        return REMOTE

    with pytest.raises(RunError, match="changed prefill 1: left=0, where 40 is due"):
        cluster(Routes(how), Batches(lambda made, now: shares(made, 0.6)))


def test_memory_that_a_policy_makes_larger_counts_for_nothing():
    def how(task: Any, home: Any, prefills: Any) -> Decision:
        home.kv.capacity = 10**12
        return REMOTE

    assert cluster(Routes(how)).workers["kv_capacity"][0] == 10_000
