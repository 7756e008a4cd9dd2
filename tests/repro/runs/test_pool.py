"""Runs by workers that may be lost, locks of units, and what is refused: all of it without Ray."""

import errno
import fcntl
import os
import pickle
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import refused, repro
from support.fake_system import breaking, deployed, fake_cell
from support.fake_workers import PACKING, FakeCluster
from support.mock_openai import MockOpenAI, mock_server
from support.tables import data_beside

from engines.errors import RunError, UserError
from repro.runs.cell import COMPARISON, Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.pool import Assignment, Hooks, LocalPool, group_repeats, run_by_workers
from repro.runs.ray_pool import Node, RayPool, RayWorker, check_address, copy_code, died, nodes_of, pick_node, ray_env
from repro.runs.sitting import UnitLocks, lock_file
from repro.runs.store import PROVENANCE, Packed, Store, parts_of
from repro.runs.sweep import Sweep

EXPERIMENTS = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(6)]


class Heard:
    """What hooks were told."""

    def __init__(self, *, goes_on: bool = True) -> None:
        self.done: list[int] = []
        self.failed: dict[int, Exception] = {}
        self._goes_on = goes_on
        self.hooks = Hooks(
            on_start=lambda _: None,
            on_done=lambda experiment, _: self.done.append(experiment.cell.seed),
            on_error=self._heard,
        )

    def _heard(self, experiment: Experiment, error: Exception) -> None:
        self.failed[experiment.cell.seed] = error
        if not self._goes_on:
            raise error


def run(
    cluster: FakeCluster, experiments: Sequence[Experiment] = EXPERIMENTS, *, num: int = 2, goes_on: bool = True
) -> Heard:
    heard = Heard(goes_on=goes_on)
    run_by_workers(Assignment(group_repeats(experiments)), cluster.starts(num), heard.hooks)
    assert all(worker.is_closed for worker in cluster.workers)
    return heard


@given(st.lists(st.one_of(st.none(), st.integers(-1, 3)), max_size=5), st.integers(1, 3))
def test_every_run_is_made_once_or_failed_after_two_losses(deaths, num):
    cluster = FakeCluster(deaths)
    try:
        heard = run(cluster, num=num)
    except RunError:
        # None of those that were left could begin.
        assert [worker.dies_at for worker in cluster.workers].count(-1) == num
        return
    assert sorted([*heard.done, *heard.failed]) == list(range(6))
    assert len(heard.done) == len(set(heard.done))
    begun = [seed for _, seed in cluster.log]
    assert all(begun.count(seed) == 2 for seed in heard.failed)


def test_a_lost_worker_costs_nothing_and_its_run_is_named(caplog):
    cluster = FakeCluster([2])
    heard = run(cluster, num=1)
    assert (sorted(heard.done), heard.failed) == (list(range(6)), {})
    assert cluster.log == [("node 0", 0), ("node 0", 1), ("node 0", 2), *(("node 1", seed) for seed in range(2, 6))]
    name = EXPERIMENTS[2].cell.folder_name
    assert f"the worker on node 0 was lost while it made {name}, which is made again" in caplog.text


def test_a_run_that_takes_two_workers_with_it_fails_with_its_node():
    heard = run(FakeCluster([2, 0]), num=1)
    assert sorted(heard.done) == [0, 1, 3, 4, 5]
    assert str(heard.failed[2]) == "the worker on node 1 was lost; it was tried 2 times"


def test_a_node_that_died_is_named_where_no_other_is_left(monkeypatch):
    monkeypatch.setattr("repro.runs.pool.PATIENCE_S", 0.01)
    heard = Heard()
    cluster = FakeCluster([2], gone={1: "node 10.0.0.7 (b) died"})
    with pytest.raises(RunError, match=r"^node 10\.0\.0\.7 \(b\) died: nothing is left to make the other runs"):
        run_by_workers(Assignment([EXPERIMENTS]), cluster.starts(1), heard.hooks)
    assert heard.done == [0, 1]
    assert all(worker.is_closed for worker in cluster.workers)


