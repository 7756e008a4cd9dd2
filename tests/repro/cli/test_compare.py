"""``repro compare`` as somebody types it: a scheduler that is slower, the same code on other seeds."""

import json
from pathlib import Path

import pytest
from support.command import Result, refused, repro
from support.forks import repro_in_a_process
from support.stored_runs import parts
from support.tables import data_beside

CASES = data_beside(__file__, "cases")

SLOW = """
from collections import deque

from engines.dllm.scheduling import PhaseScheduler


class Own(PhaseScheduler):
    '''In three of eight steps the oldest request runs alone.'''

    alone = ALONE
    steps = 0

    def schedule(self):
        self.steps += 1
        if self.steps % 8 not in self.alone or len(self.running) < 2:
            return super().schedule()
        running, waiting = self.running, self.waiting
        self.running, self.waiting = running[:1], deque()
        plan = super().schedule()
        self.running, self.waiting = running, waiting
        return plan
"""
GRID = """
system: dllm-serve
dataset: livebench
platform: l40s
rate: 2
knobs: {num_prompts: 24, scheduler: [SCHEDULERS]}
"""


def call(folder: Path, *words: object) -> Result:
    """In a process of its own, as the code of a plug-in is read once."""
    return repro_in_a_process(folder, *words)


def write(folder: Path, *, alone: str, schedulers: str) -> None:
    (folder / "mine.py").write_text(SLOW.replace("ALONE", alone))
    (folder / "grid.yaml").write_text(GRID.replace("SCHEDULERS", schedulers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seeds of the default scheduler, five of one that is a tenth slower."""
    root = tmp_path_factory.mktemp("compare")
    write(root, alone="(0, 3, 6)", schedulers="null")
    done = call(root, "sweep", "grid.yaml", "--repeats", 10, "--result-dir", "runs", "--jobs", 1)
    assert (done.code, done.err.splitlines()[-1]) == (0, "10 runs done, 0 reused; runs: runs")
    write(root, alone="(0, 3, 6)", schedulers="mine:Own")
    assert call(root, "sweep", "grid.yaml", "--repeats", 5, "--result-dir", "runs", "--jobs", 1).code == 0
    return root


SIDES = ("dllm-serve", "dllm-serve@scheduler=mine:Own")


def test_a_scheduler_that_is_a_tenth_slower_is_told_with_five_repeats(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    runs = ("--result-dir", folder / "runs")
    done = repro("compare", *SIDES, *runs)
    assert (done.code, done.err) == (1, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.splitlines()[-1] == "changed beyond 2 % outside noise: throughput_tok_s"
    assert "5 runs without a partner left out" in done.out
    assert "A: dllm-serve: 10 runs, composed, commit " in done.out
    told = repro("compare", *SIDES, *runs, "--json")
    assert told.code == 1
    found = json.loads(told.out)
    (row,) = found["comparisons"][0]["rows"]
    assert (found["changed"], row["verdict"], row["ratio"]["pairs"]) == (True, "lower", 5)
    assert 0.87 < row["ratio"]["low"] < row["ratio"]["mean"] < row["ratio"]["high"] < 0.93
    back = repro("compare", *reversed(SIDES), *runs, "--json")
    assert json.loads(back.out)["comparisons"][0]["rows"][0]["verdict"] == "higher"
    assert repro("compare", *SIDES, *runs, "--tolerance", "0.2").code == 0


def test_the_same_code_on_other_seeds_reports_no_change(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for file in (folder / "runs").glob("dllm-serve_*"):
        seed = int(file.name.split("_s")[1].split("_")[0])
        if "scheduler" not in json.dumps(parts(file)["cell"]["knobs"]):
            (tmp_path / ("a" if seed < 5 else "b") / file.name).write_bytes(file.read_bytes())
    metrics = ("--metric", "throughput_tok_s", "--metric", "e2el_s.mean")
    done = repro("compare", tmp_path / "a", tmp_path / "b", *metrics)
    assert (done.code, done.err) == (0, "")
    assert "no seed in common: paired in the order of seeds" in done.out
    assert done.out.splitlines()[-1] == "no change beyond 2 % outside noise"
    assert max(map(len, done.out.splitlines())) <= 80
    (tmp_path / "c").mkdir()
    for file in (tmp_path / "a").iterdir():
        (tmp_path / "c" / file.name).write_bytes(file.read_bytes())
    same = repro("compare", tmp_path / "a", tmp_path / "c", *metrics, "--json")
    rows = [row for each in json.loads(same.out)["comparisons"] for row in each["rows"]]
    assert (same.code, [(row["verdict"], row["ratio"]["mean"]) for row in rows]) == (0, [("same", 1)] * 2)


def test_a_run_that_is_invalid_ends_with_code_1(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("repro.workbench.comparison._is_valid", lambda pair: pair.a.cell.seed != 2)
    done = repro("compare", *SIDES, "--result-dir", folder / "runs", "--tolerance", "1")
    assert (done.code, "1 pair left out, of which a run is INVALID" in done.out) == (1, True)


def test_a_folder_of_runs_has_no_effect_beside_two(folder):
    both = (folder / "runs", folder / "runs")
    refused(repro("compare", *both, "--result-dir", folder / "runs"), "result_dir=")


def test_two_versions_of_the_code_are_told_apart(tmp_path):
    for folder, alone in (("before", "()"), ("after", "(0, 3, 6)")):
        write(tmp_path, alone=alone, schedulers="mine:Own")
        asked = ("sweep", "grid.yaml", "--repeats", 5, "--result-dir", folder, "--jobs", 1)
        assert call(tmp_path, *asked).code == 0
    done = call(tmp_path, "compare", "before", "after")
    assert done.code == 1, done
    assert "code differs in mine" in done.out.splitlines()
