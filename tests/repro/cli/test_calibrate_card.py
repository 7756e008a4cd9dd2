"""``repro calibrate --measured``: a card in a file, fitted to steps that its owner timed."""

import csv
import json
from pathlib import Path

import pytest
from support.command import refused, repro
from support.own_cards import CARD, PLANTED, timed_steps, write_card, write_steps

from engines.cost.roofline import CardCalibration
from repro import api
from repro.families.card_file import card_of
from repro.files import forget
from repro.paths import CALIBRATION

ASKED = "calibrate --platform mine.yaml --measured m.csv"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    forget()
    write_card(tmp_path)
    return tmp_path


def measured(folder: Path, noise: float = 0.0) -> None:
    card, _ = card_of(folder / "mine.yaml")
    write_steps(folder / "m.csv", timed_steps(card, noise))


def test_planted_constants_come_back_and_runs_rest_on_them(own_folder):
    measured(own_folder)
    committed = sorted(CALIBRATION.iterdir())
    write_card(own_folder, calibration="mine.calibration.json")  # named before it is there
    done = repro(ASKED)
    assert done.code == 0, done.err
    assert "l4: constants fitted to 12 steps of m.csv" in done.out
    assert "median 0.00 %, worst 0.00 %" in done.out
    assert {path.name for path in own_folder.iterdir()} == {
        "mine.yaml",
        "m.csv",
        "mine.calibration.json",
        "mine.residuals.csv",
    }
    assert sorted(CALIBRATION.iterdir()) == committed
    found = CardCalibration.load(own_folder / "mine.calibration.json")
    for name, value in PLANTED.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    run = api.run("dllm-serve", "livebench", platform="mine.yaml", rate=0.1, num_prompts=4, result_dir="runs")
    assert run.obtained == "simulated"
    assert run.manifest["facts"]["calibration"] == "l4, fitted on 12 steps of m.csv"


def test_json_and_the_csv_say_the_same_and_noise_shows(own_folder):
    measured(own_folder, 0.05)
    done = repro(f"{ASKED} --out fits --json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["card"], said["obtained"]) == ("l4", "fitted")
    assert said["files"] == ["fits/mine.calibration.json", "fits/mine.residuals.csv"]
    assert 1 < said["residuals"]["median_percent"] < 10
    assert said["leave_one_out"]["worst_percent"] > said["residuals"]["worst_percent"] > 2
    with Path("fits/mine.residuals.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["error_percent"]) for row in rows] == [row["error_percent"] for row in said["rows"]]
    assert not (own_folder / "mine.calibration.json").exists()
    dry = repro(f"{ASKED} --dry-run --json")
    assert json.loads(dry.out) == {**said, "files": []}
    assert not (own_folder / "mine.calibration.json").exists()


HEAD = "query_rows,attention_pairs,logit_rows,kv_read_rows,kv_written_rows,num_sequences,seconds"


def test_steps_are_no_more_than_a_fit_takes(own_folder):
    (own_folder / "m.csv").write_text(HEAD + "\n1,1,1,1,1,1,1" * 101)
    refused(repro(ASKED), "has 101 rows and 100 are the most")
    assert {path.name for path in own_folder.iterdir()} == {"mine.yaml", "m.csv"}


def test_rows_may_be_of_other_models(own_folder):
    card, _ = card_of(own_folder / "mine.yaml")
    steps = timed_steps(card)
    write_steps(own_folder / "m.csv", steps)
    lines = (own_folder / "m.csv").read_text().splitlines()
    named = [f"{lines[0]},model,name", *(f"{line},llada-8b,step {i}" for i, line in enumerate(lines[1:]))]
    (own_folder / "m.csv").write_text("\n".join(named))
    write_card(own_folder, CARD + "dllm: {model: dream-7b}\n")
    said = json.loads(repro(f"{ASKED} --json").out)
    assert said["calibration"]["matmul_efficiency"] == pytest.approx(PLANTED["matmul_efficiency"], rel=1e-6)
    assert said["rows"][0]["name"] == "step 0"
