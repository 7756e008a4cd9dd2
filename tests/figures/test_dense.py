"""Comparisons at the accuracy of no cache: dLLM-Serve with one refresh is one of those compared, everywhere."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from support.cells import L40S, RTX4090
from support.figure_runs import figure_runs
from support.text_boxes import overprinted

from paper_figures.dllm_serve import fig3, fig4, fig5, fig7, table4
from paper_figures.dllm_serve.comparison import contender_of
from repro.reports.figures import SINGLE_REFRESH, View, at_dense_accuracy, default_reading
from repro.runs.experiment import prepare

pytestmark = pytest.mark.usefixtures("unsaved")

COMPARED = {
    "fig3": (fig3.FIGURE, RTX4090),
    "fig4": (fig4.FIGURE, RTX4090),
    "fig5": (fig5.FIGURE, RTX4090),
    "fig7": (fig7.FIGURE, L40S),
    "table4": (table4.FIGURE, L40S),
}
TITLE = "dLLM-Serve with one refresh"


def dense(where, num_runs: int = 1) -> View:
    return View(platform=where, reading=default_reading(where), accuracy="dense", num_runs=num_runs)


@pytest.mark.parametrize("name", COMPARED)
def test_one_refresh_is_compared_at_equal_accuracy_and_nowhere_else(name):
    module, where = COMPARED[name]
    view = dense(where)
    cells = module.cells(view)
    single = [cell for cell in cells if contender_of(cell) == SINGLE_REFRESH]
    two = [cell for cell in cells if contender_of(cell) == "dllm-serve"]
    assert {(cell.dataset, cell.rate) for cell in single} == {(cell.dataset, cell.rate) for cell in two}
    assert len(single) == len(two) > 0
    kept = dict(at_dense_accuracy(SINGLE_REFRESH).knobs)
    assert all(kept.items() <= cell.knob_values.items() for cell in single)
    prepare(single[0])
    assert not any("refresh_delay" in cell.knob_values for cell in module.cells(replace(view, accuracy="usual")))


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig7"])
def test_nothing_is_clipped_or_overprinted(name, tmp_path, drawn: list[Figure]):
    module, card = COMPARED[name]
    view = dense(card, num_runs=3)
    module.render(figure_runs(module, view), view, tmp_path)
    assert overprinted(drawn[-1]) == []
    assert any(TITLE in text.get_text() for text in drawn[-1].legends[0].texts)
