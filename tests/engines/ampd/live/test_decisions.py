"""A live queue's choices are those of one object that is told of every push and take, whatever the policy keeps.

The live coordinator in the simulator's place makes the simulator's run, and its log makes its decisions again.

The simulated cluster keeps its clock and its steps; where it would ask its own policies and read its own queues and
windows, it tells Redis what happened and takes what the live coordinator and the live queues decide.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import hardware, session
from support.live import Hand, client_of_any, needs_store

from engines.ampd.live.coordinator import Coordinator
from engines.ampd.live.decisions import Dequeued, Replay, choose, order_line, replay
from engines.ampd.live.store import Store, decode_hash, from_hash
from engines.ampd.performance import profile_hardware
from engines.ampd.policies import AdaptiveRouter, ReorderingQueue, RoutingConfig
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster.decode import DecodeWorker, Run
from engines.cluster.hardware import Deployment
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import EventLoop, OpenLoop, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import Live, PrefillWorker
from engines.errors import RunError
from engines.policies.batching import ONE_BY_ONE, LateShare, OnTimeQueue
from engines.policies.own import BINDER, QUEUE, Plugin
from engines.policies.routing import Binder, Decision, LeastKvMemory, RemoteOnly, Router
from engines.policies.views import DecodeView, OpenQueue, PrefillQueue, PrefillTask, PrefillView, Slo


def task(task_id: int, estimate_s: float = 0.1, ready_s: float = 0.0) -> PrefillTask:
    return PrefillTask(task_id, task_id, task_id, 0, "initial", 0, 8, ready_s, ready_s, estimate_s)


class Turns(PrefillQueue):
    """The newest now and then, by counts of what came and what left."""

    num_taken = num_pushed = 0

    def push(self, task: PrefillTask) -> None:
        self.num_pushed += 1
        super().push(task)

    def take(self, now: float) -> PrefillTask:
        self.num_taken += 1
        if (self.num_taken + self.num_pushed) % 3 == 0:
            self._tasks.rotate(1)
        return super().take(now)


class OpenTurns(OpenQueue):
    """The oldest and the newest in turn."""

    num_taken = 0

    def peek(self, now: float) -> PrefillTask:
        return list(self)[-(self.num_taken % 2)]

    def take(self, now: float) -> PrefillTask:
        found = super().take(now)
        self.num_taken += 1
        return found


QUEUES: dict[str, Callable[[], PrefillQueue]] = {
    "fcfs": PrefillQueue,
    "window": partial(ReorderingQueue, ttft_s=0.3),
    "on-time": partial(OnTimeQueue, ttft_s=0.3, late=LateShare(share=0.4, patience=1.0)),
    "own": Turns,
    "own, open": OpenTurns,
}


@pytest.mark.parametrize("name", QUEUES)
@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.01, 0.5)), min_size=1, max_size=25),
    too_late=st.sets(st.integers(0, 24)),
)
def test_choices_are_those_of_one_object(name, jobs, too_late):
    """(gap, work) of each; choices ``too_late`` were made before the last of those that waited came, and are made again."""
    make = QUEUES[name]
    simulated, last, waiting = make(), None, list[PrefillTask]()
    came, now, coming = 0.0, 0.0, list[PrefillTask]()
    for index, (gap_s, work_s) in enumerate(jobs):
        came += gap_s
        coming.append(task(index, work_s, came))
    for number in range(len(jobs)):
        now = max(now, coming[0].ready_s) if not waiting and coming else now
        while coming and coming[0].ready_s <= now:
            simulated.push(replace(coming[0]))
            waiting.append(coming.pop(0))
        if number in too_late and len(waiting) > 1:
            choose(make, last, [replace(each) for each in waiting[:-1]], now)
        choice = choose(make, last, [replace(each) for each in waiting], now)
        taken = simulated.take(now)
        assert choice.taken == taken
        assert choice.rest == list(simulated)
        last, waiting, now = choice.queue, choice.rest, now + taken.estimate_s


def test_what_was_withdrawn_is_gone_and_an_open_queue_keeps_what_it_kept():
    tasks = [task(index) for index in range(5)]
    first = choose(OpenTurns, None, tasks, 0.0)
    assert (first.taken, first.rest) == (tasks[0], tasks[1:])
    again = replace(tasks[2], enqueued_s=1.0)
    second = choose(OpenTurns, first.queue, [tasks[1], tasks[4], again], 1.0)
    assert (second.taken, second.rest) == (again, [tasks[1], tasks[4]]), "the newest's turn"
    assert second.queue.backlog_s == pytest.approx(0.2)
    assert list(first.queue) == tasks[1:], "another choice may be made of it"


def test_where_a_task_was_withdrawn_any_other_queue_begins_anew():
    tasks = [task(index) for index in range(5)]
    first = choose(Turns, None, tasks[:4], 0.0)
    assert (first.taken, first.rest) == (tasks[0], tasks[1:4])
    left = [tasks[1], tasks[4]]
    assert choose(Turns, first.queue, left, 0.0)[:2] == (tasks[4], [tasks[1]]), "the first choice of three"


def test_a_queue_that_loses_a_task_is_told_of():
    class Loses(PrefillQueue):
        def take(self, now: float) -> PrefillTask:
            self._tasks.pop()
            return super().take(now)

    with pytest.raises(RunError, match="queue Loses gives back other tasks than it was given: correct it"):
        choose(Loses, None, [task(0), task(1)], 0.0)


def test_a_queue_that_cannot_be_copied_is_told_of():
    class Locked(PrefillQueue):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    first = choose(Locked, None, [task(0), task(1)], 0.0)
    with pytest.raises(RunError, match=r"queue Locked cannot be copied \(TypeError: .*lock.*\): keep plain data"):
        choose(Locked, first.queue, first.rest, 0.0)


pytestmark = needs_store

HARDWARE = hardware()
MODEL = profile_hardware(HARDWARE, num_gpus=8, decode_context=512)
DEPLOYMENT = Deployment.disaggregated(2, 2, 2, 2)
FOREVER = 1e9
_OWN = ((BINDER, "Turns"), (QUEUE, "Newest"))


class LoopClock:
    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.now


class LiveQueue(PrefillQueue):
    """Takes what a live worker would claim: the policy's choice among the tasks that Redis holds."""

    make: Callable[[], PrefillQueue]
    mirror: "Mirror"
    worker: PrefillWorker | DecodeWorker
    last: PrefillQueue | None = None
    """The policy's own, as its last choice left it."""

    def take(self, now: float) -> PrefillTask:
        store, worker_id = self.mirror.store, self.worker.worker_id
        version, _, found, _ = store.call("queue", worker_id, "a")
        tasks = [from_hash(PrefillTask, decode_hash(fields)) for fields in found]
        before = [asdict(task) for task in tasks]
        choice = choose(self.make, self.last, tasks, now)
        rest = [part for task in choice.rest for part in (task.task_id, task.postponed)]
        staged = isinstance(self.worker, PrefillWorker) and self.worker.is_busy
        line = order_line(now, worker_id, before, choice, is_first=self.last is None)
        self.last = choice.queue
        taken = choice.taken
        said = store.call(
            "claim",
            worker_id,
            "a",
            f"c{taken.task_id}",
            version,
            taken.task_id,
            taken.postponed,
            FOREVER,
            staged,
            line,
            *rest,
        )
        self.mirror.fence[taken.task_id] = decode_hash(said[0])["fence"]
        return self._obeyed(choice)

    def _obeyed(self, choice: Dequeued) -> PrefillTask:
        own = {task.task_id: task for task in self._tasks}
        ordered = [choice.taken, *choice.rest]
        assert sorted(own) == sorted(task.task_id for task in ordered)
        self._tasks.clear()
        for task in ordered:
            own[task.task_id].postponed = task.postponed
            self._tasks.append(own[task.task_id])
        return self._taken(self._tasks.popleft())


