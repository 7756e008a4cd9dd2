"""How often a figure is repeated where nothing is asked: measured times vary, simulated ones, memory and accuracy do not."""

from __future__ import annotations

import pytest

from repro.cli.figure import FigureOptions
from repro.reports.figures import FIGURES, MEASURED_RUNS, figure


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("fig2", {"cpu-tiny": 1, "rtx4090": 1, "l40s": 1}),
        ("fig3", {"cpu-tiny": MEASURED_RUNS, "rtx4090": 1}),
        ("fig6", {"cpu-tiny": 1}),
        ("fig7", {"cpu-tiny": MEASURED_RUNS, "l40s": 1}),
        ("fig8", {"cpu-tiny": MEASURED_RUNS, "rtx4090": 1}),
        ("baselines", {"cpu-tiny": MEASURED_RUNS}),
    ],
)
def test_measured_times_are_repeated(name: str, repeats: dict[str, int]) -> None:
    assert {view.platform.name: view.num_runs for view in FigureOptions().views(name)} == repeats
    assert {view.num_runs for view in FigureOptions(num_runs=5).views(name)} == {5}


@pytest.mark.parametrize("name", FIGURES)
def test_the_rates_that_are_asked_for_are_run(name: str) -> None:
    for view in FigureOptions(request_rate=["0.3", "0.7"]).views(name):
        assert {cell.rate for cell in figure(name).load().cells(view)} <= {0.3, 0.7, None}


def test_a_card_that_is_measured_is_repeated_too() -> None:
    (view,) = FigureOptions(platform=["rtx4090"], executor="torch").views("fig3")
    assert view.num_runs == MEASURED_RUNS
    assert {cell.comparison for cell in figure("fig3").load().cells(view)} == {"rates"}
