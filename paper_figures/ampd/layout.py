"""What AMPD's figures have in common: how they are asked for and look, and what their captions say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paper_figures.ampd.attainment import Attainments
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS
from paper_figures.common.caption import basis_of, invalid_notes
from paper_figures.common.figure import Page, Picture, Table, figure, no_cells, no_findings
from paper_figures.common.panel import Axis, Layer, Line, Panel
from paper_figures.common.runs import Runs
from repro.reports.claims import Finding
from repro.reports.figures import Figure, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

DEFAULT = "reading round/every/p95, 99 sessions a run"
WIDE = 4
"""Panels beside each other: a row a model."""


def ampd_figure(
    name: str,
    source: str,
    *,
    page: Callable[[Runs], Page],
    cells: Callable[[View], list[Cell]] = no_cells,
    findings: Callable[[Runs], list[Finding]] = no_findings,
    num_runs: int = PAIRED_SEEDS,
    under_title: Callable[[Runs], str] = basis_of,
) -> Figure:
    """``cells`` are of all seeds, those of one before the next."""
    return figure(
        name=f"ampd/{name}",
        source=source,
        platforms=("h20x32",),
        page=page,
        cells=cells,
        findings=findings,
        num_runs=1 if cells is no_cells else num_runs,
        under_title=under_title,
    )


def ampd_page(
    runs: Runs,
    *,
    panels: Sequence[Panel],
    conclusions: Sequence[str],
    about: Sequence[str],
    table: Table,
    csv: Table,
    columns: int | None = None,
    after_title: str = "",
    notes: Sequence[str] = (),
    missing: Sequence[str] = (),
    is_transient: bool = True,
) -> Page:
    """A caption: what is concluded, how the runs were obtained, what they are (``about``), and how many are overloaded."""
    transient = [transient_sentence(runs)] if is_transient else []
    return Page(
        table=table,
        csv=csv,
        picture=Picture(
            panels=panels,
            caption=[*conclusions, obtained_sentence(runs), *about, *transient],
            columns=columns,
            after_title=after_title,
        ),
        notes=[*notes, *invalid_notes(runs.all), *missing],
    )


def over_rates(
    table: Attainments,
    names: Sequence[str],
    at: Callable[[str, int, int], Interval],
    y: Axis,
    *,
    more: Sequence[Layer] = (),
) -> list[Panel]:
    """A panel each of the table's: lines of contenders over the rates, ``at`` name, row and column."""
    return [
        Panel(
            title=panel.title,
            layers=[
                *(
                    Line(
                        label=CONTENDERS[name].title,
                        places=table.rates,
                        at=[at(name, row, column) for column in range(len(table.rates))],
                        look=CONTENDERS[name].look,
                    )
                    for name in names
                ),
                *more,
            ],
            x=Axis(ticks=table.rates),
            y=y if row % WIDE == 0 else replace(y, label=None),
        )
        for row, panel in enumerate(table.panels)
    ]


def seeds_text(view: View) -> str:
    return f"{len(view.seeds)} paired seeds"


def obtained_sentence(runs: Runs) -> str:
    """How the numbers came about."""
    found = sorted({str(run.record.manifest["calibration"]) for run in runs.all[:1]})
    return f"All runs simulated on a discrete-event cluster; {' and '.join(found)}".rstrip(".") + "."


def transient_sentence(runs: Runs) -> str:
    over = sum(run.facts["overload_reason"] is not None for run in runs.all)
    return (
        f"In {over} of {len(runs.all)} runs prefills ask for more than the workers have time for while sessions arrive: their "
        "attainment is of this number of sessions and falls with more."
    )