class LivePolicies:
    """Binder and router of the simulation, which ask the live coordinator."""

    def __init__(self, mirror: "Mirror") -> None:
        self.mirror, self.num_bound = mirror, 0

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        store, order = self.mirror.store, self.num_bound
        self.num_bound += 1
        self.mirror.report(decodes)
        self.mirror.coordinator.open(order)
        assert self.mirror.coordinator.settle() == 0
        return int(store.fields("session", order)["home"])

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        self.mirror.report([home])
        self.mirror.check_views(home, prefills, now)
        live = self.mirror._lives[task.order]
        is_last = task.round_index == len(live.session.rounds) - 1
        self.mirror.coordinator.begin(
            task.order, task.round_index, np.zeros(task.tokens), decode_tokens=live.left, is_last=is_last, ready_s=now
        )
        found = self.mirror.store.fields("task", task.task_id)
        assert (int(found["history"]), int(found["tokens"])) == (task.history, task.tokens)
        return Decision(int(found["worker"]), found["is_local"] == "1", found["reason"])


class MirroredHome(DecodeWorker):
    mirror: "Mirror"

    def _book_run(self, ran: Run) -> None:
        parts = self.batch.token_runs(ran, ran.steps)
        members = [(live.order, 0) for live in self.batch._members.values()]
        self.mirror.stepped(self.worker_id, members, sum(part.tokens * part.gap_s for part in parts))
        super()._book_run(ran)


