"""Our two switches of Algorithm 1, cell by cell: visiting prefill workers in order of load, and looking at the backlog.

As printed, Algorithm 1 takes the first worker in random order whose mean TTFT of the last 10 s has slack: random dispatch by
a signal that lags. Both switches are off by default.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paper_figures.ampd.attainment import Attainments, rates_of, tabulate
from paper_figures.ampd.contenders import CONTENDERS, SAME_BASELINES, TUNED_BASELINES, grid
from paper_figures.ampd.gains import standing
from paper_figures.ampd.layout import DEFAULT, WIDE, ampd_figure, ampd_page, over_rates, repeats_of
from paper_figures.ampd.panels import panels
from paper_figures.common.figure import Page, Table
from paper_figures.common.panel import Axis, Guide
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, is_below, said
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

SWITCHED = ("load", "backlog", "ours")
SHOWN = ("ampd", *SWITCHED, "ours-tuned", *SAME_BASELINES, *TUNED_BASELINES)
COMPARED = (
    ("ampd", SAME_BASELINES, "on AMPD's plan"),
    ("ours", SAME_BASELINES, "on AMPD's plan"),
    ("ours-tuned", TUNED_BASELINES, "all tuned"),
)


def cells(view: View) -> list[Cell]:
    return grid(view, SHOWN, panels(), rates_of(view))


def page(runs: Runs) -> Page:
    table = tabulate(runs, SHOWN, panels(), rates_of(runs.view))

    def added(name: str, row: int, column: int) -> Interval:
        return table.at(name, row, column, less="ampd")

    def line(name: str, row: int, column: int) -> tuple[object, ...]:
        at = added(name, row, column)
        where = table.panels[row].title, table.rates[column]
        return (*where, name, table.at(name, row, column).mean, at.mean, at.half_width, runs.view.obtained)

    found = conclusions(table)
    # One scale for all panels: a fortieth of a point is not to look like forty.
    ends = [sign * (at.half_width or 0.0) + (at.mean or 0.0) for at in _all(table, added) for sign in (-1, 1)]
    points = Axis(label="attainment added (points)", limits=(min(ends) - 2, max(ends) + 2))
    return ampd_page(
        runs,
        panels=over_rates(table, SWITCHED, added, points, more=[Guide(value=0, label="AMPD as printed")]),
        columns=WIDE,
        conclusions=found,
        about=[
            f"Attainment in {DEFAULT}, on Table 2's plan. load: prefill workers in order of their load; backlog: the router looks at what "
            "waits. Where AMPD attains all, nothing can be added."
        ],
        repeats=repeats_of(runs.view, "paired difference", is_share=False),
        table=Table(
            columns=(
                *("panel", "rate", "AMPD %", "load adds", "backlog adds", "both add", "both, tuned %"),
                *("best tuned baseline %", "ahead by"),
            ),
            rows=[shown(table, row, column) for row, column in table.cells],
        ),
        csv=Table(
            columns=(
                *("panel", "rate_sessions_s", "contender", "attainment_percent", "minus_ampd_points", "half_width"),
                "obtained",
            ),
            rows=[line(name, row, column) for row, column in table.cells for name in (*SWITCHED, "ours-tuned")],
        ),
        notes=found,
    )


def _all(table: Attainments, added: Callable[[str, int, int], Interval]) -> list[Interval]:
    return [added(name, row, column) for name in SWITCHED for row, column in table.cells]


def shown(table: Attainments, row: int, column: int) -> tuple[str, ...]:
    best = max(TUNED_BASELINES, key=lambda name: table.means[name][row, column])
    return (
        table.panels[row].title,
        f"{table.rates[column]:g}",
        said(table.at("ampd", row, column), digits=0),
        *(said(table.at(name, row, column, less="ampd"), digits=0) for name in SWITCHED),
        said(table.at("ours-tuned", row, column), digits=0),
        f"{CONTENDERS[best].title} {said(table.at(best, row, column), digits=0)}",
        said(table.at("ours-tuned", row, column, less=best), digits=0),
    )


def conclusions(table: Attainments) -> list[str]:
    found = [added_by(table, name) for name in SWITCHED]
    for ours, others, text in COMPARED:
        at = standing(table, ours, others)
        worse = f"; behind: {'; '.join(at.texts)}" if at.texts else ""
        found.append(f"{CONTENDERS[ours].title} beside the baselines, {text}: {at}{worse}.")
    return found


def added_by(table: Attainments, name: str) -> str:
    whole = table.interval(lambda means: 100 * float(np.nanmean(means[name] - means["ampd"])))
    each = [table.at(name, row, column, less="ampd") for row, column in table.cells]
    up, down = sum(is_above(at, 1e-7) for at in each), sum(is_below(at, -1e-7) for at in each)
    return (
        f"{CONTENDERS[name].title} adds {said(whole, 'points')} on average; outside noise it gains in {up} and loses in {down} of "
        f"{table.num_cells} cells."
    )


FIGURE = ampd_figure("switches", "AMPD, Algorithm 1, §4.1", page=page, cells=cells)
