"""What is compared is alike, and what was changed of the data is said."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import a_cell
from support.command import repro
from support.fake_system import fake_cell
from support.stored_runs import parts

from engines.errors import UserError
from repro.cli.run_table import print_runs
from repro.cli.sweep import require_alike
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoredRun, _difference
from repro.runs.sweep import Sweep


def measured(store: Store, seed: int = 0) -> tuple[Experiment, StoredRun]:
    experiment = prepare(fake_cell(num_prompts=2, executor="real", seed=seed))
    (outcome,) = Sweep([experiment], store).run(jobs=1)
    assert outcome.run is not None
    return experiment, outcome.run


def test_runs_of_unlike_machines_are_not_compared(tmp_path, monkeypatch):
    (_, here), (_, other) = measured(Store(tmp_path)), measured(Store(tmp_path), seed=1)
    require_alike([here, other], "fig")
    assert here.machine is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    _, there = measured(Store(tmp_path / "there"), seed=1)
    with pytest.raises(UserError, match=r"runs behind fig were measured on unlike machines \(threads: .*77.*--force"):
        require_alike([here, there], "fig")
    simulated = prepare(fake_cell(num_prompts=2))
    (outcome,) = Sweep([simulated], Store(tmp_path)).run(jobs=1)
    assert outcome.run is not None
    require_alike([here, outcome.run], "fig")


def test_a_run_of_another_machine_is_drawn_and_marked_and_never_added_to(tmp_path, monkeypatch):
    experiment, run = measured(Store(tmp_path))
    assert "other machine" not in run.obtained
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    state = Store(tmp_path).find(experiment)
    assert (state.run, state.reason.partition(":")[0]) == (None, "another machine")
    accepted = Store(tmp_path, accept_other_machine=True).find(experiment).run
    assert accepted is not None
    assert accepted.obtained.split(", ")[-1] == "other machine"
    # Of a run that does not say what it was measured on, nothing is known to be alike.
    assert _difference(None, experiment.machine) == "it does not say which"
    require_alike([replace(run, manifest={**run.manifest, "machine": None})], "fig")


def test_a_plot_and_the_numbers_behind_it(tmp_path):
    asked = ("bench --platform rtx4090 --num-prompts 100 --max-num-seqs 8", "--result-dir", tmp_path / "r")
    result = repro(*asked, "--plot", tmp_path / "p.png")
    assert result.code == 0, result
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (row,) = csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    assert row["label"] == "dLLM-Serve, osc, rtx4090, all at once"
    assert (row["obtained"], row["valid"]) == ("composed", "True")
    assert float(row["throughput_tok_s"]) > 0
    assert 0 < float(row["p50_latency_s"]) < float(row["p99_latency_s"]) <= float(row["longest_latency_s"])


def test_a_row_counts_the_invalid_ones_of_its_repeats(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runs = [measured(Store(tmp_path), seed)[1] for seed in (0, 1)]
    told = {**runs[1].manifest["validity"], "valid": False, "reasons": ["late"]}
    invalid = replace(runs[1], manifest={**runs[1].manifest, "validity": told})
    for row, verdict in ((runs, "VALID"), ([runs[0], invalid], "1 INVALID"), ([invalid], "INVALID")):
        print_runs([row])
        assert capsys.readouterr().out.rstrip().endswith(f"  {verdict}")


def test_prompts_that_are_cut_are_said_to_be(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "one two three four five six seven eight " * 6}) + "\n")
    short = ("--num-prompts", 1, "--gen-length", 4, "--block-length", 4, "--result-dir", tmp_path / "r")
    result = repro("bench", "--dataset-path", path, *short, "--json")
    assert result.code == 0, result
    assert "lengths x 0.25; 1 of 1 prompts cut to these lengths" in " ".join(result.err.split())
    (run,) = json.loads(result.out)["runs"]
    manifest = parts(Path(run["file"]))["manifest"]
    assert "1 of 1 prompts cut" in manifest["facts"]["dataset"]["description"]

    from paper_figures.common.caption import prompt_sources

    stored = [
        StoredRun(cell=each.cell, file=Path(run["file"]), manifest=manifest, provenance={}) for each in cells(path)
    ]
    assert "prompts cut to lengths x 0.25" in prompt_sources(stored)


def cells(path: Path) -> list[Experiment]:
    short = {"num_prompts": 1, "gen_length": 4, "block_length": 4, "steps": 4}
    cell = a_cell(**short, dataset_path=str(path), dataset_source="local")
    return [prepare(cell)]
