"""The readings view: what is run, what is drawn, and what its table says."""

import pytest
from support.cells import CPU_TINY, L40S, RTX4090
from support.stored_runs import read_csv, runs_of

from paper_figures.dllm_serve import readings
from paper_figures.dllm_serve.readings import DATASETS, ENGINES, SETTINGS
from repro.families.dllm.settings import BATCH_RULES, DEFAULT_BATCH_RULE, READINGS
from repro.reports.figures import View, figure
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

pytestmark = pytest.mark.usefixtures("unsaved")

VIEWS = [View(platform=where, reading="published") for where in (RTX4090, L40S)]
SPEED = {"fast-dllm": 40.0, "dllm-cache": 16.0, "sparse-dllm": 20.0}


def speed(cell: Cell) -> float:
    """A baseline gains by its batch and more by packing; dLLM-Serve by a single refresh."""
    knobs = cell.knob_values
    if cell.system == "dllm-serve":
        return (100.0 if "refresh_delay" in knobs else 80.0) - (10.0 if "retention_ratio" in knobs else 0.0)
    reading = knobs.get("reading", "efficient")
    return SPEED[cell.system] * (2.2 if reading == "policy" else 0.5 if knobs.get("batch_rule") == "one" else 1)


def ids(view: View) -> str:
    return view.platform.name


@pytest.mark.parametrize("view", VIEWS, ids=ids)
def test_every_reading_and_every_rule_is_run(view):
    cells = readings.FIGURE.cells(view)
    asked = {
        (c.knob_values.get("reading", "efficient"), c.knob_values.get("batch_rule"))
        for c in cells
        if c.system == "fast-dllm"
    }
    assert {reading for reading, _ in asked} == set(READINGS)
    assert {rule or DEFAULT_BATCH_RULE for reading, rule in asked if reading == "published"} == set(BATCH_RULES)
    assert len(cells) == len(DATASETS) * (2 * len(ENGINES) + 2 * (len(SETTINGS) - 1) + len(SETTINGS) - 3)
    for cell in cells:
        prepare(cell)  # refuses what has no effect


def test_what_the_arrivals_hold_back_is_named(tmp_path):
    """0.5 req/s of 256 tokens are 128 tok/s; 1 req/s are more than any of these reach."""
    for view, expected in zip(VIEWS, (True, False), strict=True):
        runs = runs_of(readings.FIGURE.cells(view), lambda cell: 1.2 * speed(cell))
        notes = [note for note in readings.FIGURE.render(runs, view, tmp_path).notes if "not saturated" in note]
        assert bool(notes) == expected
        if expected:
            assert notes[0].startswith(
                "Within 10 % of the 128 tok/s that arrive, so not saturated: LiveBench dLLM-Serve, one"
            )
            assert "Sparse-dLLM" not in notes[0]


def test_what_was_not_run_is_named_and_left_out(tmp_path):
    view = VIEWS[0]
    cells = [cell for cell in readings.FIGURE.cells(view) if (cell.dataset, cell.system) != ("burst", "fast-dllm")]
    rendered = readings.FIGURE.render(runs_of(cells, speed), view, tmp_path)
    (note,) = (note for note in rendered.notes if "missing" in note)
    assert note.startswith("7 of 69 points are missing: fast-dllm burst at 0.5/s batch_rule=one reading=published")
    burst = [row for row in read_csv(rendered) if (row["dataset"], row["system"]) == ("burst", "fast-dllm")]
    assert {row["throughput_tok_s"] for row in burst} == {""}


def test_a_cpu_measures_all_but_dllm_caches_policy():
    view = View(platform=CPU_TINY, reading="efficient")
    policy = [cell.system for cell in readings.FIGURE.cells(view) if cell.knob_values.get("reading") == "policy"]
    assert set(policy) == {"fast-dllm", "sparse-dllm"}
    for cell in readings.FIGURE.cells(view):
        prepare(cell)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("where", [RTX4090, L40S], ids=lambda where: where.name)
def test_the_papers_comparisons_can_be_run_on_both_cards_in_every_reading(where, reading):
    view = View(platform=where, reading=reading)
    figures = [figure(name).load() for name in ("fig3", "fig4", "fig7", "fig8", "table4")]
    for cell in {cell.key: cell for drawing in figures for cell in drawing.cells(view)}.values():
        prepare(cell)
