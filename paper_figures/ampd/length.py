"""How long a run is: attainment of 99 sessions, as the paper's, and of 400 at the same rate. Past saturation it falls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.ampd.compare import Table, cell_interval, said, tabulate
from paper_figures.ampd.contenders import CONTENDERS, PAIRED_SEEDS, Knobs, grid
from paper_figures.ampd.gains import floor_of
from paper_figures.ampd.layout import seeds_text
from paper_figures.ampd.panels import DETAIL_MODEL, DETAIL_RATE, TRACES, Panel, panel_of
from paper_figures.common.caption import invalid_notes
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

NAME = "length"
TITLE = "AMPD length: attainment of 99 and of 400 sessions"
SOURCE = "AMPD, Figure 4 and 6, §7.2"
PLATFORMS = ("h20x32",)
NUM_RUNS = PAIRED_SEEDS
SHOWN = ("ampd", "ours", "dynamo", "vllm")
LONG = 400
_LONG: Knobs = (("num_prompts", LONG),)


def cells(view: View) -> list[Cell]:
    return [
        *grid(NAME, view, SHOWN, _panels(), (DETAIL_RATE,)),
        *grid(NAME, view, SHOWN, _panels(), (DETAIL_RATE,), knobs=_LONG),
    ]


def table_of(runs: Sequence[StoredRun], view: View, knobs: Knobs) -> Table:
    return tabulate(runs, view, SHOWN, _panels(), (DETAIL_RATE,), view.seeds, knobs=knobs)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    floor = floor_of(view)
    rows = []
    for knobs, num in (((), "99"), (_LONG, str(LONG))):
        table = table_of(runs, view, knobs)
        for row, panel in enumerate(table.panels):
            texts = [said(table.at(name, row, 0)) for name in SHOWN]
            gains = [said(cell_interval(table, "ampd", name, row, 0, floor), digits=0) for name in ("dynamo", "vllm")]
            rows.append((panel.title, num, *texts, *gains))
    return save_table(
        out,
        f"{NAME}-{view.stem}",
        title=TITLE,
        columns=(
            "panel",
            "sessions",
            *(f"{CONTENDERS[name].title} %" for name in SHOWN),
            "AMPD over Dynamo %",
            "over vLLM %",
        ),
        rows=rows,
        notes=(
            f"{DETAIL_RATE:g} sessions/s, all on AMPD's plan, {seeds_text(view)}; simulated. Overload is transient: the longer the run, the "
            "lower every attainment, and the larger a ratio of two of them.",
            *invalid_notes(runs),
        ),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """The paper states no length of its runs."""
    return []


def _panels() -> list[Panel]:
    return [panel_of(DETAIL_MODEL, trace) for trace in TRACES]
