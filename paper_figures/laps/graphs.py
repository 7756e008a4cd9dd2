"""Panels of LAPS with either way to choose a graph: a row a measure, a column a setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from paper_figures.laps.compare import Of, Pairs
from paper_figures.laps.contenders import CONTENDERS
from paper_figures.laps.layout import draw_line
from repro.runs.cell import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRAPHS = ("nearest", "cheapest")
"""As printed, and only where a graph is predicted to be faster."""
_COLORS = {"nearest": "#D55E00", "cheapest": "#0072B2"}
Column = TypeVar("Column")


def draw_choices(
    axes: Sequence[Axes],
    pairs: Pairs,
    measures: Sequence[tuple[str, Of]],
    columns: Sequence[Column],
    cells_of: Callable[[Column, str], Sequence[Cell]],
    ticks: Sequence[str],
    *,
    x_label: str = "",
) -> None:
    """``cells_of`` a column and a choice, one for every tick."""
    places = range(len(ticks))
    for row, (label, of) in enumerate(measures):
        for place, column in enumerate(columns):
            panel = axes[row * len(columns) + place]
            for graphs in GRAPHS:
                look = {"color": _COLORS[graphs], "label": f"graphs: {graphs}"}
                draw_line(panel, pairs, CONTENDERS["laps"], places, cells_of(column, graphs), of, **look)
            panel.set_xticks(places, list(ticks), fontsize=7)
            panel.set_ylim(bottom=0)
            panel.set_xlabel(x_label)
        axes[row * len(columns)].set_ylabel(label)