class Mirror(DecodeSimulation):
    """Tells Redis what workers would."""

    def __init__(
        self, client: Any, prefix: str, router: Router, *, binder: Binder, make_queue: Callable[[], PrefillQueue]
    ) -> None:
        policies = LivePolicies(self)
        super().__init__(binder=policies, router=policies, estimator=MODEL, links=HARDWARE.links)
        self.store = Store(client, prefix, clock=LoopClock(self.loop))
        self.coordinator = Coordinator(self.store, binder=binder, router=router, estimator=MODEL)
        self.make_queue = make_queue
        self.fence: dict[int, str] = {}
        self.num_steps = 0
        for number in range(2):
            home_queue = LiveQueue()
            home = MirroredHome(
                self,
                worker_id=number,
                degree=2,
                cost=HARDWARE.cost(2),
                queue=home_queue,
                batching=ONE_BY_ONE,
                kv_capacity=HARDWARE.kv_capacity(2),
                max_run_steps=1,
            )
            home.mirror = self
            self._meet(home, home_queue, "decode")
            self.add(home)
        for number in (2, 3):
            queue = LiveQueue()
            worker = PrefillWorker(
                self,
                worker_id=number,
                degree=2,
                cost=HARDWARE.cost(2, is_remote=True),
                queue=queue,
                batching=ONE_BY_ONE,
            )
            self._meet(worker, queue, "prefill")
            self.add(worker)

    def _meet(self, worker: DecodeWorker | PrefillWorker, queue: LiveQueue, role: str) -> None:
        queue.mirror, queue.worker, queue.make = self, worker, self.make_queue
        self.store.call("register", worker.worker_id, "a", role, worker.degree, "", 10**9, FOREVER)

    def report(self, homes: Sequence[DecodeView]) -> None:
        """What a live home says of itself with every step."""
        for home in homes:
            assert isinstance(home, DecodeWorker)
            said = {"kv_tokens": home.kv_tokens, "batch": home.batch.size, "token_s": repr(home.batch.token_s)}
            self.store.client.hset(self.store.key("worker", home.worker_id), mapping=said)

    def check_views(self, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> None:
        """What Redis says of the workers is what the simulator knows of them."""
        live = {member.view.worker_id: member.view for member in self.store.members()}
        for worker in (home, *prefills):
            view = live[worker.worker_id]
            assert view.backlog_s == pytest.approx(worker.backlog_s, abs=1e-9)
            assert view.busy_s(now) == pytest.approx(worker.busy_s(now), abs=1e-9)
            assert view.oldest_wait_s(now) == pytest.approx(worker.oldest_wait_s(now), abs=1e-9)
            assert view.backlog_tokens == worker.backlog_tokens
        assert live[home.worker_id].windowed_itl_s(now) == pytest.approx(home.windowed_itl_s(now), abs=1e-9)
        assert live[home.worker_id].token_age_s(now) == pytest.approx(home.token_age_s(now), abs=1e-9)
        assert live[home.worker_id].num_sessions == home.num_sessions
        for each in prefills:
            assert live[each.worker_id].windowed_ttft_s(now) == pytest.approx(each.windowed_ttft_s(now), abs=1e-9)

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None:
        assert self.store.call("start", worker_id, "a", task.task_id, self.fence[task.task_id]) == b"ok"
        super().task_started(task, worker_id, now)

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        fence = self.fence[task.task_id]
        assert self.store.call("computed", worker_id, "a", task.task_id, fence, task.tokens) == b"ok"
        super().prefilled(task, worker_id)

    def _land(self, live: Live, task: PrefillTask, worker: PrefillWorker | None, missing: int) -> None:
        home = live.home.worker_id
        word = np.int32(1).tobytes(), np.float64(self.loop.now).tobytes()
        said = self.store.call("land", home, "a", task.order, 0, task.task_id, self.fence[task.task_id], *word, 0)
        assert said[0] == b"ok"
        super()._land(live, task, worker, missing)

    def stepped(self, worker_id: int, members: Sequence[tuple[int, int]], gap_s: float) -> None:
        self.num_steps += 1
        items: list[Any] = []
        for order, epoch in members:
            items += [order, epoch, len(self.store.read("ids", order)) // 4, np.int32(1).tobytes()]
        time = np.float64(self.loop.now).tobytes()
        said = self.store.call("tokens", worker_id, "a", f"s{self.num_steps}", time, 0, 0, gap_s, *items)
        assert said[0] == []


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with client_of_any(tmp_path_factory.mktemp("redis")) as found:
        yield found


def sessions(seed: int, count: int = 20) -> list[Session]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.15, count)).tolist()
    made = []
    for index in range(count):
        lengths = rng.choice([60, 400, 2500], int(rng.integers(1, 4))).tolist()
        rounds = [(tokens, int(rng.integers(1, 7)), float(rng.exponential(0.2))) for tokens in lengths]
        made.append(session(index, times[index], *rounds))
    return made


