"""The store's operations: exactly once under lost leases, dead workers and messages sent twice."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.live import Hand, HandClock, client_of_any, needs_store

from engines.ampd.live.coordinator import Coordinator
from engines.ampd.live.store import Store
from engines.errors import RunError, UserError
from engines.policies.routing import LeastKvMemory, Local, RemoteOnly

pytestmark = needs_store


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with client_of_any(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def store(client: object, request: pytest.FixtureRequest) -> Store:
    return Store(client, f"{{{request.node.name}}}", clock=HandClock())


class Setting:
    """A coordinator that dispatches remotely, a decode worker 0 and prefill workers 1 and 2."""

    def __init__(self, store: Store, *, is_local: bool = False) -> None:
        self.store, self.clock = store, store.clock
        assert isinstance(self.clock, HandClock)
        router = Local() if is_local else RemoteOnly("round-robin")
        self.coordinator = Coordinator(store, binder=LeastKvMemory(), router=router, estimator=None)
        self.home = Hand(store=store, worker_id=0, role="decode").register()
        self.first, self.second = (Hand(store=store, worker_id=number).register() for number in (1, 2))

    def begin(
        self, session: int, round_index: int = 0, tokens: int = 5, decode: int = 3, *, is_last: bool = True
    ) -> None:
        self.coordinator.open(session)
        self.coordinator.begin(session, round_index, np.arange(tokens), decode_tokens=decode, is_last=is_last)

    def state(self, session: int) -> dict[str, str]:
        return self.store.fields("session", session)

    def num_tokens(self, session: int) -> int:
        return len(self.store.read("ids", session)) // 4

    def pass_s(self, seconds: float, *alive: Hand) -> None:
        until = self.clock.time_s + seconds
        while self.clock.time_s < until:
            self.clock.time_s = min(self.clock.time_s + 0.9, until)  # within half a lease: it has not been away
            for worker in alive:
                worker.beat()
            self.coordinator.settle()


def test_a_session_runs_its_rounds(store):
    setting = Setting(store)
    setting.begin(7, is_last=False)
    task = setting.first.claim()
    assert (task["history"], task["tokens"], task["kind"], task["num_ids"]) == ("0", "5", "initial", "5")
    assert setting.first.start(task) == setting.first.compute(task) == b"ok"
    assert setting.home.land(task) == [b"ok", b"decoding", b"2"]
    assert setting.home.decode((7, 0))[1] == []
    assert setting.home.decode((7, 0))[1] == [b"7"]
    assert setting.state(7)["state"] == "waiting"

    setting.begin(7, 1, tokens=2, decode=1)
    again = setting.second.claim()
    assert (again["history"], again["tokens"], again["kind"]) == ("8", "2", "incremental")
    setting.second.start(again)
    assert setting.home.land(again) == [b"ok", b"end", b"0"]
    assert [event["what"] for event in store.follow("events")(0.01)] == ["round", "end"]
    assert store.members()[0].view.num_sessions == 0


def test_every_message_may_come_twice(store):
    setting = Setting(store)
    setting.begin(7)
    setting.begin(7)
    assert setting.num_tokens(7) == 5
    assert setting.first.queued() == [0]
    task = setting.first.claim(request="r")
    version_after = store.call("queue", 1, "a")[0]
    assert store.call("claim", 1, "a", "r", version_after, 0, 0, 9.0, 0, "{}")[0][:2] == [b"task_id", b"0"]
    assert setting.home.land(task)[0] == b"ok"
    assert setting.home.land(task)[0] == b"again"
    assert setting.num_tokens(7) == 6
    setting.clock.time_s = 1.0
    setting.coordinator.settle()
    step = ["tokens", 0, "a", "s", np.float64(1).tobytes(), 9, 1, 0.5, 7, 0, 6, np.int32(1).tobytes()]
    store.call(*step)
    store.call(*step)
    assert setting.num_tokens(7) == 7
    assert store.members()[0].view.itl_s == 0.5
    assert store.fields("worker", 0)["itl_count"] == "1"


def test_a_last_step_heard_of_late_ends_its_round_though_the_next_has_begun(store):
    setting = Setting(store)
    setting.begin(7, decode=2, is_last=False)
    setting.home.land(setting.first.claim())
    step = ["tokens", 0, "a", "s", np.float64(1).tobytes(), 9, 1, 0.5, 7, 0, 6, np.int32(1).tobytes()]
    assert store.call(*step)[1] == [b"7"]
    setting.begin(7, 1)
    assert store.call(*step)[:3] == [[], [b"7"], []]
    setting.home.land(setting.second.claim())
    assert store.call(*step)[:3] == [[], [b"7"], []]
    assert setting.num_tokens(7) == 5 + 2 + 5 + 1


def test_a_claim_for_a_queue_that_has_changed_is_refused(store):
    setting = Setting(store)
    setting.begin(1)
    version = store.call("queue", 1, "a")[0]
    setting.begin(2)
    setting.begin(3)
    assert setting.first.queued() == [0, 2]
    assert store.call("claim", 1, "a", "x", version, 0, 0, 9.0, 0, "{}") == b"changed"
    assert setting.first.queued() == [0, 2]


def test_two_consumers_never_have_the_same_task(store):
    setting = Setting(store)
    for session in range(6):
        setting.begin(session)
    taken = [setting.first.claim()["task_id"] for _ in range(3)] + [setting.second.claim()["task_id"] for _ in range(3)]
    assert sorted(taken) == [str(task) for task in range(6)]
    assert setting.first.queued() == setting.second.queued() == []


def test_a_dead_worker_loses_its_tasks_and_its_late_answer(store):
    setting = Setting(store)
    for session in range(4):
        setting.begin(session)
    late = setting.first.claim()
    setting.first.start(late)
    setting.pass_s(11.0)  # nobody sent a heartbeat
    assert sorted(setting.store.losses().workers) == [0, 1, 2]
    setting.home.incarnation, setting.second.incarnation = "b", "b"
    setting.home.register()
    setting.second.register()
    setting.coordinator.settle()
    assert sorted(setting.second.queued()) == [0, 1, 2, 3]
    assert setting.home.land(late)[0] == b"stale"
    assert setting.first.compute(late) == b"lost"
    tasks = [setting.second.claim() for _ in range(4)]
    for task in tasks:
        setting.second.start(task)
        assert setting.home.land(task)[0] == b"ok"
    assert all(setting.num_tokens(session) == 6 for session in range(4))
    assert {task["requeued"] for task in tasks} == {"1"}


def test_a_slow_worker_loses_its_lease_and_is_offered_nothing_until_it_answers(store):
    setting = Setting(store)
    for session in range(4):
        setting.begin(session)
    slow = setting.first.claim(lease_s=1.0)
    setting.first.start(slow)
    setting.pass_s(2.0, setting.home, setting.first, setting.second)
    assert setting.store.losses().num_taken_back == 1
    assert setting.first.queued() == []
    assert sorted(setting.second.queued()) == [0, 1, 2, 3]
    setting.begin(4)
    assert setting.first.queued() == []
    assert setting.home.land(slow)[0] == b"stale"
    assert setting.first.compute(slow) == b"stale"
    setting.begin(5)
    setting.begin(6)
    assert setting.first.queued()


def test_sessions_of_a_dead_home_go_on_at_another(store):
    setting = Setting(store)
    other = Hand(store=store, worker_id=5, role="decode")
    setting.begin(1)  # decodes
    task = setting.first.claim()
    setting.home.land(task)
    setting.home.decode((1, 0))
    setting.begin(2)  # is prefilled
    running = setting.second.claim()
    setting.begin(3, decode=1, is_last=False)  # waits in its environment
    setting.home.land(setting.first.claim())
    other.register()
    setting.pass_s(11.0, setting.first, setting.second, other)

    assert list(setting.store.losses().workers) == [0]
    assert [setting.state(session)["home"] for session in (1, 2, 3)] == ["5", "5", "5"]
    assert other.land(running | {"epoch": "1"})[0] == b"stale"  # of the fence before
    queued = [*setting.first.queued(), *setting.second.queued()]
    fields = {store.fields("task", task)["session_id"]: store.fields("task", task) for task in queued}
    assert (fields["1"]["kind"], fields["1"]["history"], fields["1"]["tokens"]) == ("recompute", "0", "7")
    assert (fields["2"]["kind"], fields["2"]["tokens"]) == ("initial", "5")
    assert "3" not in fields
    setting.begin(3, 1, tokens=2)
    for worker in (setting.first, setting.second):
        while worker.queued():
            assert other.land(worker.claim())[0] == b"ok"
    assert setting.state(1)["left"] == "0"
    assert setting.num_tokens(1) == 8
    assert setting.num_tokens(2) == 6


def test_local_tasks_of_a_dead_home_are_routed_anew(store):
    setting = Setting(store, is_local=True)
    setting.begin(1)
    assert setting.home.queued() == [0]
    other = Hand(store=store, worker_id=5, role="decode").register()
    setting.pass_s(11.0, other)
    assert other.queued() == [0]


@pytest.mark.parametrize("when", ["queued", "leased", "computed", "decoding"])
def test_a_session_whose_client_leaves_is_nobody_s(store, when):
    setting = Setting(store)
    order = setting.coordinator.open(7)
    setting.begin(7)
    setting.begin(8)
    task = None if when == "queued" else setting.first.claim()
    if task is not None and when != "leased":
        setting.first.start(task)
        setting.first.compute(task)
    if task is not None and when == "decoding":
        setting.home.land(task)
    assert not setting.coordinator.leave(7, order + 1), "of another who was called so"
    assert setting.coordinator.leave(7, order)
    assert not setting.coordinator.leave(7, order), "told twice"
    assert setting.first.queued() == []
    assert (setting.num_tokens(7), store.members()[0].view.num_sessions) == (0, 1)
    assert store.follow("wake", 0)(0.01) == [{"word": "left"}]
    assert store.call("strangers", 0, "a", 16, 7, 0, 8, 0) == [b"7"]
    assert setting.home.decode((7, 0))[0] == [b"7"]
    if task is not None:
        assert setting.first.start(task) == setting.first.compute(task) == b"stale" or when == "decoding"
        assert setting.home.land(task) == [b"stale"]
    assert setting.coordinator.settle() == 0, "nothing of it waits"

    assert setting.coordinator.open(7) == order + 2
    setting.begin(7, tokens=4)
    again = next(
        hand.claim() for hand in (setting.first, setting.second) if len(hand.queued()) > (hand is setting.second)
    )
    assert (again["session_id"], again["kind"], again["history"], again["epoch"]) == ("7", "initial", "0", "1")
    assert setting.home.land(again)[0] == b"ok"
    assert setting.home.land(setting.second.claim())[0] == b"ok", "the other goes on"


def test_a_client_that_leaves_before_a_worker_is_there(store):
    coordinator = Coordinator(store, binder=LeastKvMemory(), router=Local(), estimator=None)
    order = coordinator.open(1)
    coordinator.begin(1, 0, [3], decode_tokens=1, is_last=True)
    assert coordinator.settle() == 2
    assert coordinator.leave(1, order)
    assert coordinator.settle() == 0
    home = Hand(store=store, worker_id=0, role="decode").register()
    assert coordinator.settle() == 0
    assert home.queued() == []


def test_without_workers_sessions_wait(store):
    coordinator = Coordinator(store, binder=LeastKvMemory(), router=Local(), estimator=None)
    coordinator.open(1)
    coordinator.begin(1, 0, [3], decode_tokens=1, is_last=True)
    assert coordinator.settle() == 2
    home = Hand(store=store, worker_id=0, role="decode").register()
    assert coordinator.settle() == 0
    assert home.queued() == [0]


def test_without_prefill_workers_a_router_that_needs_them_waits(store):
    setting = Setting(store)
    setting.pass_s(11.0, setting.home)
    setting.begin(1)
    assert setting.coordinator.settle() == 1
    setting.first.incarnation = "b"
    setting.first.register()
    assert setting.coordinator.settle() == 0
    assert setting.first.queued() == [0]


def test_slow_workers_are_offered_tasks_where_all_are_slow(store):
    setting = Setting(store)
    for session, worker in ((1, setting.first), (2, setting.second)):
        setting.begin(session)
        worker.claim(lease_s=1.0)
    setting.pass_s(2.0, setting.home, setting.first, setting.second)
    assert setting.store.losses().num_taken_back == 2
    assert sorted([*setting.first.queued(), *setting.second.queued()]) == [0, 1]


def test_another_coordinator_goes_on(store):
    setting = Setting(store)
    setting.begin(1)
    second = Coordinator(store, binder=LeastKvMemory(), router=RemoteOnly(), estimator=None)
    second.begin(1, 0, [9], decode_tokens=1, is_last=True)
    second.open(2)
    second.begin(2, 0, [9], decode_tokens=1, is_last=True)
    assert setting.num_tokens(1) == 5
    assert len(setting.first.queued()) + len(setting.second.queued()) == 2


def test_a_round_does_not_begin_before_the_one_before_has_ended(store):
    setting = Setting(store)
    setting.begin(1, is_last=False)
    with pytest.raises(UserError, match="round 1 begins before round 0 has ended"):
        setting.begin(1, 1)


@pytest.mark.parametrize("is_seen", [True, False])
def test_after_an_outage_nobody_is_overdue(store, is_seen):
    """Seen by a call that had to wait, or only by the time that passed."""
    setting = Setting(store)
    setting.begin(1)
    setting.first.claim(lease_s=1.0)
    setting.clock.time_s = 100.0
    if is_seen:
        store.num_outages += 1
        setting.coordinator._looked_s = 100.0
    setting.coordinator.settle()
    assert list(setting.store.losses().workers) == []
    assert setting.store.losses().num_taken_back == 0
    setting.pass_s(3.0)
    assert sorted(setting.store.losses().workers) == [0, 1, 2]


def test_a_store_that_forgot_the_run_says_so(store):
    setting = Setting(store)
    store.clear()
    with pytest.raises(RunError, match="lost the run's state: start it with --appendonly yes"):
        setting.begin(1)
