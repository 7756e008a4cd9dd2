"""``repro sweep`` and ``repro export`` as somebody types them; and several values of options of ``repro bench``."""

import csv
import io
import json
import shlex
from pathlib import Path

import pandas as pd
import pytest
from support.command import refused, repro, table_of
from support.tables import data_beside

from repro.runs.statistics import mean_interval
from repro.workbench.grid import grid_of_file

CASES = data_beside(__file__, "cases")

GRID = """
system: dllm-serve
dataset: livebench
platform: l40s
rate: 1
knobs: {num_prompts: 4, max_num_seqs: [null, 2]}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grid")
    (root / "grid.yaml").write_text(GRID)
    done = repro("sweep", root / "grid.yaml", "--repeats", 3, "--result-dir", root / "runs", "--jobs", 1, "--json")
    assert (done.code, len(json.loads(done.out)["runs"])) == (0, 6)
    return root / "runs"


def test_the_table_has_a_row_a_setting_with_the_interval_of_its_repeats(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    asked = ("sweep", runs.parent / "grid.yaml", "--repeats", 3, "--result-dir", runs)
    done = repro(*asked, "--interleave")
    assert done.err.splitlines()[-1].startswith("0 runs done, 6 reused")
    table = table_of(done.out)
    assert [row["max_num_seqs"] for row in table] == ["default", "2"]
    assert {(row["runs"], row["verdict"], row["obtained"]) for row in table} == {("3", "VALID", "composed")}
    told = json.loads(repro(*asked, "--json").out)["runs"]
    for row, part in zip(table, (told[:3], told[3:]), strict=True):
        found = mean_interval([run["summary"]["throughput_tok_s"] for run in part])
        assert row["tok/s"] == f"{found.mean:.1f} ± {found.half_width:.1f}"
        assert {str(run["cell"]["knobs"].get("max_num_seqs", "default")) for run in part} == {row["max_num_seqs"]}


def test_the_runs_are_exported(runs, tmp_path):
    done = repro("export", runs)
    assert (done.code, done.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert len(rows) == 6
    assert sorted(row["max_num_seqs"] for row in rows) == ["", "", "", "2.0", "2.0", "2.0"]
    assert {row["valid"] for row in rows} == {"True"}
    written = repro("export", runs, "--format", "parquet", "--out", tmp_path / "x" / "runs.parquet")
    assert (written.code, written.out) == (0, "")
    assert pd.read_parquet(tmp_path / "x" / "runs.parquet")["run"].tolist() == [row["run"] for row in rows]


@pytest.mark.parametrize(("words", "says"), CASES["exports"])
def test_what_cannot_be_exported_is_refused(words, says, runs):
    refused(repro("export", *(word.replace("RUNS", str(runs)) for word in words)), says)


def test_a_plot_does_not_take_the_place_of_what_is_read(tmp_path):
    """Its CSV bears the name of the requests."""
    requests = tmp_path / "mine.csv"
    requests.write_text("prompt_tokens,output_tokens\n4,4\n")
    words = ("bench", "--platform", "l40s", "--knob", f"workload={requests}", "--plot", tmp_path / "mine.png")
    refused(repro(*words, "--result-dir", tmp_path / "runs"), "mine.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


GRID_OF_OPTIONS = """
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
    done = repro("bench", *arguments)
    assert done.code == 0, done.err
    return made


def test_options_that_are_repeated_are_the_grid_of_a_file(monkeypatch, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID_OF_OPTIONS)
    cells = grid_of_file(tmp_path / "grid.yaml").cells()
    made = asked_of(monkeypatch, *ASKED)
    assert len(made) == 128
    assert {cell.key for cell in made} == {cell.key for cell in cells}
    knob = asked_of(monkeypatch, "--system", "ampd", "--platform", "h20x32", "--knob", "w=2", "--knob", "w=3")
    assert [cell.knob_values for cell in knob] == [{"w": 2}, {"w": 3}]


def test_one_value_given_twice_is_one_and_a_knob_beside_its_option_refused(monkeypatch):
    twice = asked_of(monkeypatch, *["--num-prompts", "4", "--num-prompts", "4", "--seed", "1", "--seed", "1"])
    assert [(cell.seed, cell.knob_values) for cell in twice] == [(1, {"num_prompts": 4})]
    refused(repro("bench --num-prompts 4 --knob num_prompts=4"), "knob='num_prompts=4'")


def test_rows_say_what_they_differ_by_and_repeats_are_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    asked = (
        "bench --platform rtx4090 --dataset-name osc --num-prompts 4 --seed 0 --seed 1 --retention-ratio 0.5 --retention-ratio 0.7",
    )
    asked += ("--result-dir", tmp_path)
    ran = repro(*asked, "--plot", tmp_path / "both.png")
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("dLLM-Serve")]
    assert [row[1] for row in rows] == ["0.5", "0.7"]
    assert "retention_ratio" in ran.out
    assert len(json.loads(repro(*asked, "--json").out)["runs"]) == 4
    assert "retention_ratio=0.7" in (tmp_path / "both.csv").read_text()


def test_a_table_of_prefills_names_the_model_and_what_is_counted(tmp_path, monkeypatch):
    """No answers' tokens: a turn's first token is the one it has."""
    monkeypatch.setenv("COLUMNS", "400")
    asked = ("bench", "--system", "laps", "--platform", "h200", "--num-prompts", 60, "--result-dir", tmp_path)
    (row,) = table_of(repro(*asked, "--request-rate", 65).out)
    (told,) = json.loads(repro(*asked, "--request-rate", 65, "--json").out)["runs"]
    assert (row["model"], row["rate turns/s"]) == ("Qwen2.5-14B", "65")
    assert (
        row["what ran"]
        == told["ran"]
        == ("--model Qwen2.5-14B --knob chunk_tokens=2048 --knob num_instances=1 --knob precision=bf16")
    )
    (again,) = json.loads(repro(*asked, "--request-rate", 65, *told["ran"].split(), "--json").out)["runs"]
    assert (again["ran"], again["summary"]) == (told["ran"], told["summary"])
    assert not {"output tok", "tok/s", "mean s"} & row.keys()
    assert float(row["prefill tok/s"].replace(",", "")) == pytest.approx(told["summary"]["tokens_s"], abs=0.1)
    assert float(row["TTFT mean s"]) == pytest.approx(told["summary"]["ttft_s"]["mean"], abs=0.01)