@pytest.mark.parametrize("gone", [{1: "node b died"}, {0: "node a died"}, {2: "node c died"}])
def test_runs_of_a_node_that_died_are_made_by_the_others(gone, monkeypatch):
    monkeypatch.setattr("repro.runs.pool.PATIENCE_S", 0.01)
    heard = run(FakeCluster([1], gone=gone))
    assert (sorted(heard.done), heard.failed) == (list(range(6)), {})


def test_an_error_that_ends_the_sweep_is_raised_once_the_others_have_finished():
    broken = [breaking(EXPERIMENTS[0].cell, UserError("unlucky")), *EXPERIMENTS[1:]]
    cluster = FakeCluster()
    with pytest.raises(UserError, match="unlucky"):
        run(cluster, broken, goes_on=False)
    assert len(cluster.log) in (2, 3), "one each was under way, and one more where the other was looked at first"


def test_an_error_while_a_run_is_stored_ends_the_sweep():
    heard = Heard(goes_on=False)

    def full(experiment: Experiment, _: Packed) -> None:
        raise RunError("make room")

    with pytest.raises(RunError, match="make room"):
        run_by_workers(Assignment([EXPERIMENTS]), FakeCluster().starts(1), replace(heard.hooks, on_done=full))
    assert list(heard.failed) == [0, 1], "the next was in hand"


def test_workers_that_never_begin_are_given_up():
    with pytest.raises(RunError, match="was lost: nothing is left to make the other runs"):
        run(FakeCluster([-1] * 4))


# -- locks ------------------------------------------------------------------------------------------------


