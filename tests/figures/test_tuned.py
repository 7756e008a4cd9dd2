"""dLLM-Serve's comparison under equal tuning: what is run, and what the table says of it."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from support.cells import L40S, RTX4090
from support.figure_runs import figure_runs
from support.stored_runs import changed, read_csv, runs_of
from support.text_boxes import overprinted

from paper_figures.dllm_serve import tuned
from paper_figures.dllm_serve.comparison import CONTENDERS, DATASETS, contender_of
from repro.reports.figures import SINGLE_REFRESH, View, at_dense_accuracy
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.store import StoredRun
from repro.runs.tuning import Tuned

pytestmark = pytest.mark.usefixtures("unsaved")

VIEW = View(platform=L40S, reading="published")
SPEED = {"dllm-serve": 80.0, SINGLE_REFRESH: 88.0, "fast-dllm": 40.0, "dllm-cache": 16.0, "sparse-dllm": 20.0}
TUNING = {"dllm-serve": 1.1, SINGLE_REFRESH: 1.0, "fast-dllm": 2.0, "dllm-cache": 1.5, "sparse-dllm": 1.0}


def speed(cell: Cell) -> float:
    """Seeds lie far apart, and what they do to all alike."""
    name = contender_of(cell)
    return SPEED[name] * (TUNING[name] if "tune" in cell.knob_values else 1.0) * (1 + 0.2 * cell.seed)


def told(run: StoredRun) -> StoredRun:
    """What the search chose."""
    if "tune" not in run.cell.knob_values:
        return run
    chosen = {"batch_rule": "batch"} if run.cell.system == "fast-dllm" else {}
    trials = 0 if run.cell.system == "sparse-dllm" else 64
    facts = {**run.facts, "tuned": {"chosen": chosen, "candidates": 4, "trials": trials}}
    return changed(run, record=run.record.with_manifest(facts=facts))


def made(view: View) -> list[StoredRun]:
    return [told(run) for run in runs_of(tuned.FIGURE.cells(view), speed)]


def test_every_contender_is_run_in_both_forms_on_the_same_requests():
    view = replace(VIEW, num_runs=2)
    cells = [cell for cell in tuned.FIGURE.cells(view) if cell.dataset == "osc" and cell.seed == 0]
    for printed, searched in ([cell for cell in cells if contender_of(cell) == name] for name in CONTENDERS):
        assert searched.without("tune").key == printed.key
        assert "tune" not in printed.knob_values
        assert isinstance(prepare(searched).deployment, Tuned)
    few = replace(view, knobs=(("num_prompts", 3),))
    assert {few.applied(cell).knob_values["num_prompts"] for cell in tuned.FIGURE.cells(few)} == {3}


def test_at_dense_accuracy_all_keep_what_that_takes():
    for cell in tuned.FIGURE.cells(replace(VIEW, accuracy="dense")):
        assert dict(at_dense_accuracy(contender_of(cell)).knobs).items() <= cell.knob_values.items()


def test_what_was_not_run_is_named_and_has_chosen_nothing(tmp_path):
    runs = [run for run in made(VIEW) if run.cell.system != "fast-dllm"]
    rendered = tuned.FIGURE.render(runs, VIEW, tmp_path)
    chosen = [row["chosen"] for row in read_csv(rendered) if (row["system"], row["is_tuned"]) == ("fast-dllm", "true")]
    assert chosen == ["-"] * len(DATASETS)
    assert any("6 of 30 points are missing: fast-dllm livebench num_prompts=128" in note for note in rendered.notes)


def test_a_dense_picture_has_nothing_clipped_either(tmp_path, drawn: list[Figure]):
    view = View(platform=RTX4090, reading="efficient", accuracy="dense", num_runs=3)
    tuned.FIGURE.render(figure_runs(tuned.FIGURE, view), view, tmp_path)
    fast = [told(run) for run in runs_of(tuned.FIGURE.cells(VIEW), lambda cell: 10 * speed(cell))]
    tuned.FIGURE.render(fast, VIEW, tmp_path)
    for figure in drawn:
        assert overprinted(figure) == []