def same(simulated: ClusterRun, live: ClusterRun) -> None:
    for name in ("sessions", "rounds", "tasks", "transfers", "workers"):
        assert getattr(live, name) == getattr(simulated, name), name


SLO = Slo(ttft_s=0.8, itl_s=0.05)
"""Tight, so that every rule of Algorithm 1 decides some."""


@pytest.mark.parametrize(
    ("seed", "config"),
    [(1, RoutingConfig()), (2, RoutingConfig()), (2, RoutingConfig(route_order="load", window="backlog"))],
)
def test_live_coordinator_makes_the_simulators_run(client, seed, config):
    arrivals = sessions(seed)
    own = AmpdConfig(routing=config)
    simulated = ampd(HARDWARE, DEPLOYMENT, SLO, MODEL, own).simulate(
        OpenLoop(sessions=arrivals), seed=seed, max_run_steps=1
    )
    mirror = Mirror(
        client,
        f"{{same{seed}{config.window}}}",
        AdaptiveRouter(MODEL, SLO, config, seed=seed),
        binder=LeastKvMemory(),
        make_queue=partial(ReorderingQueue, ttft_s=SLO.ttft_s),
    )
    same(simulated, mirror.run(OpenLoop(sessions=arrivals)))
    if config.window == "done":  # as printed: every rule of Algorithm 1 decided some, Algorithm 2 changed an order
        assert len(set(simulated.tasks["reason"])) == 3
        assert any(simulated.tasks["postponed"])

    lines = mirror.store.log()
    found = made_again(lines, config, seed)
    num_tasks = len(simulated.tasks["task_id"])
    assert found.decisions == {"bind": len(arrivals), "route": num_tasks, "order": num_tasks}
    assert found.mismatches == []
    # A log of other policies does not pass.
    other = made_again(lines, replace(config, alpha=0.0, beta=0.0), seed)
    assert {each.kind for each in other.mismatches} == {"route"}
    if any(simulated.tasks["postponed"]):
        assert {each.kind for each in made_again(lines, config, seed, w=1).mismatches} == {"order"}


def test_a_binder_and_a_queue_of_one_s_own_make_the_simulators_run(client):
    """Made as a run makes them; the binder keeps state, from one session to the next."""
    binder, queue = (Plugin(kind=kind, where=f"support.own:{name}", given=(("every", 3),)) for kind, name in _OWN)
    arrivals = sessions(4)
    cluster = ampd(HARDWARE, DEPLOYMENT, SLO, MODEL, AmpdConfig(adaptive_routing=False))
    made = {
        "make_binder": partial(binder.make, model=MODEL, slo=SLO, seed=0),
        "make_prefill_queue": partial(queue.make, slo=SLO),
        "make_local_queue": partial(queue.make, slo=SLO),
    }
    cluster = replace(cluster, policies=replace(cluster.policies, **made))
    simulated = cluster.simulate(OpenLoop(sessions=arrivals), max_run_steps=1)
    mirror = Mirror(client, "{own}", RemoteOnly(), binder=made["make_binder"](), make_queue=made["make_prefill_queue"])
    same(simulated, mirror.run(OpenLoop(sessions=arrivals)))
    assert simulated.sessions["worker_id"] == [int(index % 3 == 2) for index in range(len(arrivals))]
    orders = [entry for entry in map(json.loads, (line[1:] for line in mirror.store.log())) if entry["kind"] == "order"]
    assert any(len(entry["queue"]) > 2 for entry in orders)
    for entry in orders:
        assert entry["outcome"][0][0] == entry["queue"][-1]["task_id"]
    found = replay(
        mirror.store.log(),
        binder=made["make_binder"](),
        router=RemoteOnly(),
        make_queue=lambda worker: made["make_prefill_queue"](),
    )
    assert (found.mismatches, found.decisions["bind"]) == ([], len(arrivals))