def test_a_folder_is_shared_whatever_it_is_called_and_wherever_temporary_files_go(tmp_path, monkeypatch):
    """As two containers see it, or two users: neither the name nor TMPDIR is theirs alone."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "also").symlink_to("runs")
    with held(tmp_path / "runs" / ".a.lock"):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert others_find([tmp_path / "also" / ".a.lock"]) == [False]
        assert lock_file(tmp_path / "runs" / ".a.lock", wait=False) is None, "nor has it a thread of this process"


def test_whoever_may_write_to_the_runs_may_lock_them(tmp_path):
    tmp_path.chmod(0o777)
    with held(tmp_path / ".locks" / "a.lock"):
        assert (tmp_path / ".locks").stat().st_mode & 0o777 == 0o777
        assert (tmp_path / ".locks" / "a.lock").stat().st_mode & 0o777 == 0o666


def test_a_lock_that_a_dead_process_left_behind_is_free(tmp_path):
    (tmp_path / ".a.lock").write_text("left")
    assert others_find([tmp_path / ".a.lock"]) == [True]


def test_a_unit_has_a_lock_whichever_of_its_cells_are_asked_for(tmp_path):
    """Nor do two cells without a comparison share one."""
    store = Store(tmp_path)
    compared = [
        prepare(fake_cell(seed=seed, executor="torch", rate=rate, **{COMPARISON: "a/b"}))
        for seed in (0, 1)
        for rate in (1.0, 2.0)
    ]
    alone = [prepare(fake_cell(seed=0, executor="torch", rate=rate)) for rate in (1.0, 2.0)]
    locks = UnitLocks(store, {each.cell.key: None for each in (*compared, *alone)}, lambda *_: None)
    with ExitStack() as stack:

        def is_free(unit: Sequence[Experiment]) -> bool:
            lock = locks.lock(unit)
            return lock is not None and bool(stack.enter_context(lock))

        assert is_free(compared[:1])
        assert [path.name for path in (tmp_path / ".locks").iterdir()] == ["a-b_cpu_torch_0.lock"]
        assert not is_free(compared[1:2])
        assert is_free(compared[2:])
        assert is_free(alone[:1])
        assert is_free(alone[1:])
        assert not is_free(alone[1:])


def test_units_that_others_are_making_come_last(tmp_path, caplog):
    alone = [prepare(fake_cell(seed=seed, executor="torch")) for seed in range(3)]
    locks = UnitLocks(Store(tmp_path), {each.cell.key: None for each in alone}, lambda *_: None)
    making = locks.one_by_one(alone)
    with held(tmp_path / ".locks" / f"{alone[0].cell.folder_name}.lock"):
        assert [next(making), next(making)] == alone[1:]
    assert others_find([tmp_path / ".locks" / f"{each.cell.folder_name}.lock" for each in alone]) == [True, True, False]
    assert list(making) == alone[:1]
    assert "waiting for another sweep, which is making 1 of the runs" in caplog.text


def test_what_another_sweep_has_made_since_this_one_looked_is_reused(tmp_path):
    experiments = [prepare(fake_cell(seed=seed, executor="torch", num_prompts=2)) for seed in range(2)]
    first, second = (Sweep(experiments, Store(tmp_path)) for _ in range(2))
    assert [outcome.status for outcome in first.run()] == ["ran"] * 2
    assert [outcome.status for outcome in second.run()] == ["reused"] * 2


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # Its name may have 108 characters.
        folder = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (os.mkfifo, "it is no plain file"),
        (lambda path: path.symlink_to(path.parent / "target"), "it is a symbolic link"),
        (Path.mkdir, "it is no plain file"),
        (listening, "it is no plain file"),
    ],
)
def test_what_somebody_put_where_a_lock_goes_is_refused(tmp_path, put, why):
    put(tmp_path / ".a.lock")
    with pytest.raises(RunError, match=rf"\.lock cannot be locked in .* \({why}\): remove it, or give another"):
        lock_file(tmp_path / ".a.lock", wait=False)
    assert not (tmp_path / "target").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with held(tmp_path / ".a.lock"):
        assert "has no locks (No locks available): run one sweep at a time in it" in caplog.text


def held(path: Path, *, wait: bool = False) -> ExitStack:
    lock = lock_file(path, wait=wait)
    assert lock is not None
    return lock


def others_find(paths: Sequence[Path]) -> list[bool]:
    """Whether another process could take each lock; and whether it leaves those alone that it takes in vain."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = [lock_file(path, wait=False) for path in paths]
        os.write(writer, bytes(lock is not None for lock in found))
        for lock in found:
            if lock is not None:
                lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        return [bool(each) for each in said.read()]


# -- what a cluster is asked for ----------------------------------------------------------------------------


def node(name: str, machine: str = "", cpus: float = 4, gpus: float = 0) -> Node:
    return Node(id=name, machine=machine or name, num_cpus=cpus, num_gpus=gpus)


def test_measured_runs_ask_for_the_gpus_of_their_platform():
    def measured(**knobs: Any) -> int:
        on_card: Any = SimpleNamespace(device="cuda", obtained="measured")
        return Experiment(cell=fake_cell(executor="torch", **knobs), deployment=on_card, workload=None).num_gpus

    assert measured() == 1
    assert measured(tensor_parallel=2) == 2
    assert prepare(fake_cell(executor="torch")).num_gpus == 0
    assert prepare(fake_cell()).num_gpus == 0


def test_the_node_that_measures():
    head, small, large = node("head", cpus=2), node("small", gpus=1), node("large", gpus=8)
    assert pick_node([head, small, large], 0) == head
    assert pick_node([small, head, large], 1) == large
    assert pick_node([head, small, large], 2) == large
    with pytest.raises(UserError, match="a node with 1 GPUs, and the cluster has none"):
        pick_node([head], 1)


def test_nodes_that_share_a_machine_do_not_measure():
    shared = [node("a", "m"), node("b", "m")]
    with pytest.raises(UserError, match="2 nodes of this cluster share m: measure with --pool local"):
        pick_node(shared, 0)
    assert pick_node([*shared, node("c")], 0) == node("c")
    # One without CPUs has tasks too, those that ask for none.
    assert pick_node([node("head", "m", cpus=0), node("b", "m"), node("c")], 0) == node("c")


