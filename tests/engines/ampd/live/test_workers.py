"""Real processes over a real Redis: answers are the engine's, whoever is killed, stopped or restarted.

Workers end with who started them, whatever they were waiting for.

Sessions whose K/V a decode worker holds.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.causal import session_answers
from support.live import needs_redis
from support.processes import ends, is_alive

from engines.ampd.live import fleet as fleet_module
from engines.ampd.live.coordinator import Coordinator, random_prompts, serve
from engines.ampd.live.decisions import replay
from engines.ampd.live.decode import Residents
from engines.ampd.live.fleet import Fleet
from engines.ampd.live.profile import ProfileGrid, profile_live, simulate_live
from engines.ampd.live.record import Mark, answers, collect
from engines.ampd.live.store import RedisServer, Store
from engines.ampd.live.worker import WorkerSpec
from engines.ampd.policies import ReorderingQueue
from engines.ar.torch.executor import PagedExecutor
from engines.cluster.sessions import Round, Session
from engines.errors import RunError
from engines.models.loader import load_causal
from engines.models.qwen2_config import tiny_causal
from engines.policies.routing import LeastKvMemory, RemoteOnly
from engines.policies.views import PrefillQueue
from repro.families.live.system import compared
from repro.paths import REPO

pytestmark = needs_redis

CONFIG = tiny_causal(d_model=32, n_layers=2)
PROMPTS = random_prompts(CONFIG.vocab_size, 0)
PREFIX = "{run}"
HOMES, PREFILLS = (0, 1), (2, 3)
ROLES = dict.fromkeys(HOMES, "decode") | dict.fromkeys(PREFILLS, "prefill")
LEASE_S = 3.0
"""A heartbeat is due four times in it: on a busy machine one comes late, hardly ever three."""
UNTIL_S = 600.0
"""A machine may be busy: nobody is judged by time here."""


class Live:
    """Two homes, two prefill workers, a coordinator and a Redis, all to be disturbed."""

    def __init__(self, server: RedisServer, store: Store, fleet: Fleet) -> None:
        self.server, self.store, self.fleet = server, store, fleet
        self.coordinator = Coordinator(
            store, binder=LeastKvMemory(), router=RemoteOnly("round-robin"), estimator=None, lease_s=LEASE_S
        )
        self.num_sessions = 0

    def sessions(self, count: int, tokens: int = 300) -> list[Session]:
        rng = np.random.default_rng(self.num_sessions)
        first, self.num_sessions = self.num_sessions, self.num_sessions + count
        rounds = [
            tuple(Round(int(rng.integers(20, tokens)), int(rng.integers(1, 12)), 0.01) for _ in range(3))
            for _ in range(count)
        ]
        return [Session(first + index, 0.01 * index, each) for index, each in enumerate(rounds)]

    def serve(self, sessions: list[Session], on_turn: Callable[[int], None] | None = None) -> float:
        return serve(self.coordinator, sessions, PROMPTS, until_s=UNTIL_S, on_turn=on_turn)

    def still(self, worker: int) -> None:
        """Stop it. What it has sent is done by the store before this returns, and nothing more comes of it."""
        pid = self.fleet.pid(worker)
        os.kill(pid, signal.SIGSTOP)
        while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
            time.sleep(0.001)
        for _ in range(2):  # one may go before what came with it from another connection
            self.store.retry(self.store.client.ping)

    def caught_in(self, worker: int) -> str:
        """The task under way there, if any; asked again and again this stops the worker in the middle of one."""
        self.still(worker)
        task = self.store.fields("worker", worker)["running_task"]
        if not task:
            os.kill(self.fleet.pid(worker), signal.SIGCONT)
        return task

    def again(self, worker: int) -> None:
        """The worker is back after a test, as somebody new."""
        before = self.store.fields("worker", worker)["incarnation"]
        self.fleet.start(worker)
        self.wait_for(lambda: self.store.fields("worker", worker)["incarnation"] not in ("", before))

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            time.sleep(0.05)
            self.coordinator.settle()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        store = Store.connect(server.url, PREFIX)
        store.call("create", 10.0)
        specs = [
            WorkerSpec(
                worker_id=worker,
                role="decode" if worker in HOMES else "prefill",
                url=server.url,
                prefix=PREFIX,
                model=CONFIG,
                make_queue=PrefillQueue if worker in HOMES else partial(ReorderingQueue, ttft_s=1.0),
                num_tokens=16000,
                max_len=2048,
                num_slots=64,
                lease_s=LEASE_S,
            )
            for worker in ROLES
        ]
        with Fleet(specs, store, start_s=600.0) as fleet:
            yield Live(server, store, fleet)


def engine_answers(sessions: list[Session]) -> dict[int, list[list[int]]]:
    """What one worker gives that does everything, in this process."""
    worker = PagedExecutor(load_causal(CONFIG, weights="random", seed=0), num_slots=64, max_len=2048, num_tokens=16000)
    return {session.session_id: session_answers(worker, session, PROMPTS) for session in sessions}


def check_whole(live: Live, sessions: list[Session], began: float) -> None:
    """Every session has every round and token once, and they are the engine's."""
    expected = engine_answers(sessions)
    for session in sessions:
        assert live.store.fields("session", session.session_id)["state"] == "done"
        num_ids = len(live.store.read("ids", session.session_id)) // 4
        assert num_ids == session.context_tokens
        assert len(live.store.read("times", session.session_id)) // 8 == session.decode_tokens
        assert answers(live.store, session) == expected[session.session_id]
    run = collect(live.store, sessions, began, ROLES, {})
    assert run.sessions["status"] == ["ok"] * len(sessions)
    own = {session.session_id for session in sessions}
    done = [
        (session, number)
        for session, number, kind, landed in zip(
            run.tasks["session_id"], run.tasks["round"], run.tasks["kind"], run.tasks["landed_s"], strict=True
        )
        if session in own and kind != "recompute" and landed is not None
    ]
    assert sorted(done) == sorted({(session.session_id, number) for session in sessions for number in range(3)})