@pytest.mark.parametrize("routes", [True, False])
def test_what_the_oldest_are_owed_is_paid_live_as_it_is_in_the_simulator(client, routes):
    """On-time's queues keep that from one choice to the next."""
    config = AmpdConfig(adaptive_routing=routes, queue_order="on-time", late=LateShare(share=0.4, patience=1.0))
    slo = Slo(ttft_s=0.6, itl_s=0.01)
    arrivals = [replace(each, arrival_s=each.arrival_s / 8) for each in sessions(4, 30)]
    cluster = ampd(HARDWARE, DEPLOYMENT, slo, MODEL, config)
    simulated = cluster.simulate(OpenLoop(sessions=arrivals), seed=3, max_run_steps=1)

    def router() -> Router:
        return config.make_router(slo, MODEL, seed=3)

    make_queue = partial(config.make_queue, slo)
    mirror = Mirror(client, f"{{owed{routes}}}", router(), binder=LeastKvMemory(), make_queue=make_queue)
    same(simulated, mirror.run(OpenLoop(sessions=arrivals)))

    def mismatches(lines: Sequence[str]) -> set[str]:
        found = replay(lines, binder=LeastKvMemory(), router=router(), make_queue=lambda worker: make_queue())
        return {each.kind for each in found.mismatches}

    lines = mirror.store.log()
    assert mismatches(lines) == set()
    # One that kept nothing would decide otherwise.
    assert mismatches([line.replace('"first":false', '"first":true') for line in lines]) == {"order"}


class Stray:
    """A binder and a router that say what they are told to say."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def bind(self, decodes: Sequence[DecodeView], now: float) -> Any:
        return self.answer() if callable(self.answer) else self.answer

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Any:
        return self.answer() if callable(self.answer) else self.answer


def sulk() -> None:
    raise LookupError("no")


@pytest.mark.parametrize(
    ("binder", "router", "said"),
    [
        (Stray(77), RemoteOnly(), "binder Stray binds a session to 77, which is no decode worker"),
        (Stray(sulk), RemoteOnly(), r"policy Stray.bind fails \(LookupError: no\): correct it"),
        (LeastKvMemory(), Stray(sulk), r"policy Stray.route fails \(LookupError: no\): correct it"),
        (
            LeastKvMemory(),
            Stray(Decision(0, False, "x")),
            "router Stray sends a prefill to worker 0, prefill workers are 1",
        ),
        (LeastKvMemory(), Stray(None), "router Stray answers None, which is no Decision"),
    ],
)
def test_a_policy_that_fails_or_leads_nowhere_ends_the_run_with_a_sentence(client, binder, router, said):
    store = Store(client, f"{{stray {said}}}")
    coordinator = Coordinator(store, binder=binder, router=router, estimator=None)
    for number, role in enumerate(("decode", "prefill")):
        Hand(store=store, worker_id=number, role=role, lease_s=FOREVER).register()
    coordinator.open(5)
    with pytest.raises(RunError, match=said):
        coordinator.begin(5, 0, [1, 2, 3], decode_tokens=2, is_last=True)


def made_again(lines: Sequence[str], config: RoutingConfig, seed: int, w: int = 3) -> Replay:
    return replay(
        lines,
        binder=LeastKvMemory(),
        router=AdaptiveRouter(MODEL, SLO, config, seed=seed),
        make_queue=lambda worker: ReorderingQueue(ttft_s=SLO.ttft_s, w=w),
    )