def test_nodes_that_are_dead_are_none():
    told = {"NodeID": "a", "NodeManagerHostname": "m", "Resources": {"CPU": 2.0}}
    assert nodes_of([{**told, "Alive": True}, {**told, "Alive": False}]) == [node("a", "m", cpus=2.0)]


def test_nodes_that_died_are_named():
    a, b, c = (replace(node(name), address=f"10.0.0.{place}") for place, name in enumerate("abc"))
    assert died([a, b], [b, a, c]) is None
    assert died([a, b], [c]) == "node 10.0.0.0 (a) and node 10.0.0.1 (b) died"
    assert died([b, b, c], [a, c]) == "node 10.0.0.1 (b) died"


def test_a_node_that_dies_before_it_answers_is_named(tmp_path, monkeypatch):
    """What is asked of it waits for ever, where no GPU of its own was free."""
    monkeypatch.setattr("repro.runs.ray_pool.require_ray", lambda: None)
    pool = RayPool("auto")
    told = {"NodeID": "b", "NodeManagerHostname": "m", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 2.0}}
    (asked,) = nodes_of([{**told, "Alive": True}])
    answers = iter([{**told, "Alive": True}, {**told, "Alive": False}])
    monkeypatch.setattr("repro.runs.ray_pool.PATIENCE_S", 0.01)
    pool._ray = SimpleNamespace(nodes=lambda: [next(answers)])
    with pytest.raises(RunError, match=r"^node 10\.0\.0\.7 \(m\) died before it answered: run the command again"):
        pool._wait_for(Future(), asked)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", ":6379", "head:", "http://head:8265", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(UserError, match="no address of a cluster: give auto or host:port"):
        check_address(address)
    for good in ("auto", "10.0.0.1:6379", "head:6379", "[::1]:6379"):
        check_address(good)


def test_what_workers_get_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {
        "REPRO_COMMIT": "abc",
        "OMP_NUM_THREADS": "2",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "KMP_BLOCKTIME": "0",
    }
    left_out = {"HF_TOKEN": "secret", "TORCH_HUB_TOKEN": "secret", "LD_PRELOAD": "/lib/x.so", "HOME": "/"}
    told = {"REPRO_DATA_DIR": "data", **kept, **left_out}
    assert ray_env(told) == {"REPRO_DATA_DIR": str(tmp_path / "data"), **kept}


@pytest.mark.parametrize("system", ["openai-http", "vllm", "dynamo", "ampd-live"])
def test_runs_against_real_servers_are_refused_before_anything_starts(system, monkeypatch):
    monkeypatch.setattr("repro.runs.ray_pool.require_ray", lambda: None)
    monkeypatch.setattr("repro.runs.ray_pool.connected", lambda *_: pytest.fail("a cluster was started"))
    with mock_server(MockOpenAI()) as url:
        own = {"openai-http": {"url": url}, "ampd-live": {}}.get(system, {"input_len": 8, "gen_length": 4})
        at_endpoint = {"platform": "endpoint", "executor": "http"}
        cell = Cell(
            system=system,
            dataset="toolbench" if system == "ampd-live" else "osc",
            rate=1.0,
            knobs=(("num_prompts", 2), *own.items()),
            **(at_endpoint if system == "openai-http" else {"platform": "cpu-tiny", "executor": "torch"}),
        )
        experiment = prepare(cell)
    with pytest.raises(UserError, match=f"system='{system}' is served by processes that Ray does not place"):
        RayPool().placed([EXPERIMENTS[0], experiment])


# -- the code on the workers ----------------------------------------------------------------------------------


