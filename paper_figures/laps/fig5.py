"""LAPS Figure 5: throughput and latency over the waiting window."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from paper_figures.common.figure import Page
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, number, said
from paper_figures.laps.contenders import CONTENDERS, LMSYS, MIDDLE
from paper_figures.laps.layout import GRAPHS, PRINTED, choices, laps_figure, laps_page
from paper_figures.laps.measures import MEAN, RPS
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval


@dataclass(frozen=True, kw_only=True)
class WindowGrid:
    waits_ms: tuple[float, ...]
    think_s: tuple[float, ...]
    knobs: Mapping[str, Scalar]
    """Knobs of every cell."""
    graphs: tuple[str, ...] = tuple(GRAPHS)


GRIDS: Mapping[str, WindowGrid] = {
    "roofline": WindowGrid(
        waits_ms=(0, 2, 5, 10, 20, 50), think_s=(0.0, 0.05, 0.5), knobs={"model": MIDDLE, "clients": 64}
    ),
    "torch": WindowGrid(
        waits_ms=(0, 1, 2, 4, 10),
        think_s=(0.0, 0.02),
        knobs={"num_prompts": 800, "clients": 16},
        graphs=("nearest", "cheapest"),
    ),
}


def settings(view: View) -> list[tuple[float, str]]:
    grid = GRIDS[view.platform.executor]
    return list(product(grid.think_s, grid.graphs))


def row(view: View, think_s: float, graphs: str) -> list[Cell]:
    """Return one cell per window."""
    grid = GRIDS[view.platform.executor]
    knobs = {**grid.knobs, "max_tokens": 255, "think_s": think_s, **GRAPHS[graphs]}
    waits = [{"min_window_s": wait / 1e3, "max_window_s": wait / 1e3} for wait in grid.waits_ms]
    return [CONTENDERS["laps"].cell(view, LMSYS, {**knobs, **wait}, together="laps-window") for wait in waits]


def cells(view: View) -> list[Cell]:
    return [cell for setting in settings(view) for cell in row(view, *setting)]


def best_gain(runs: Runs, think_s: float, graphs: str) -> Interval:
    """Return the gain in turns/s over no window, for the window with the most turns/s."""
    no_window, *waiting = row(runs.view, think_s, graphs)
    return runs.versus(max(waiting, key=lambda cell: number(runs.at(cell, RPS))), no_window, RPS)


def page(runs: Runs) -> Page:
    grid = GRIDS[runs.view.platform.executor]
    gains = {setting: f"{said(best_gain(runs, *setting), '%')} ({setting[1]})" for setting in settings(runs.view)}
    titles = {think_s: f"think time {1e3 * think_s:g} ms" for think_s in grid.think_s}
    ticks = [f"{wait:g}" for wait in grid.waits_ms]
    return laps_page(
        runs,
        panels=choices(runs, (RPS, MEAN), titles, partial(row, runs.view), ticks, grid.graphs, x_label="window (ms)"),
        columns=len(grid.think_s),
        conclusions=[
            f"Against no window, the best one changes throughput by {' and '.join(gains[think_s, graphs] for graphs in grid.graphs)} at a think time of {1e3 * think_s:g} ms."
            for think_s in grid.think_s
        ],
        about=f"LAPS with {grid.knobs.get('model', 'the tiny decoder')}, {grid.knobs['clients']} clients, prompts below 256 tokens. A window of fixed length; "
        "the depth adapts. nearest: the smallest captured graph that covers the batch; one bucket: a batch of one bucket of length, as printed; cheapest: only where it is predicted to be faster. The paper's text states no value of this figure.",
    )


def findings(runs: Runs) -> list[Finding]:
    """Batches of one bucket, as printed, decide the claim. We also tell the results of other ways to make a batch."""
    grid = GRIDS[runs.view.platform.executor]
    gains = {setting: best_gain(runs, *setting) for setting in settings(runs.view)}
    printed = [gain for (_, graphs), gain in gains.items() if graphs == PRINTED]
    above, top = sum(map(is_above, printed)), max(printed, key=number)
    others = {
        graphs: max((gain for (_, way), gain in gains.items() if way == graphs), key=number) for graphs in grid.graphs
    }
    no_window, *_, longest = row(runs.view, grid.think_s[1], "cheapest")
    how = (
        f"change of turns/s by the best window where a batch is of one bucket, as printed: {said(top, '%')} at most; above 0 outside noise in {above} of "
        f"{len(printed)} think times; at most {', '.join(f'{said(others[way], chr(37))} ({way})' for way in grid.graphs if way != PRINTED)} otherwise; "
        f"{grid.waits_ms[-1]:g} ms change mean TTFT by {said(runs.versus(longest, no_window, MEAN), '%')} at {1e3 * grid.think_s[1]:g} ms"
    )
    return [runs.finding("laps-fig5-window", number(top), how, holds=2 * above > len(printed))]


FIGURE = laps_figure("fig5", "LAPS, Figure 5, §3.1", page=page, cells=cells, findings=findings)
