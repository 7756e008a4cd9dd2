"""Sweeps on a real Ray cluster of this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command import repro
from support.fake_system import deployed, die_until, fake_cell, hang_once
from support.stored_runs import contents

from engines.errors import RunError, UserError
from repro.paths import REPO
from repro.runs.experiment import Experiment, prepare
from repro.runs.ray_pool import RayPool
from repro.runs.store import Store
from repro.runs.sweep import CellOutcome, Sweep

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra ray)")

EXPERIMENTS = [prepare(fake_cell(seed=seed)) for seed in range(8)]
FIG3 = ("reproduce", "fig3", "--platform", "rtx4090", "--num-prompts", "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """A sweep in this process."""
    root = tmp_path_factory.mktemp("here")
    Sweep(EXPERIMENTS, Store(root)).run(jobs=1)
    return contents(root)


def sweep_on_ray(experiments: Sequence[Experiment], root: Path) -> list[CellOutcome]:
    with RayPool() as pool:
        sweep = Sweep(experiments, Store(root), pool=pool)
        sweep.check()
        return sweep.run(continue_on_error=True)


@pytest.mark.parametrize("num_deaths", [0, 1, 9])
def test_the_same_bytes_whatever_dies(num_deaths, expected, tmp_path):
    (deaths := tmp_path / "deaths").mkdir()
    experiments = [*EXPERIMENTS]
    experiments[3] = deployed(EXPERIMENTS[3], before=partial(die_until, deaths, num_deaths))
    outcomes = sweep_on_ray(experiments, tmp_path / "runs")
    is_lost = num_deaths == 9
    assert len(list(deaths.iterdir())) == (2 if is_lost else num_deaths)
    assert [outcome.status for outcome in outcomes] == ["failed" if is_lost and n == 3 else "ran" for n in range(8)]
    if is_lost:
        assert outcomes[3].reason.startswith("the worker on node 127.0.0.1 (")
        # Ray says Unavailable where it has not yet been told of the death.
        assert re.search(r"was lost \(Actor(Died|Unavailable)Error\); it was tried 2 times$", outcomes[3].reason)
        # The same command goes on.
        outcomes = sweep_on_ray(EXPERIMENTS, tmp_path / "runs")
        assert [outcome.status for outcome in outcomes].count("ran") == 1
    assert contents(tmp_path / "runs") == expected


def test_an_address_where_nothing_is(tmp_path):
    with pytest.raises(UserError, match="no Ray cluster answers there"), RayPool("auto") as pool:
        Sweep(EXPERIMENTS[:1], Store(tmp_path), pool=pool).check()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_node_that_dies_is_named_or_replaced(num_nodes, expected, tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setattr("repro.runs.pool.PATIENCE_S", 0.5)
    (begun := tmp_path / "begun").mkdir()
    experiments = [*EXPERIMENTS]
    experiments[3] = deployed(EXPERIMENTS[3], before=partial(hang_once, begun))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1)

        def kill() -> None:
            while not (pids := list(begun.iterdir())):
                time.sleep(0.05)
            stat = Path(f"/proc/{pids[0].name}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # the node itself, whose child a worker is

        killer = threading.Thread(target=kill)
        killer.start()
        with RayPool(cluster.address) as pool:
            sweep = Sweep(experiments, Store(tmp_path / "runs"), pool=pool)
            if num_nodes == 2:
                assert [outcome.status for outcome in sweep.run(jobs=1)] == ["ran"] * 8
                assert contents(tmp_path / "runs") == expected
            else:
                with pytest.raises(RunError, match=r"^node \S+ \(\S+\) died: nothing is left to make the other runs"):
                    sweep.run(jobs=1)
                assert set(contents(tmp_path / "runs")) < set(expected)
        killer.join()
    finally:
        cluster.shutdown()


def command(*arguments: object, **how: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "repro", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def of_ray() -> set[int]:
    """Processes of clusters that commands start."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if b"/tmp/repro-ray-" in line:
            found.add(int(path.parent.name))
    return found


def test_figure_3_gives_the_same_bytes_and_leaves_nothing(tmp_path):
    local = repro(*FIG3, "--result-dir", tmp_path / "local", "--out-dir", tmp_path / "figures")
    assert local.code == 0, local.err
    process = command(*FIG3, "--pool", "ray", "--result-dir", tmp_path / "ray", "--out-dir", tmp_path / "figures")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(list((tmp_path / "ray").iterdir())) == 48
    assert of_ray() == set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_cluster_too(number, code, tmp_path):
    process = command(*FIG3, "--pool", "ray", "--result-dir", tmp_path / "runs", "--out-dir", tmp_path / "figures")
    while process.poll() is None and not (tmp_path / "runs").is_dir():
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code, said
    assert said.splitlines()[-1].endswith("; the same command continues")
    assert "Traceback" not in said
    assert of_ray() == set()
