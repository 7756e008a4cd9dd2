"""Our two switches of Algorithm 1, cell by cell: visiting prefill workers in order of load, and looking at the backlog.

As printed, Algorithm 1 takes the first worker in random order whose mean TTFT of the last 10 s has slack: random dispatch by
a signal that lags. Both switches are off by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paper_figures.ampd.compare import Table, said, tabulate
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS, grid
from paper_figures.ampd.gains import SAME_BASELINES, TUNED_BASELINES, behind
from paper_figures.ampd.layout import LINES, obtained_sentence, rates_of, seeds_text, transient_sentence
from paper_figures.ampd.panels import panels
from paper_figures.ampd.said import DEFAULT
from paper_figures.common import style
from paper_figures.common.caption import figure_title, invalid_notes
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

NAME = "switches"
TITLE = "AMPD switches: what ordering by load and looking at the backlog add, cell by cell"
SOURCE = "AMPD, Algorithm 1, §4.1"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
SWITCHED = ("load", "backlog", "ours")
SHOWN = ("ampd", *SWITCHED, "ours-tuned", *SAME_BASELINES, *TUNED_BASELINES)
CSV_COLUMNS = (
    "panel",
    "rate_sessions_s",
    "contender",
    "attainment_percent",
    "minus_ampd_points",
    "half_width",
    "obtained",
)


def cells(view: View) -> list[Cell]:
    return grid(NAME, view, SHOWN, panels(), rates_of(view))


def table_of(runs: Sequence[StoredRun], view: View) -> Table:
    return tabulate(runs, view, SHOWN, panels(), rates_of(view), view.seeds)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    table = table_of(runs, view)
    stem = f"{NAME}-{view.stem}"
    rows: list[tuple[object, ...]] = []
    shown = []
    for row, panel in enumerate(table.panels):
        for column, rate in enumerate(table.rates):
            added = {name: table.at(name, row, column, less="ampd") for name in (*SWITCHED, "ours-tuned")}
            rows += [
                (panel.title, rate, name, table.at(name, row, column).mean, at.mean, at.half_width, "simulated")
                for name, at in added.items()
            ]
            best = max(TUNED_BASELINES, key=lambda name, r=row, c=column: table.means[name][r, c])  # type: ignore[misc]
            shown.append(
                (
                    panel.title,
                    f"{rate:g}",
                    said(table.at("ampd", row, column), digits=0),
                    *(said(added[name], digits=0) for name in SWITCHED),
                    said(table.at("ours-tuned", row, column), digits=0),
                    f"{CONTENDERS[best].title} {said(table.at(best, row, column), digits=0)}",
                    said(table.at("ours-tuned", row, column, less=best), digits=0),
                )
            )
    files = _draw(table, runs, view, out, stem)
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=(
            "panel",
            "rate",
            "AMPD %",
            "load adds",
            "backlog adds",
            "both add",
            "both, tuned %",
            "best tuned baseline %",
            "ahead by",
        ),
        rows=tuple(shown),
        notes=(*conclusions(table), *invalid_notes(runs)),
    )


def conclusions(table: Table) -> list[str]:
    num = len(table.panels) * len(table.rates)
    found = []
    for name in SWITCHED:
        whole = table.interval(lambda means, n=name: 100 * float(np.nanmean(means[n] - means["ampd"])))  # type: ignore[misc]
        up = down = 0
        for row in range(len(table.panels)):
            for column in range(len(table.rates)):
                at = table.at(name, row, column, less="ampd")
                half = (at.half_width or 0.0) + 1e-7
                up += at.mean is not None and at.mean > half
                down += at.mean is not None and at.mean < -half
        found.append(
            f"{CONTENDERS[name].title} adds {said(whole, 'points')} on average; outside noise it gains in {up} and loses in {down} of "
            f"{num} cells."
        )
    for ours, others, text in (
        ("ampd", SAME_BASELINES, "on AMPD's plan"),
        ("ours", SAME_BASELINES, "on AMPD's plan"),
        ("ours-tuned", TUNED_BASELINES, "all tuned"),
    ):
        worse = behind(table, ours, others)
        cut = len({each.partition(":")[0] for each in worse})
        found.append(
            f"{CONTENDERS[ours].title}, {text}: not behind any baseline outside noise in {num - cut} of {num} cells"
            + (f"; behind: {'; '.join(worse)}." if worse else ".")
        )
    return found


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """The switches are ours: the paper claims nothing of them."""
    return []


def _draw(table: Table, runs: Sequence[StoredRun], view: View, out: Path, stem: str) -> tuple[Path, ...]:
    with style.drawing():
        figure, axes = style.grid_of_panels([panel.title for panel in table.panels], columns=4)
        for row, _ in enumerate(table.panels):
            for name in SWITCHED:
                at = [table.at(name, row, column, less="ampd") for column in range(len(table.rates))]
                axes[row].errorbar(
                    table.rates,
                    [each.mean if each.mean is not None else np.nan for each in at],
                    yerr=[each.half_width or 0.0 for each in at],
                    capsize=2,
                    **LINES[name],
                    label=CONTENDERS[name].title,
                )
            axes[row].axhline(0, linestyle="--", linewidth=1, color=style.GUIDE_COLOR, label="AMPD as printed")
            axes[row].set_xticks(table.rates)
            if row % 4 == 0:
                axes[row].set_ylabel("attainment added (points)")
        return style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=3,
            title=f"{figure_title(TITLE, runs, view)}; x: sessions/s",
            caption=[
                *conclusions(table),
                obtained_sentence(runs),
                f"Attainment in {DEFAULT}, on Table 2's plan. {seeds_text(view)}: paired difference, and bars for its 95 % interval.",
                transient_sentence(runs),
            ],
        )
