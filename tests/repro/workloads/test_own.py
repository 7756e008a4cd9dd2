"""A workload of a user's own is served as a file with the same sessions is, by every family, whoever names it and wherever it runs."""

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cells import a_cell, ran
from support.command import refused, repro
from support.own import Dialogues
from support.tables import data_beside

from engines.errors import UserError
from repro import api
from repro.files import forget
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.workloads.rounds import RecordedRound, TracedSession

OWN = "support.own:Dialogues"
FAMILIES = {"dllm-serve": "l40s", "vllm-sim": "h20x32", "laps": "h200"}
ONE = (RecordedRound(100, 16),)


@pytest.fixture(autouse=True)
def _outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    forget()


def cell(system: str, workload: Any, dataset: str, *, rate: float | None = None, seed: int = 0, **knobs: Any) -> Cell:
    return a_cell(system, dataset, FAMILIES[system], "roofline", rate=rate, seed=seed, workload=workload, **knobs)


def written(name: str, *, seed: int = 0, **knobs: Any) -> str:
    rows = (
        {"arrival_s": each.arrival_s, "rounds": [[*one] for one in each.rounds]}
        for each in Dialogues(**knobs).sessions(seed)
    )
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return name


# ---- as a file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", FAMILIES)
@pytest.mark.parametrize("when", [{"arrivals": "trace"}, {"rate": 2.0}])
def test_it_is_served_as_a_file_of_the_same_sessions(system, when):
    knobs = {} if system == "dllm-serve" else {"most": 4}
    file, own = (
        ran(cell(system, workload, name, **when, **more))
        for workload, name, more in ((written("rows.jsonl", **knobs), "rows", {}), (OWN, "Dialogues", knobs))
    )
    assert own[1].tables == file[1].tables
    assert own[0].family.summarize(own[1]) == file[0].family.summarize(file[1])
    assert own[0].workload.provenance.checksum == file[0].workload.provenance.checksum
    told = own[1].manifest["dataset"]
    assert (told["location"], told["revision"]) == (f"{OWN} with most=4" if knobs else OWN, None)


def test_a_field_called_num_prompts_has_what_the_run_asks_for():
    asked = {"rate": 1.0, "seed": 3}
    for system in ("dllm-serve", "vllm-sim"):
        _, record = ran(cell(system, OWN, "Dialogues", num_prompts=40, **asked))
        assert sorted(record.requests["prompt_len"]) == sorted(
            each.rounds[0].prefill_tokens for each in Dialogues(num_prompts=40).sessions(3)
        )
        assert "repeat" not in record.manifest["dataset"]["description"]
    assert len(ran(cell("vllm-sim", OWN, "Dialogues", **asked))[1].requests["prompt_len"]) == 24


def test_a_capacity_is_that_of_the_file():
    """Asked for as many sessions as there are, of one seed: others are drawn anew for each."""
    asked = "--slo ttft:p95:2000 --gpus 2 --model Qwen2.5-7B --num-prompts 24 --seeds 1 --json"
    rates = []
    for workload in (written("rows.jsonl"), OWN):
        result = repro(f"capacity --workload {workload} --system vllm-sim {asked}")
        assert result.code == 0, result
        (answer,) = json.loads(result.out)["answers"]
        rates.append((answer["rate"], answer["plan"], answer["ttft_p95_s"]))
    assert rates[0] == rates[1]
    assert f"{OWN} with num_prompts=24: 24 sessions" in result.err


# ---- from everywhere ---------------------------------------------------------------------------------------


def test_options_a_grid_and_python_are_the_same_run():
    knobs = {"most": 3, "every_s": 0.5, "arrivals": "trace"}
    options = ("--workload", OWN, "--arrivals", "trace", "--knob", "most=3", "--knob", "every_s=0.5")
    grid = {"system": "vllm-sim", "platform": "h20x32", "knobs": {"workload": OWN, **knobs}}
    Path("grid.yaml").write_text(json.dumps(grid))
    found = []
    for command in (("bench", "--system", "vllm-sim", "--platform", "h20x32", *options), ("sweep", "grid.yaml")):
        result = repro(*command, "--result-dir", "runs", "--json")
        assert result.code == 0, result
        (told,) = json.loads(result.out)["runs"]
        found.append(Path(told["file"]).name)
    for workload in (OWN, Dialogues):
        found.append(api.run("vllm-sim", platform="h20x32", result_dir="runs", workload=workload, **knobs).file.name)
        grid["knobs"] = {"workload": workload, **knobs}
        found += [run.file.name for run in api.sweep(grid, result_dir="runs")]
    assert {*found} == {path.name for path in Path("runs").glob("*.gz")}
    assert len({*found}) == 1
    assert found[0].startswith("vllm-sim_Dialogues_h20x32")


PLUG_IN = """
from dataclasses import dataclass
from repro.workloads.rounds import RecordedRound, TracedSession

@dataclass(frozen=True)
class Steady:
    num: int = 12

    def sessions(self, seed):
        for index in range(self.num):
            yield TracedSession((RecordedRound(300 + 10 * ((index + seed) % 7), 32),), 0.5 * index)
"""