def test_plug_ins_are_sent_along(tmp_path):
    experiment = prepare(fake_cell())
    copy_code([experiment], tmp_path)
    assert (tmp_path / "support" / "fake_system.py").is_file()
    assert (tmp_path / "repro" / "data" / "results" / "calibration" / "rtx4090.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"support", "repro", "engines", "baselines"}
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> RayWorker:
    monkeypatch.setattr("repro.runs.ray_pool.node_name", lambda: "node 10.0.0.7 (gpu-07)")
    return RayWorker(PACKING, is_measuring=False)


def made(worker: RayWorker, experiment: Experiment, **changes: Any) -> Any:
    code = experiment.code
    asked = {"digest": code.digest, "modules": dict(code.modules), **changes}
    return worker.make(pickle.dumps(experiment), **asked)


def test_a_worker_makes_the_same_run_and_says_where(worker):
    found = made(worker, EXPERIMENTS[0])
    here = PACKING.make(EXPERIMENTS[0])
    told, expected = (parts_of(packed.content) for packed in (found, here))
    assert {**told, PROVENANCE: b""} == {**expected, PROVENANCE: b""}
    assert found.provenance["python"]
    assert found.provenance["command"] == ["repro", "bench"]


def test_a_worker_with_other_code_refuses(worker):
    modules = {**EXPERIMENTS[0].code.modules, "engines.errors": "edited"}
    error = made(worker, EXPERIMENTS[0], digest="edited", modules=modules)
    assert isinstance(error, RunError)
    assert str(error).startswith("node 10.0.0.7 (gpu-07) has other code than this sweep (first: engines.errors)")


def test_a_worker_on_another_machine_refuses_to_measure(worker):
    measured = replace(prepare(fake_cell(executor="torch")), place={"cpu": "another"})
    assert "is not the machine" in str(made(worker, measured))


def test_errors_come_back_with_their_traceback(worker):
    error = made(worker, breaking(EXPERIMENTS[0].cell, ZeroDivisionError("a bug")))
    assert isinstance(error, ZeroDivisionError)
    assert "fail_with" in error.__notes__[0]
    unpicklable = made(worker, deployed(EXPERIMENTS[0], before=raise_awkward))
    assert isinstance(unpicklable, RunError)
    assert str(unpicklable) == "Awkward: 1 and 2 (on node 10.0.0.7 (gpu-07))"


class Awkward(Exception):
    """Pickles, and cannot be read again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def raise_awkward() -> None:
    raise Awkward(1, 2)


# -- a sweep in a pool ----------------------------------------------------------------------------------------


class ScriptedPool(LocalPool):
    """Measured runs on another machine than this."""

    is_here = False

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        return [replace(each, place={"cpu": "elsewhere"}) if each.is_measured else each for each in experiments]


def test_runs_measured_elsewhere_say_so_and_are_reused(tmp_path):
    systems = ("support.fake_system:FAKE", "support.fake_system:OTHER")
    knobs = {COMPARISON: "rates", "num_prompts": 2}
    experiments = [
        prepare(fake_cell(executor="torch", system=system, seed=seed, **knobs))
        for seed in range(2)
        for system in systems
    ]
    pool = ScriptedPool()
    outcomes = Sweep(experiments, Store(tmp_path), pool=pool).run()
    assert [outcome.status for outcome in outcomes] == ["ran"] * 4
    assert all(outcome.run is not None and outcome.run.machine == {"cpu": "elsewhere"} for outcome in outcomes)
    here = Sweep(experiments, Store(tmp_path))
    assert "another machine" in here.why(experiments[0].cell)


COMMANDS = data_beside(__file__, "pool")["commands"]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_ray_one_line_names_the_extra(command, monkeypatch):
    monkeypatch.setattr("repro.runs.ray_pool.find_spec", lambda _: None)
    monkeypatch.setattr("repro.runs.experiment.prepare", lambda _: pytest.fail("cells were prepared"))
    said = refused(repro(*COMMANDS[command], "--pool", "ray"), "pip install 'dllm-serve-repro[ray]'")
    assert said == "error: pool='ray': package 'ray' is not installed: pip install 'dllm-serve-repro[ray]'"
