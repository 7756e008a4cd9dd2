"""``repro gpu-suite``: the whole of it small, on this CPU, and what it says where there is no card."""

import functools
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.command import Result, repro
from support.forks import repro_in_a_process
from support.stored_runs import parts
from support.tables import data_beside

from engines.cost import peaks
from repro.families.cluster import instance
from repro.gpu_suite import checks, suite
from repro.gpu_suite.suite import FIRST, Prediction, scale_of, stages
from repro.paths import REPO

CASES = data_beside(__file__, "cases")

TINY = {each.stage for each in stages(scale_of("cpu-tiny"))}


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_COMMIT", "abcdef0")


def outcome(done: Result) -> dict[str, Any]:
    assert done.code == 0, done.err[-3000:]
    said: dict[str, Any] = json.loads(done.out)
    assert said["failed"] == []
    return said


def run_script(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """A benchmark in this process: seven that start and import torch take longer than what they measure. Started as the
    suite does they are in tests/repro/gpu_suite/test_checks.py."""
    said, code = io.StringIO(), 0
    with mock.patch.object(sys, "argv", list(command[1:])), redirect_stdout(said):
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return subprocess.CompletedProcess(list(command), code, said.getvalue(), "")


@pytest.mark.long
def test_the_small_suite_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_run_command", run_script)
    # Four scripts measure the same machine, and a profile of fewer sizes has all of its parts.
    monkeypatch.setattr(peaks, "measured_peaks", functools.cache(peaks.measured_peaks))
    monkeypatch.setattr(peaks, "BUDGET_S", 0.05)
    few = replace(instance.TINY, lengths=(4, 16, 64), batches=(1, 4), profile_lengths=(1, 16, 64, 256))
    monkeypatch.setattr(instance, "TINY", few)
    root = tmp_path / "suite"
    command = ("gpu-suite", "--platform", "cpu-tiny", "--budget", 10**6, "--result-dir", root, "--json")
    early = outcome(repro(*command, "--first"))
    known = [stage for stage in FIRST if stage in TINY]
    state = json.loads((root / "suite.json").read_text())["jobs"]
    assert list(dict.fromkeys(job["stage"] for job in state.values())) == known
    assert (early["ran"], early["left"], early["drawn"]) == (len(state), [], [])
    verdict = (root / "verdict.md").read_text()
    assert "| golden cases in float32 | 18 of 18 cases | - | all, token by token | met |" in verdict
    assert "| throughput | tiny | fast-dllm | 2 |" in verdict
    assert "not run yet" not in verdict
    assert "## Calibration of the card" in verdict
    assert early["command"] == (
        f"python3 -m repro gpu-suite --budget 1e+06 --platform cpu-tiny --result-dir {root} --first"
    )

    whole = outcome(repro(*command, "--export", tmp_path / "export"))
    everything = json.loads((root / "suite.json").read_text())["jobs"]
    assert whole["ran"] == len(everything) - len(state)
    assert whole["left"] == []
    assert whole["drawn"] == ["table4"]
    facts = {
        (manifest := parts(path)["manifest"])["facts"]["device"]: manifest["facts"]["facts"]
        for path in root.glob("runs/*GOLDENS*")
    }
    assert facts["cpu"]["passed"] == facts["cpu"]["cases"] == 18
    (agreement,) = (parts(path)["manifest"] for path in root.glob("runs/*AGREEMENT*"))
    assert 0 < agreement["facts"]["facts"]["share"] <= 1
    assert agreement["facts"]["facts"]["n"] == 2 * 64
    assert "| throughput | tiny | dllm-serve | 2 |" in (root / "verdict.md").read_text()
    page = (root / "README.md").read_text()
    assert "- commit " in page
    assert "Left: 0 jobs" in page
    assert (root / "figures" / "table4-cpu-tiny.csv").is_file()
    with tarfile.open(tmp_path / "export" / "gpu-suite.tar.gz") as archive:
        names = {
            Path(name).parts[2].removesuffix(".jsonl.gz")
            for name in archive.getnames()
            if Path(name).parts[1:2] == ("runs",) and name.count("/") > 1
        }
        assert {"suite/verdict.md", "suite/calibration.json"} <= set(archive.getnames())
    assert names >= everything.keys()

    # A process of its own goes on as well: what is done is in the folder alone.
    again = outcome(repro_in_a_process(REPO, *command))
    assert {name: again[name] for name in ("ran", "stopped")} == {"ran": 0, "stopped": "everything is done"}


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["table", "json"])
def test_dry_run_lists_everything_anywhere_and_leaves_nothing(tmp_path, arguments):
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--dry-run", "--result-dir", tmp_path / "none", *arguments)
    assert (done.code, done.err) == (0, "")
    assert not (tmp_path / "none").exists()
    if arguments:
        jobs = json.loads(done.out)["jobs"]
        assert {each["status"] for each in jobs} == {"new"}
        assert "goldens" in {each["stage"] for each in jobs}
    else:
        assert "goldens" in done.out


def test_without_a_card_it_says_what_is_missing(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = repro("gpu-suite", "--result-dir", tmp_path / "none")
    assert done.code == 1
    assert "nothing was run, torch sees no CUDA device" in done.out
    assert not (tmp_path / "none").exists()


def test_a_budget_that_nothing_fits_into_is_no_success(tmp_path):
    done = repro(
        "gpu-suite", "--platform", "cpu-tiny", "--budget", 0.5, "--stage", "agreement", "--result-dir", tmp_path
    )
    assert done.code == 1
    assert "0 jobs ran" in done.out


DRIVERS = data_beside(__file__, "gpu_suite")["drivers"]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A card as nvidia-smi tells it, on a machine whose torch sees none."""

    def tell(name: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho '{DRIVERS[name]}'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)

    return tell


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_platform_is_that_of_the_card(driver, name, monkeypatch):
    driver(name)
    # What a job takes is simulated, of every job for seconds; test_stages looks at it.
    monkeypatch.setattr(suite, "predict", lambda cells, cache: [Prediction(20.0, None)] * len(cells))
    listed = json.loads(repro("gpu-suite", "--first", "--dry-run", "--json").out)
    assert listed["platform"] == name
    assert {job["name"].split("_")[2] for job in listed["jobs"] if job["stage"] == "throughput"} == {name}


@pytest.mark.parametrize(("card", "arguments", "says"), CASES["cards"])
def test_another_card_is_refused_by_name(driver, tmp_path, card, arguments, says):
    driver(card)
    done = repro("gpu-suite", "--result-dir", tmp_path / "none", *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert not (tmp_path / "none").exists()


def test_one_stage_alone(tmp_path):
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--stage", "agreement", "--result-dir", tmp_path, "--json")
    assert json.loads(done.out)["ran"] == 1, done.err
