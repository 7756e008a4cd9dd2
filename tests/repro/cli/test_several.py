"""Several values of options of ``repro bench``: a grid, the same cells as ``repro sweep`` has of a file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.command import repro, table_of
from support.refusals import refuses
from typer.testing import CliRunner

from repro.cli.main import app
from repro.workbench.grid import grid_of_file

GRID = """
system: [dllm-serve, sparse-dllm]
dataset: osc
platform: [rtx4090, l40s]
rate: [1, inf]
seed: [0, 3]
knobs: {num_prompts: 4, retention_ratio: [0.5, 0.7], memory_limit: [23GB, 24GB], selection: [head, uniform]}
"""
ASKED = shlex.split(
    "--system dllm-serve --system sparse-dllm --dataset-name osc --platform rtx4090 --platform l40s --request-rate 1 --request-rate inf --seed 0 "
    "--seed 3 --num-prompts 4 --retention-ratio 0.5 --retention-ratio 0.7 --memory-limit 23GB --memory-limit 24GB --selection head --selection uniform"
)


def asked_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list:
    """The cells that the command would make."""
    made: list = []
    monkeypatch.setattr("repro.cli.bench.make_and_show", lambda cells, *_: made.extend(cells))
    CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    return made


def test_options_that_are_repeated_are_the_grid_of_a_file(monkeypatch, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    cells = grid_of_file(tmp_path / "grid.yaml").cells()
    made = asked_of(monkeypatch, *ASKED)
    assert len(made) == 128
    assert {cell.key for cell in made} == {cell.key for cell in cells}
    knob = asked_of(monkeypatch, "--system", "ampd", "--platform", "h20x32", "--knob", "w=2", "--knob", "w=3")
    assert [cell.knob_values for cell in knob] == [{"w": 2}, {"w": 3}]


def test_one_value_given_twice_is_one_and_a_knob_beside_its_option_refused(monkeypatch):
    twice = asked_of(monkeypatch, *["--num-prompts", "4", "--num-prompts", "4", "--seed", "1", "--seed", "1"])
    assert [(cell.seed, cell.knob_values) for cell in twice] == [(1, {"num_prompts": 4})]
    with refuses("knob='num_prompts=4'"):
        asked_of(monkeypatch, *["--num-prompts", "4", "--knob", "num_prompts=4"])


def test_rows_say_what_they_differ_by_and_repeats_are_a_row(tmp_path: Path):
    asked = [
        "bench",
        *["--platform", "rtx4090", "--dataset-name", "osc", "--num-prompts", "4", "--seed", "0", "--seed", "1"],
    ]
    asked += [*["--retention-ratio", "0.5", "--retention-ratio", "0.7", "--result-dir"], str(tmp_path)]
    ran = CliRunner().invoke(
        app, [*asked, "--plot", str(tmp_path / "both.png")], catch_exceptions=False, env={"COLUMNS": "300"}
    )
    rows = [line.split() for line in ran.stdout.splitlines() if line.startswith("dLLM-Serve")]
    assert [row[1] for row in rows] == ["0.5", "0.7"]
    assert "retention_ratio" in ran.stdout
    assert len(json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["runs"]) == 4
    assert "retention_ratio=0.7" in (tmp_path / "both.csv").read_text()


def test_a_table_of_prefills_names_the_model_and_what_is_counted(tmp_path, monkeypatch):
    """No answers' tokens: a turn's first token is the one it has."""
    monkeypatch.setenv("COLUMNS", "400")
    asked = ("bench", "--system", "laps", "--platform", "h200", "--num-prompts", 60, "--result-dir", tmp_path)
    (row,) = table_of(repro(*asked, "--request-rate", 65).out)
    (told,) = json.loads(repro(*asked, "--request-rate", 65, "--json").out)["runs"]
    assert (row["model"], row["rate turns/s"]) == ("Qwen2.5-14B", "65")
    assert not {"output tok", "tok/s", "mean s"} & row.keys()
    assert float(row["prefill tok/s"].replace(",", "")) == pytest.approx(told["summary"]["tokens_s"], abs=0.1)
    assert float(row["TTFT mean s"]) == pytest.approx(told["summary"]["ttft_s"]["mean"], abs=0.01)