def test_spawned_workers_draw_from_it_too(tmp_path, monkeypatch):
    """AMPD's planner, in the process that makes the run, asks for the sessions of other seeds."""
    (tmp_path / "shelf_of_workloads.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"workload": "shelf_of_workloads:Steady", "arrivals": "trace", "num": 10}
    knobs = {**own, "model": "Qwen2.5-7B", "num_gpus": 4}
    grid = {"system": "ampd", "platform": "h20x32", "seed": [0, 1], "knobs": knobs}
    here, there = (api.sweep(grid, result_dir=tmp_path / name, jobs=jobs) for name, jobs in (("a", 1), ("b", 2)))
    assert [run.summary for run in there] == [run.summary for run in here]
    assert [run.cell.dataset for run in there] == ["Steady", "Steady"]
    assert all(len(run.record.requests["prompt_len"]) == 10 for run in there)


# ---- what is none ------------------------------------------------------------------------------------------


class Given:
    """Yields what a test has put here."""

    what: Any = None

    def sessions(self, seed: int) -> Any:
        return self.what() if callable(self.what) else self.what


class Fails:
    def sessions(self, seed: int) -> Iterator[TracedSession]:
        yield TracedSession(ONE)
        raise LookupError(seed)


class Bare:
    def __init__(self, size: int) -> None:
        self.size = size


class Restless:
    def sessions(self, seed: int) -> Iterator[TracedSession]:
        yield TracedSession((RecordedRound(random.SystemRandom().randint(1, 10**9), 1),))


class Shapeless:
    pass


def asked(workload: Any, **knobs: Any) -> Cell:
    name = workload.partition(":")[2] if isinstance(workload, str) else workload.__name__
    return cell("vllm-sim", workload, name, **knobs)


def refusal(asked_for: Cell) -> str:
    with pytest.raises(UserError) as caught:
        prepare(asked_for)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SESSION = f"{__name__}:Given, session 1"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (None, f"workload='{__name__}:Given' gives NoneType for its sessions: yield each"),
        ([], f"workload='{__name__}:Given' yields no session: yield at least one"),
        ([ONE], f"{SESSION} is of tuple: yield a TracedSession of repro.workloads.rounds"),
        (
            [TracedSession(())],
            f"{SESSION}: rounds=() must be RecordedRounds, at least one: write (RecordedRound(800, 60),)",
        ),
        ([TracedSession(((8, 1),))], f"{SESSION}: rounds=((8, 1),) must be RecordedRounds, at least one"),
        ([TracedSession((RecordedRound(0, 1),))], f"{SESSION}: prefill_tokens=0 must be at least 1"),
        ([TracedSession((RecordedRound(8, -2),))], f"{SESSION}: decode_tokens=-2 must be at least 1"),
        ([TracedSession((RecordedRound(8, None),))], f"{SESSION}: decode_tokens=None must be a whole number"),
        ([TracedSession((RecordedRound(8.5, 1),))], f"{SESSION}: prefill_tokens=8.5 must be a whole number"),
        ([TracedSession((RecordedRound(8, 1, -1.0),))], f"{SESSION}: delay_s=-1.0 must not be negative"),
        ([TracedSession(ONE, -0.5)], f"{SESSION}: arrival_s=-0.5 must not be negative"),
        ([TracedSession(ONE, float("nan"))], f"{SESSION}: arrival_s=nan must be a finite number"),
        ([TracedSession(ONE, 0.0, 7)], f"{SESSION}: prompt=7 must be a text"),
        (
            [TracedSession(2 * ONE, 0.0, "Why?")],
            f"{SESSION}: a prompt is the text of one round, and it has 2: leave it out",
        ),
        (
            [TracedSession(ONE, 0.0), TracedSession(ONE)],
            f"workload='{__name__}:Given': some sessions have an arrival_s, and others, the first of which differs in "
            f"{__name__}:Given, session 2, have none: give all one, or none",
        ),
        (
            lambda _: (TracedSession(ONE) for _ in count()),
            f"workload='{__name__}:Given' yields more than 50 sessions: end it",
        ),
    ],
)
def test_what_yields_no_sessions_is_refused_in_a_sentence(what, says, monkeypatch):
    monkeypatch.setattr("repro.workloads.served.MOST_ROWS", 50)
    monkeypatch.setattr(Given, "what", what)
    assert refusal(asked(Given, rate=1.0)).startswith(says)


@pytest.mark.parametrize(("workload", "knobs", "says"), data_beside(__file__, "refused")["own"])
def test_what_is_no_workload_is_refused_in_a_sentence(workload, knobs, says):
    named = workload.replace("{here}", __name__)
    assert refusal(asked(named, rate=1.0, **knobs)).startswith(says.replace("{here}", __name__))


def test_times_are_its_own_and_may_not_fall(monkeypatch):
    monkeypatch.setattr(Given, "what", [TracedSession(ONE)])
    where = f"{__name__}:Given"
    assert refusal(asked(Given, arrivals="trace")) == (
        f"arrivals='trace': {where} has no arrival_s for its sessions: give each one, or use other arrivals"
    )
    forget()
    monkeypatch.setattr(Given, "what", [TracedSession(ONE, 1.0), TracedSession(ONE, 0.5)])
    assert refusal(asked(Given, arrivals="trace")) == (
        f"{where}, session 2: field 'arrival_s' is 0.5: earlier than 1.0 before it: sort the workload by it for arrivals='trace'"
    )


def test_numbers_of_numpy_are_as_good(monkeypatch):
    numbers = [(np.int64(100), np.int32(16), np.float64(0.5)), (100, 16, 0.5)]
    checksums = []
    for one in numbers:
        forget()
        monkeypatch.setattr(Given, "what", [TracedSession([RecordedRound(*one)], np.float64(3))])
        checksums.append(prepare(asked(Given, rate=1.0)).workload.provenance.checksum)
    assert checksums[0] == checksums[1]


def test_the_command_line_ends_with_2_and_one_line():
    refused(
        repro("bench", "--system", "ampd", "--platform", "h20x32", "--workload", "nowhere:Bursts"),
        "workload='nowhere:Bursts': there is no module nowhere",
    )
    refused(
        repro("capacity", "--workload", OWN, "--dataset-name", "gaia", "--slo", "ttft:p95:100"),
        f"dataset_name='gaia' has no effect with workload='{OWN}'",
    )
