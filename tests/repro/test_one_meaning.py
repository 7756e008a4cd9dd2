"""The same words mean the same work, wherever it is done; and tables say what work it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.command import repro

from repro.cli.run_table import lengths_line
from repro.families.http.requests import resolve, workload_of
from repro.families.platforms import PLATFORMS, DllmPart, platform
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep
from repro.runs.system import SYSTEMS
from repro.workloads.knobs import length_scale_for


def at_a_server(dataset: str, context: int | None, **knobs: Any) -> list[tuple[int, ...]]:
    cell = a_cell("openai-http", dataset=dataset, platform="endpoint", executor="http", seed=3)
    asked = resolve("openai-http", {"url": "http://127.0.0.1:1", "num_prompts": 12, **knobs})
    return [each.turns[0].new_ids for each in workload_of(cell, asked, "m", context).conversations]


def in_process(dataset: str, where: str, **knobs: Any) -> Any:
    cell = a_cell(dataset=dataset, platform=where, executor=platform(where).executor, seed=3, num_prompts=12, **knobs)
    return SYSTEMS.get("dllm-serve").prepare(cell)[1]


@pytest.mark.parametrize("dataset", ["livebench", "burst", "osc"])
def test_a_data_set_is_the_same_prompts_in_process_and_at_a_server(dataset):
    tiny = [request.prompt_ids for request in in_process(dataset, "cpu-tiny").requests]
    # ``repro serve`` says how many tokens it takes; other servers may say nothing.
    assert at_a_server(dataset, 768) == at_a_server(dataset, None) == tiny
    full = [request.prompt_len for request in in_process(dataset, "l40s").requests]
    assert [len(ids) for ids in at_a_server(dataset, 4096, gen_length=256)] == full
    assert sum(full) > 2 * sum(map(len, tiny))
    fixed = [request.prompt_len for request in in_process(dataset, "cpu-tiny", input_len=40, length_scale=1.0).requests]
    assert [len(ids) for ids in at_a_server(dataset, None, input_len=40)] == fixed == [40] * 12


def test_platforms_scale_by_the_same_rule():
    parts = [part for name in PLATFORMS for part in platform(name).parts if isinstance(part, DllmPart)]
    assert len(parts) > 3
    assert [part.length_scale for part in parts] == [length_scale_for(part.max_model_len) for part in parts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_tables_name_reading_and_lengths(runs, monkeypatch):
    """Simulated baselines as figures have them, published."""
    monkeypatch.setenv("COLUMNS", "300")
    asked = ("bench", "--platform", "rtx4090", "--system", "fast-dllm", "--num-prompts", 4, "--result-dir", runs)
    table = repro(*asked).out
    assert all(title in table for title in ("reading", "prompt tok", "output tok", "published"))
    assert "lengths" not in table
    scaled = repro(*asked, "--reading", "efficient", "--knob", "length_scale=0.5")
    assert "efficient" in scaled.out
    assert "x 0.5" in scaled.out
    (found,) = json.loads(repro(*asked, "--json").out)["runs"]
    own = {"reading": "published", "mean_output_tokens": 256.0, "length_scale": 1.0}
    assert own.items() <= found.items()
    assert 290 < found["mean_prompt_tokens"] < 380
    assert "reading" not in repro("bench", "--platform", "rtx4090", "--num-prompts", 4, "--result-dir", runs).out


def test_a_figure_and_an_ablation_name_them_too(runs):
    small = ("--request-rate", 0.5, "--num-prompts", 4, "--result-dir", runs)
    figure = ("reproduce", "fig4", "--platform", "rtx4090", *small, "--out-dir", runs / "figures")
    shown = repro(*figure).out
    assert "mean tokens of a prompt / of an answer: livebench " in shown
    (drawn,) = json.loads(repro(*figure, "--json").out)["figures"]
    assert drawn["reading"] == "published"
    assert {*drawn["lengths"]} == {"livebench", "burst", "osc"}
    assert drawn["lengths"]["osc"][0]["mean_output_tokens"] == 256
    # The run of the figure is that of the command.
    bench = ("bench", "--platform", "rtx4090", "--system", "fast-dllm", "--dry-run", "--json", *small)
    (would,) = json.loads(repro(*bench).out)["runs"]
    assert would["why"].startswith("done")


def test_runs_of_several_lengths_are_told_as_a_span(tmp_path):
    cells = [
        a_cell(
            platform="rtx4090",
            executor="roofline",
            seed=seed,
            num_prompts=2,
            gen_length=32,
            steps=32,
            input_len=length,
            length_scale=1.0,
        )
        for length in (20, 400, 100)
        for seed in (0, 1)
    ]
    sweep = Sweep([prepare(cell) for cell in cells], Store(tmp_path))
    sweep.run(jobs=1)
    assert lengths_line(sweep.runs) == "mean tokens of a prompt / of an answer: osc 20 to 400 / 32"
