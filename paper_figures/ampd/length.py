"""AMPD length: attainment of 99 and of 400 sessions."""

from collections.abc import Mapping

from paper_figures.ampd.attainment import Attainments, cell_interval, floor_of, tabulate
from paper_figures.ampd.contenders import CONTENDERS, DETAIL_RATE, details, grid
from paper_figures.ampd.layout import ampd_figure, seeds_text
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.common.words import said
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell

SHOWN = ("ampd", "ours", "dynamo", "vllm")
LENGTHS: Mapping[str, Knobs] = {"99": (), "400": (("num_prompts", 400),)}


def cells(view: View) -> list[Cell]:
    return [cell for knobs in LENGTHS.values() for cell in grid(view, SHOWN, details(), (DETAIL_RATE,), knobs=knobs)]


def table_of(runs: Runs, num: str) -> Attainments:
    return tabulate(runs, SHOWN, details(), (DETAIL_RATE,), knobs=LENGTHS[num])


def page(runs: Runs) -> Page:
    floor = floor_of(runs.view)

    def line(table: Attainments, num: str, row: int) -> tuple[str, ...]:
        gains = [said(cell_interval(table, "ampd", name, row, 0, floor), digits=0) for name in ("dynamo", "vllm")]
        return (table.panels[row].title, num, *(said(table.at(name, row, 0)) for name in SHOWN), *gains)

    tables = {num: table_of(runs, num) for num in LENGTHS}
    titles = (f"{CONTENDERS[name].title} %" for name in SHOWN)
    return Page(
        table=Table(
            columns=("panel", "sessions", *titles, "AMPD over Dynamo %", "over vLLM %"),
            rows=[line(table, num, row) for num, table in tables.items() for row, _ in table.cells],
        ),
        notes=[
            f"{DETAIL_RATE:g} sessions/s, all on AMPD's plan, {seeds_text(runs.view)}; simulated. Overload is transient: the longer the run, the "
            "lower every attainment, and the larger a ratio of two of them."
        ],
    )


FIGURE = ampd_figure("length", "AMPD, Figure 4 and 6, §7.2", page=page, cells=cells)