def test_answers_are_the_engines_and_the_log_replays(live):
    """First in its fleet: what a killed Redis forgets was decided all the same."""
    sessions = live.sessions(4)
    check_whole(live, sessions, live.serve(sessions))
    # In this fleet a worker's queue tells its kind; a policy is as it was when the log began.
    found = replay(
        live.store.log(),
        binder=LeastKvMemory(),
        router=RemoteOnly("round-robin"),
        make_queue=lambda worker: PrefillQueue() if worker in HOMES else ReorderingQueue(ttft_s=1.0),
    )
    assert found.mismatches == []
    assert found.decisions == {"bind": 4, "route": 12, "order": 12}


def test_ctrl_c_in_a_terminal_is_not_the_workers(live):
    """Nor their server's, whatever it was doing."""
    (server,) = {_said(live.fleet.pid(worker), "PPid") for worker in ROLES}
    for pid in (int(server), *map(live.fleet.pid, ROLES)):
        assert int(_said(pid, "SigBlk"), 16) & 1 << (signal.SIGINT - 1)


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except OSError:  # it has ended
        return False


def _said(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).split()[1]


def test_killing_a_prefill_worker_in_the_middle_of_a_task_loses_and_doubles_nothing(live):
    killed: list[str] = []
    before = len(live.store.losses().workers)

    def kill(num_ended: int) -> None:
        if not killed and (task := live.caught_in(2)):
            killed.append(task)
            os.kill(live.fleet.pid(2), signal.SIGKILL)

    while not killed:  # on a busy machine every task can be over before it is seen
        sessions = live.sessions(4, tokens=600)
        check_whole(live, sessions, live.serve(sessions, kill))
    live.wait_for(lambda: 2 in live.store.losses().workers[before:])  # its task's lease may have run out before
    task = live.store.fields("task", killed[0])
    assert (task["state"], task["requeued"], task["worker"]) == ("done", "1", "3")
    live.again(2)


def test_a_worker_that_was_stopped_and_wakes_late_is_refused(live):
    """It sleeps until it counts as lost; its task's lease may run out before."""
    stopped: list[str] = []
    before = len(live.store.losses().workers)

    def is_lost() -> bool:
        return 3 in live.store.losses().workers[before:]

    def stop(num_ended: int) -> None:
        if not stopped:
            if task := live.caught_in(3):
                stopped.append(task)
        elif is_lost():
            os.kill(live.fleet.pid(3), signal.SIGCONT)

    while not stopped:  # on a busy machine every task can be over before it is seen
        sessions = live.sessions(4, tokens=600)
        began = live.serve(sessions, stop)
    live.wait_for(is_lost)
    os.kill(live.fleet.pid(3), signal.SIGCONT)
    # It comes back by itself, as somebody new.
    live.wait_for(lambda: 3 in {member.view.worker_id for member in live.store.members()})
    check_whole(live, sessions, began)
    task = live.store.fields("task", stopped[0])
    assert (task["state"], task["requeued"], task["worker"]) == ("done", "1", "2")


