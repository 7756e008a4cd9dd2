"""``repro sweep`` and ``repro export`` as somebody types them."""

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from support.command import refused, repro, table_of

from repro.runs.statistics import mean_interval

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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("RUNS", "--format", "parquet"), "format='parquet'"),
        (("RUNS", "--format", "json"), "'json' is not one of 'csv', 'parquet'"),
        (("RUNS", "--out", "RUNS"), "is a folder: give a file in it"),
        (("RUNS", "--out", "/dev/null"), "out='/dev/null'"),
        (("RUNS", "--out", "/dev/stdout"), "out='/dev/stdout'"),
        (("RUNS", "--out", "RUNS/../grid.yaml/x.csv"), "cannot be written"),
        (("RUNS", "--format", "parquet", "--out", "x.csv"), "out='x.csv'"),
        (("RUNS", "--out", "x.parquet"), "out='x.parquet'"),
        (("nowhere",), "folder='nowhere'"),
        (("RUNS/../grid.yaml",), "is not a directory: give a folder that can be read"),
    ],
)
def test_what_cannot_be_exported_is_refused(words, says, runs):
    refused(repro("export", *(word.replace("RUNS", str(runs)) for word in words)), says)


def test_a_plot_does_not_take_the_place_of_what_is_read(tmp_path):
    """Its CSV bears the name of the requests."""
    requests = tmp_path / "mine.csv"
    requests.write_text("prompt_tokens,output_tokens\n4,4\n")
    words = ("bench", "--platform", "l40s", "--knob", f"workload={requests}", "--plot", tmp_path / "mine.png")
    refused(repro(*words, "--result-dir", tmp_path / "runs"), "mine.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
