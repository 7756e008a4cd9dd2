"""``repro gpu-suite``: the whole of it small, on this CPU, and what it says where there is no card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from repro.gpu_suite.stages import FIRST
from repro.paths import REPO


def repro(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "repro", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "REPRO_COMMIT": "abcdef0"},
    )


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], set[str]]:
    """What a call says, and the jobs in it that a busy machine spoilt: it submits requests late, and such a run says so
    and is INVALID, which is no fault of the suite."""
    said = json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if ": failed in" in line and "ms late by the harness" in line]
    late = {line.split("] ")[1].split(":")[0] for line in lines}
    assert set(said["failed"]) == late, done.stderr[-3000:]
    assert done.returncode == (1 if late else 0)
    return said, late


def test_the_small_suite_from_end_to_end(tmp_path: Path) -> None:
    root = tmp_path / "suite"
    command = ("gpu-suite", "--platform", "cpu-tiny", "--budget", 10**6, "--result-dir", root, "--json")
    early, _ = outcome(repro(*command, "--first"))
    known = list(FIRST[1:])  # this machine's tests marked gpu are skipped
    state = json.loads((root / "suite.json").read_text())["jobs"]
    assert list(dict.fromkeys(job["stage"] for job in state.values())) == known
    assert (early["ran"], early["left"], early["drawn"]) == (len(state), [], [])
    assert early["command"] == (
        f"python3 -m repro gpu-suite --budget 1e+06 --platform cpu-tiny --result-dir {root} --first"
    )

    whole, late = outcome(repro(*command, "--export", tmp_path / "export"))
    everything = json.loads((root / "suite.json").read_text())["jobs"]
    # Of the first stages, only what a busy machine spoilt is run again.
    assert whole["ran"] == len(everything) - len(state) + len(early["failed"])
    assert whole["left"] == []
    assert whole["drawn"] == ([] if late else ["table4"])
    facts = {
        (manifest := json.loads(path.read_text()))["facts"]["device"]: manifest["facts"]["facts"]
        for path in root.glob("runs/*GOLDENS*/manifest.json")
    }
    assert facts["cpu"]["passed"] == facts["cpu"]["cases"] == 18
    (agreement,) = (json.loads(path.read_text()) for path in root.glob("runs/*AGREEMENT*/manifest.json"))
    assert 0 < agreement["facts"]["facts"]["share"] <= 1
    assert agreement["facts"]["facts"]["n"] == 2 * 64
    page = (root / "README.md").read_text()
    assert "| throughput | tiny | all | dllm-serve |" in page
    assert "- commit " in page
    assert "Left: 0 jobs" in page
    assert late or (root / "figures" / "table4-cpu-tiny.csv").is_file()
    with tarfile.open(tmp_path / "export" / "gpu-suite.tar.gz") as archive:
        names = {
            Path(name).parts[2]
            for name in archive.getnames()
            if Path(name).parts[1:2] == ("runs",) and name.count("/") > 1
        }
    assert names >= everything.keys()

    again, _ = outcome(repro(*command))
    assert again["ran"] == len(whole["failed"])
    assert late or again["stopped"] == "everything is done"


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["table", "json"])
def test_dry_run_lists_everything_anywhere_and_leaves_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--dry-run", "--result-dir", tmp_path / "none", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "none").exists()
    if arguments:
        jobs = json.loads(done.stdout)["jobs"]
        assert {each["status"] for each in jobs} == {"new"}
        assert "goldens" in {each["stage"] for each in jobs}
    else:
        assert "goldens" in done.stdout


def test_the_first_stages_are_listed_in_their_order(tmp_path: Path) -> None:
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--dry-run", "--first", "--result-dir", tmp_path, "--json")
    assert list(dict.fromkeys(each["stage"] for each in json.loads(done.stdout)["jobs"])) == list(FIRST[1:])


def test_without_a_card_it_says_what_is_missing(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = repro("gpu-suite", "--result-dir", tmp_path / "none")
    assert done.returncode == 0
    assert "not run, torch sees no CUDA device" in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "0"), "budget=0 must be a positive number"),
        (
            ("--platform", "cpu-tiny", "--stage", "nosuch", "--dry-run"),
            "stage='nosuch' is unknown: use one of throughput, step, small-card, burst, profile, kernels, goldens,",
        ),
        (("--platform", "cpu-tiny", "--stage", "step", "--first", "--dry-run"), "stage='step' and first: give one"),
        (("--platform", "nosuch"), "platform='nosuch' is unknown"),
    ],
)
def test_refusals(arguments: tuple[str, ...], says: str) -> None:
    done = repro("gpu-suite", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_one_stage_alone(tmp_path: Path) -> None:
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--stage", "agreement", "--result-dir", tmp_path, "--json")
    assert json.loads(done.stdout)["ran"] == 1, done.stderr