def test_a_session_whose_client_leaves_frees_its_rows_and_begins_anew(live):
    """In its answer, and in a prefill elsewhere over a history that is lent."""
    store, coordinator = live.store, live.coordinator

    def next_session(*rounds: Round) -> Session:
        live.num_sessions += 1
        return Session(live.num_sessions - 1, 0.0, rounds)

    def begin(session: Session, number: int) -> int:
        order = coordinator.open(session.session_id)
        is_last = number == len(session.rounds) - 1
        asked = session.rounds[number].decode_tokens
        coordinator.begin(session.session_id, number, PROMPTS(session, number), decode_tokens=asked, is_last=is_last)
        return order

    def state(session: Session) -> str:
        return store.fields("session", session.session_id)["state"]

    def wait_for(session: Session, *wanted: str) -> str:
        until = time.monotonic() + 120  # before the suite's own limit, which says no state
        while (found := state(session)) not in wanted:
            assert time.monotonic() < until, f"{found}, not {' or '.join(wanted)}"
            coordinator.settle()  # on a busy machine a worker's heartbeat can come late, and its task has to go elsewhere
            time.sleep(0.002)
        return found

    def leave(session: Session, order: int) -> bool:
        """Whether it was not over before."""
        home = store.fields("session", session.session_id)["home"]
        if not coordinator.leave(session.session_id, order):
            return False
        until = time.monotonic() + UNTIL_S
        while store.fields("worker", home)["kv_tokens"] != "0":
            assert time.monotonic() < until, "rows are held"
            time.sleep(0.002)
        return True

    while True:
        answering = next_session(Round(60, 1900))
        order = begin(answering, 0)
        wait_for(answering, "decoding", "done")
        if leave(answering, order):  # on a busy machine it can be over before it is seen
            break
    while True:
        caught = next_session(Round(300, 2), Round(1500, 2))
        order = begin(caught, 0)
        wait_for(caught, "waiting")
        begin(caught, 1)
        worker = int(store.fields("task", store.fields("session", caught.session_id)["task"])["worker"])
        is_stopped = False
        while not is_stopped and state(caught) == "prefill":
            is_stopped = bool(live.caught_in(worker))
        if is_stopped:
            break
    assert leave(caught, order)
    os.kill(live.fleet.pid(worker), signal.SIGCONT)
    for number in range(2):
        begin(caught, number)
        wait_for(caught, ("waiting", "done")[number])
    assert answers(store, caught) == engine_answers([caught])[caught.session_id]


def crash(server: RedisServer) -> None:
    """No goodbye, no last flush."""
    assert server._process is not None
    server._process.kill()
    server._process.wait()


def test_redis_killed_and_restarted_loses_nothing(live):
    sessions = live.sessions(4)
    restarts = 0

    def restart(num_ended: int) -> None:
        nonlocal restarts
        if restarts < 2 and num_ended > restarts:
            restarts += 1
            crash(live.server)
            time.sleep(LEASE_S + 0.5 if restarts == 1 else 0.1)  # once longer than a lease: no heartbeat gets through
            live.server.start()

    lost = list(live.store.losses().workers)
    check_whole(live, sessions, live.serve(sessions, restart))
    assert restarts == 2
    assert list(live.store.losses().workers) == lost


