from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.cells import CPU_TINY, RTX4090
from support.figure_runs import by_claim
from support.perturbed_runs import unmoved
from support.refusals import refuses
from support.stored_runs import FAILED, changed, read_csv, stored

from engines.errors import UserError
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve import fig6
from paper_figures.dllm_serve.fig6 import compare, own_runs
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import wilson_interval
from repro.runs.store import StoredRun

pytestmark = pytest.mark.usefixtures("unsaved")

VIEW = View(platform=CPU_TINY, reading="efficient")
TWICE = replace(VIEW, num_runs=2)
N = 20


def solved(cell: Cell) -> int:
    """Right answers of 20: head-level 8, 10, 11, 12, 13; uniform 2, 10, 12, 14, 16; dense 19."""
    knobs = cell.knob_values
    if knobs["selection"] == "dense":
        return 19
    place = fig6.RATIOS.index(knobs["retention_ratio"])
    return ((8, 10, 11, 12, 13) if knobs["selection"] == "head" else (2, 10, 12, 14, 16))[place]


def graded(cell: Cell) -> StoredRun:
    """Head-level solves the first problems, uniform the last ones."""
    run, k = stored(cell, tok_s=100.0, n=N), solved(cell)
    verdicts = [True] * k + [False] * (N - k)
    if cell.knob_values["selection"] == "uniform":
        verdicts.reverse()
    dataset = {**run.record.manifest["dataset"], "checksum": f"{cell.dataset}-{cell.seed}"}
    record = run.record.with_columns("requests", correct=verdicts, correct_strict=[False] * N)
    return changed(run, record=record.with_manifest(dataset=dataset))


def made(view: View) -> list[StoredRun]:
    return [graded(cell) for cell in fig6.FIGURE.cells(view)]


def test_a_ratio_to_none_solved_is_to_the_most_that_the_interval_leaves():
    def none_solved(run: StoredRun) -> StoredRun:
        knobs = run.cell.knob_values
        if (run.cell.dataset, knobs["selection"], knobs.get("retention_ratio")) != ("mini-code", "uniform", 0.1):
            return run
        return changed(run, record=run.record.with_columns("requests", correct=[False] * N))

    usual, none = (by_claim(fig6.FIGURE.findings(runs, VIEW)) for runs in (made(VIEW), [*map(none_solved, made(VIEW))]))
    assert usual["dllm-he-ratio"].value == pytest.approx(4.0)
    assert usual["dllm-gsm-gain"].value == pytest.approx(300.0)
    assert usual["dllm-gsm-match"].value == pytest.approx(-10.0)
    high = wilson_interval(0, N)[1]
    assert none["dllm-he-ratio"].value == pytest.approx(0.4 / high)
    assert f"interval ({100 * high:.2g} %; it solves none) at 10 %" in none["dllm-he-ratio"].how
    assert none["dllm-he-uniform"].value == 0
    assert not none["dllm-he-ratio"].comparable


def broken(runs: Sequence[StoredRun], selection: str, ratio: float) -> list[StoredRun]:
    def is_it(run: StoredRun) -> bool:
        knobs = run.cell.knob_values
        return (run.cell.dataset, knobs["selection"], knobs.get("retention_ratio")) == ("mini-gsm", selection, ratio)

    return [changed(run, validity=FAILED) if is_it(run) else run for run in runs]


def test_grid_differs_in_the_selection_alone():
    cells = fig6.FIGURE.cells(VIEW)
    varied = {"selection", "retention_ratio"}
    assert len({tuple(pair for pair in cell.knobs if pair[0] not in varied) for cell in cells}) == 1
    with refuses("platform='rtx4090'"):
        fig6.FIGURE.cells(View(platform=RTX4090, reading="published"))


def test_repeats_are_pooled(tmp_path):
    runs = Runs(made(TWICE), TWICE)
    pair = compare(*(own_runs(runs, "mini-gsm", selection, 0.1) for selection in fig6.SELECTIONS))
    assert pair is not None
    assert (pair.n, pair.only_first, pair.only_second) == (2 * N, 16, 4)
    rendered = fig6.FIGURE.render(made(TWICE), TWICE, tmp_path)
    row = next(row for row in read_csv(rendered) if row["task"] == "mini-gsm")
    assert (row["n"], len(row["run_folder"].split())) == ("40", 2)


def test_an_invalid_run_is_left_out(tmp_path):
    rendered = fig6.FIGURE.render(broken(made(VIEW), "uniform", 0.1), VIEW, tmp_path)
    assert rendered.rows[5][1:4] == ("10", "40.0", "-")
    assert any(note.startswith("INVALID: dllm-serve_mini-gsm_cpu-tiny") for note in rendered.notes)
    assert "dllm-gsm-gain" not in {f.claim for f in fig6.FIGURE.findings(broken(made(VIEW), "uniform", 0.1), VIEW)}
    # One repeat of one series only: its other repeat has no partner.
    half = [
        changed(run, validity=FAILED) if run.cell.seed == 1 and run.cell.knob_values["selection"] == "head" else run
        for run in made(TWICE)
    ]
    runs = Runs(half, TWICE)
    assert compare(*(own_runs(runs, "mini-gsm", selection, 0.1) for selection in fig6.SELECTIONS)) is None


def test_missing_runs_are_said(tmp_path):
    some = [run for run in made(VIEW) if run.cell.knob_values.get("retention_ratio") != 0.3]
    rendered = fig6.FIGURE.render(some, VIEW, tmp_path)
    (note,) = (note for note in rendered.notes if "missing" in note)
    assert note.startswith("4 of 22 points are missing: dllm-serve mini-code retention_ratio=0.3 selection=head")
    with pytest.raises(UserError, match="has no runs: run this first: repro reproduce fig6 --platform"):
        fig6.FIGURE.render([], VIEW, tmp_path)


def test_answers_decide_accuracies_and_settings_do_not():
    """Grades are of records, not of summaries: they are perturbed too."""
    assert len(fig6.FIGURE.findings(made(VIEW), VIEW)) > 1
    assert unmoved(lambda runs: fig6.FIGURE.findings(runs, VIEW), made(VIEW)) == {"dllm-retention-sweep"}
