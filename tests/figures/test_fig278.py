"""Figures 2, 7 and 8: memory split, lengths, ablation."""

from dataclasses import replace

import pytest
from support.cells import CPU_TINY, L40S, RTX4090
from support.stored_runs import FAILED, changed, runs_of

from paper_figures.dllm_serve import fig3, fig7, fig8
from repro.reports.ablation import COMPONENTS, LADDER, rungs, system_of
from repro.reports.figures import View
from repro.runs.cell import Cell

pytestmark = pytest.mark.usefixtures("unsaved")

CPU_VIEW = View(platform=CPU_TINY, reading="efficient")
CARD_VIEW = View(platform=RTX4090, reading="published")
L40S_VIEW = View(platform=L40S, reading="published")


def by_length(cell: Cell) -> float:
    knobs = cell.knob_values
    gain = 4 - knobs["input_len"] / 400 - knobs["gen_length"] / 512
    return 10.0 * (gain if cell.system == "dllm-serve" else 1.0)


def test_lengths_grid_shares_its_common_point():
    cells = fig7.FIGURE.cells(L40S_VIEW)
    assert len({cell.key for cell in cells}) == len(cells) == 2 * (6 + 4 - 1)
    assert all(cell.rate is None and cell.knob_values["gen_length"] == cell.knob_values["steps"] for cell in cells)
    tiny = fig7.FIGURE.cells(CPU_VIEW)
    assert {cell.knob_values["input_len"] for cell in tiny} == {25, 50, 75, 100, 125, 150}
    assert {cell.knob_values["gen_length"] for cell in tiny} == {32, 64, 96, 128}


def test_an_invalid_length_is_left_out(tmp_path):
    runs = runs_of(fig7.FIGURE.cells(L40S_VIEW), by_length)
    broken = [changed(r, validity=FAILED) if r.cell.knob_values["input_len"] == 100 else r for r in runs]
    rendered = fig7.FIGURE.render(broken, L40S_VIEW, tmp_path)
    assert ("100", "-") in {row[1:3] for row in rendered.rows}
    assert sum(note.startswith("INVALID") for note in rendered.notes) == 2
    assert fig7.FIGURE.findings(broken, L40S_VIEW) == []


def climb(cell: Cell) -> float:
    """Rungs are worth 10, 12, 15, 16, 18, 20 and 17 tok/s."""
    if cell.system != "dllm-serve":
        return 12.0 if cell.knob_values.get("reading") == "efficient" else 10.0
    knobs = cell.knob_values
    if knobs.get("refresh_delay") == 0:
        return 17.0 if knobs.get("scheduler") == "lookahead" else 20.0
    if knobs.get("logit_rows") == "monolithic":
        return 15.0 if knobs.get("scheduler") == "request" else 16.0
    return 18.0


def test_a_simulated_ladder_shares_its_ends_with_figure_3():
    for view in (CPU_VIEW, CARD_VIEW):
        cells = fig8.FIGURE.cells(view)
        assert len({cell.key for cell in cells}) == len(cells) == 3 * len(rungs(view))
        top = {cell.key for cell in fig3.FIGURE.cells(view) if cell.rate == max(view.dllm.rates)}
        # Measured rungs are compared with each other alone, and made together.
        assert sum(cell.key in top for cell in cells) == (2 * 3 if view is CARD_VIEW else 0)
    assert {cell.comparison for cell in fig8.FIGURE.cells(CPU_VIEW)} == {"fig8"}


def test_ladder_with_a_missing_rung(tmp_path):
    cells = [cell for cell in fig8.FIGURE.cells(CARD_VIEW) if cell.knob_values.get("logit_rows") != "monolithic"]
    runs = runs_of(cells, climb)
    rendered = fig8.FIGURE.render(runs, CARD_VIEW, tmp_path)
    assert any(note.startswith("6 of 21 points are missing: dllm-serve livebench at 0.5/s") for note in rendered.notes)
    assert fig8.FIGURE.findings(runs, CARD_VIEW) == []


def test_ladder_measured_on_a_card_finds_its_runs(tmp_path):
    view = View(
        platform=replace(RTX4090, executor="torch"),
        reading="efficient",
        knobs=(("weights", "random"), ("num_prompts", 3)),
    )
    runs = runs_of([view.applied(cell) for cell in fig8.FIGURE.cells(view)], climb)
    assert {run.cell.knob_values["num_prompts"] for run in runs} == {3}
    rendered = fig8.FIGURE.render(runs, view, tmp_path)
    assert len(rendered.rows) == 3 * (len(LADDER) - 1)  # its first rung has batches already
    assert {path.stem for path in rendered.files} == {"fig8-rtx4090-measured"}
    assert fig8.FIGURE.findings(runs, view) == []


def test_components_start_with_themselves_switched_off():
    assert {name: variants[0].label for name, variants in COMPONENTS["dllm-serve"].items()} == {
        "engine": "Sparse-dLLM",
        "scheduler": "request",
        "budgeting": "monolithic",
        "sparsity": "dense",
        "refresh": "two (delay 1)",
    }
    for variants in COMPONENTS["dllm-serve"].values():
        keys = {variant.cell(CPU_VIEW, "burst", 1.0, 0).key for variant in variants}
        assert len(keys) == len(variants) > 1
    with pytest.raises(Exception, match="component='nosuch' is unknown"):
        system_of("nosuch")