def test_sessions_of_a_killed_home_are_finished_by_the_other(live):
    first, live.num_sessions = live.num_sessions, live.num_sessions + 4
    sessions = [Session(first + index, 0.0, (Round(100, 400, 0.01), Round(50, 100))) for index in range(4)]
    held: dict[int, set[bytes]] = {}
    before = len(live.store.losses().workers)

    def is_caught(home: int) -> bool:
        """Whether it was killed with an answer under way there."""
        live.still(home)
        bound = live.store.client.smembers(live.store.key("bound", home))
        if not any(live.store.fields("session", int(each))["state"] == "decoding" for each in bound):
            os.kill(live.fleet.pid(home), signal.SIGCONT)
            return False
        held[home] = set(bound)
        os.kill(live.fleet.pid(home), signal.SIGKILL)
        return True

    is_over = threading.Event()

    def hunt() -> None:
        while not (is_over.is_set() or any(map(is_caught, HOMES))):
            time.sleep(0.002)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        began = live.serve(sessions)
    finally:
        is_over.set()
        hunter.join()
    ((killed, sessions_held),) = held.items()
    (other,) = set(HOMES) - {killed}
    assert killed in live.store.losses().workers[before:]
    assert {live.store.fields("session", int(each))["home"] for each in sessions_held} == {str(other)}
    for session in sessions:
        assert live.store.fields("session", session.session_id)["state"] == "done"
        assert len(live.store.read("ids", session.session_id)) // 4 == session.context_tokens
    assert collect(live.store, sessions, began, ROLES, {}).sessions["status"] == ["ok"] * 4
    live.again(killed)


def test_the_last_prefill_worker_that_dies_or_falls_silent_ends_the_run(live, monkeypatch):
    """One that is killed leaves the work to the other; that one, stopped, may come back for a while, and killed may not."""
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.2)
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.0)
    sessions = live.sessions(4, tokens=600)
    lost = list(live.store.losses().workers)
    numbers = {2: signal.SIGKILL}

    def disturb(num_ended: int) -> None:
        for worker in list(numbers):
            os.kill(live.fleet.pid(worker), numbers.pop(worker))
        live.fleet.check()

    check_whole(live, sessions, live.serve(sessions, disturb))
    numbers[3] = signal.SIGSTOP
    with pytest.raises(RunError, match=r"no prefill worker has answered for 0\.2 s \(of 2, 3\): see what stops them"):
        live.serve(live.sessions(4, tokens=600), disturb)
    assert {2, 3} <= set(live.store.losses().workers[len(lost) :])
    monkeypatch.setattr(fleet_module, "SILENT_S", 600.0)
    numbers[3] = signal.SIGKILL
    sentence = r"no prefill worker is left \(worker 2 was killed by signal 9, worker 3 was killed by signal 9\)"
    with pytest.raises(RunError, match=sentence):
        live.serve(live.sessions(4, tokens=600), disturb)
    assert live.fleet.exit_codes == {2: -9, 3: -9}
    for worker in PREFILLS:
        live.again(worker)


def test_profile_and_its_twin(live):
    """Every path of the profiler; how near the twin comes is a measurement, not a test."""
    grid = ProfileGrid(
        tokens=(8, 32, 64, 128, 256), histories=(0, 64), batches=(1, 2), contexts=(32, 64), steps=3, repeats=1
    )
    profile = profile_live(live.store, ROLES, PROMPTS, grid=grid)
    assert profile.dispatch_s > 0
    assert min(profile.performance.prefill_s(0, tokens, 1) for tokens in (8, 200)) > 0
    sessions = live.sessions(3)
    simulated = simulate_live(
        profile,
        sessions,
        num_homes=2,
        num_prefills=2,
        binder=LeastKvMemory(),
        router=RemoteOnly("round-robin"),
        estimator=profile.performance,
        make_queue=PrefillQueue,
        kv_capacity=16000,
    )
    since = Mark.of(live.store, ROLES)
    run = collect(live.store, sessions, live.serve(sessions), ROLES, {}, since=since)
    found = compared(run, simulated)
    assert {"ttft_s mean", "itl_s p50", "local_share"} <= found.keys()
    assert len(run.tasks["task_id"]) == len(simulated.tasks["task_id"]) == 9
    assert run.tasks["task_id"] == list(range(9))


