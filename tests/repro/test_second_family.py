"""The harness knows no family: one that it has never heard of runs, resumes, is drawn and claimed from its own module."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import command, md1
from support.cells import a_cell
from support.command import Result
from support.forks import repro_in_a_process

from repro.paths import REPO
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep

Repro = Callable[..., Result]
SYSTEM, WORKSHOP = "support.md1:MD1", "support.md1:WORKSHOP"


@pytest.fixture
def repro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repro:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, code: int = 0) -> Result:
        result = command.repro(*arguments)
        assert result.code == code, result.err
        return result

    return call


def bench(*options: str) -> tuple[str, ...]:
    words = f"bench --system {SYSTEM} --platform {WORKSHOP} --dataset-name jobs --request-rate 0.5 --result-dir runs"
    return (*words.split(), *options)


def test_it_runs_with_its_knob_and_is_not_run_twice(repro):
    first = repro(*bench("--knob", "service_s=0.5", "--json"))
    assert "1 run done, 0 reused" in first.err
    (run,) = json.loads(first.out)["runs"]
    assert (run["obtained"], run["valid"], run["cell"]["knobs"]["service_s"]) == ("simulated", True, 0.5)
    assert set(run["summary"]) >= {"mean_queue", "queue_wait_s", "throughput_tok_s"}
    assert "num_steps" not in run["summary"], "another family's metric"
    assert "0 runs done, 1 reused" in repro(*bench("--knob", "service_s=0.5")).err
    assert "1 run done" in repro(*bench("--knob", "service_s=0.25")).err


def test_its_table_shows_its_own_columns(repro):
    said = repro(*bench()).out
    assert "queue" in said
    assert "outside fwd" not in said


def test_a_sweep_in_processes_stores_what_one_in_turn_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(REPO), str(REPO / "tests"))))
    experiments = [prepare(a_cell(SYSTEM, "jobs", WORKSHOP, "virtual", rate=0.5, seed=seed)) for seed in range(3)]
    for name, jobs in (("here", 1), ("pool", 2)):
        Sweep(experiments, Store(tmp_path / name)).run(jobs=jobs)
    here, pool = ([Store(tmp_path / name).load(e) for e in experiments] for name in ("here", "pool"))
    for one, other in zip(here, pool, strict=True):
        assert one.table("work") == other.table("work")
        assert one.summary == other.summary


def test_it_is_drawn_and_claimed(repro, tmp_path, monkeypatch):
    assert "no runs" not in repro("reproduce", "support.md1:", "--result-dir", "runs", "--out-dir", "out").err
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"md1.png", "md1.pdf", "md1.csv"}
    (tmp_path / "claims.yaml").write_text(md1.CLAIMS_YAML)
    (tmp_path / "queueing.py").write_text(
        f"from pathlib import Path\nfrom support.md1 import paper_at\n\nPAPER = paper_at(Path({str(tmp_path / 'claims.yaml')!r}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    claims = ("claims", "--paper", "queueing:PAPER", "--result-dir", "runs", "--out-dir", "out", "--json")
    (claim,) = json.loads(repro(*claims).out)["claims"]
    told = [claim[name] for name in ("id", "verdict", "role", "obtained")]
    assert told == ["md1-wait", "reproduced", "prediction", "simulated"]
    assert (tmp_path / "out" / "claims-queueing.csv").is_file()
    assert claim["committed"] is False


def test_an_edit_of_its_module_runs_it_again(tmp_path):
    text = Path(md1.__file__).read_text(encoding="utf-8").replace("support.md1", "own_md1")
    own = tmp_path / "own_md1.py"
    own.write_text(text)
    asked = [each.replace("support.md1", "own_md1") for each in bench()]

    def said() -> str:
        """By a process that has never heard of the family."""
        done = repro_in_a_process(tmp_path, *asked)
        assert done.code == 0, done.err
        return done.err

    assert "1 run done, 0 reused" in said()
    own.write_text(text.replace("start + self.service_s", "start + 2 * self.service_s"))
    assert "1 run done, 0 reused" in said()
    own.write_text(f"{own.read_text()}\n# nothing more\n")
    assert "0 runs done, 1 reused" in said()
