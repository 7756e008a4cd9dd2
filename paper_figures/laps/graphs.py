"""Panels of LAPS with either way to choose a graph: a row a measure, a column a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.laps.layout import line
from repro.runs.cell import Cell

GRAPHS: Mapping[str, str] = {"nearest": "#D55E00", "cheapest": "#0072B2"}
"""As printed, and only where a graph is predicted to be faster; with their colours."""
Column = TypeVar("Column")


def choices(
    runs: Runs,
    measures: Sequence[Measure],
    columns: Mapping[Column, str],
    cells: Callable[[Column, str], Sequence[Cell]],
    ticks: Sequence[str],
    *,
    x_label: str = "",
) -> list[Panel]:
    """``cells`` of a column and a choice are one for every tick; ``columns`` have their titles."""
    places = range(len(ticks))
    return [
        Panel(
            title=title,
            layers=[
                line(runs, "laps", places, cells(column, graphs), of, f"graphs: {graphs}", color=color)
                for graphs, color in GRAPHS.items()
            ],
            x=Axis(label=x_label, ticks=places, names=ticks, size=7),
            y=Axis(label=of.label if place == 0 else None, limits=(0, None)),
        )
        for of in measures
        for place, (column, title) in enumerate(columns.items())
    ]