def test_a_redis_asks_for_a_password_that_only_the_run_knows(tmp_path):
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    (elsewhere := tmp_path / "other").mkdir()
    with RedisServer(tmp_path) as server, RedisServer(elsewhere) as other:
        password = server.url.partition("://:")[2].partition("@")[0]
        assert len(password) >= 32
        assert password not in other.url
        for wrong in (None, "", password[:-1], password[::-1]):
            once = Retry(NoBackoff(), 0)
            with (
                redis.Redis(port=server.port, password=wrong, retry=once) as stranger,
                pytest.raises(redis.AuthenticationError),
            ):
                stranger.ping()
        assert server._process is not None
        seen = Path(f"/proc/{server._process.pid}")
        assert password.encode() not in (seen / "cmdline").read_bytes() + (seen / "environ").read_bytes()
        crash(server)
        server.start()
        with redis.Redis.from_url(server.url) as known:
            assert known.config_get("bind")["bind"] == "127.0.0.1"
            assert known.config_get("appendonly")["appendonly"] == "yes"
        assert not any(password.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_redis_that_stays_away_is_one_sentence(tmp_path):
    with RedisServer(tmp_path) as server:
        store = Store.connect(server.url, PREFIX, outage_s=0.1)
        crash(server)
        with pytest.raises(RunError, match=r"redis has not answered for 0\.1 s"):
            store.call("create", 1.0)


@pytest.mark.skipif(find_spec("redis") is None, reason="needs the redis client")
def test_a_missing_server_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    from engines.errors import UserError

    with pytest.raises(UserError, match="redis-server is not installed: apt-get install redis-server"):
        RedisServer(tmp_path)


SPEC = WorkerSpec(
    worker_id=0,
    role="decode",
    url="redis://127.0.0.1:1",
    prefix="{run}",
    model=tiny_causal(d_model=32, n_layers=2),
    make_queue=PrefillQueue,
    num_tokens=1600,
    max_len=256,
    num_slots=4,
    lease_s=600.0,
    outage_s=600.0,
)
PARENT = """
import sys
from dataclasses import replace
from multiprocessing import get_context
from engines.ampd.live.fleet import run_worker
from tests.engines.ampd.live.test_workers import SPEC

process = get_context("fork").Process(target=run_worker, args=(replace(SPEC, url=sys.argv[1]),), daemon=True)
process.start()
print(process.pid, flush=True)
process.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_waits_for_redis_ends_with_its_parent():
    path = os.pathsep.join((str(REPO), str(REPO / "tests")))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, f"redis://127.0.0.1:{mute.getsockname()[1]}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        connection, _ = mute.accept()
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert ends(pid)
        connection.close()


def test_a_stop_that_is_interrupted_waits_for_no_worker(tmp_path, monkeypatch):
    with RedisServer(tmp_path) as server:
        store = Store.connect(server.url, SPEC.prefix)
        store.call("create", 10.0)
        with Fleet([replace(SPEC, url=server.url)], store, start_s=600.0) as fleet:
            (process,) = fleet._processes.values()
            os.kill(fleet.pid(0), signal.SIGSTOP)  # it will not hear that it is to end

            def interrupted(timeout: float | None = None) -> None:
                monkeypatch.undo()
                raise KeyboardInterrupt

            monkeypatch.setattr(process, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fleet.stop()
            process.join()
            assert process.exitcode == -signal.SIGKILL


def test_a_worker_that_dies_before_it_takes_part_is_one_sentence(tmp_path, monkeypatch):
    """It asks a Redis that never answers, so that it cannot be quicker than its end."""
    with RedisServer(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as mute:
        store = Store.connect(server.url, SPEC.prefix)
        store.call("create", 10.0)
        start = Fleet.start

        def doomed(self: Fleet, worker_id: int) -> None:
            start(self, worker_id)
            os.kill(self.pid(worker_id), signal.SIGKILL)
            self._processes[worker_id].join()

        monkeypatch.setattr(Fleet, "start", doomed)
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}"
        specs = [replace(SPEC, url=url, worker_id=number) for number in (0, 1)]
        with pytest.raises(RunError, match="worker 0 was killed by signal 9 before it took part"):
            Fleet(specs, store, start_s=600.0)


def test_a_session_that_is_back_under_another_epoch_outlives_who_it_was():
    """Between a worker's question which sessions it has lost and its dropping them, one may have come back."""
    model = load_causal(tiny_causal(d_model=32, n_layers=1), weights="random", seed=0)
    executor = PagedExecutor(model, num_slots=2, max_len=64, num_tokens=128)
    residents = Residents(executor)
    before = residents.find_or_add(5, "0", 0)
    assert residents.place(before, 9)
    back = residents.find_or_add(5, "1", 0)
    assert executor.tables.num_free_slots == 2
    assert residents.place(back, 9)
    residents.drop(before)
    assert residents.is_known(back)
    assert not residents.is_known(before)
    assert residents.grow(np.array([back.slot]), np.array([20]))
    residents.drop(back)
    assert (executor.tables.num_free_slots, residents.kv_tokens, residents.as_list()) == (2, 0, [])
