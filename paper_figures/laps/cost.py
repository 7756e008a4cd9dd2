"""LAPS §4.2: memory of graphs, and what a budget of them is worth."""

from functools import partial

from engines.laps.batching import BATCHES, GRAPH_MB, GRID, LENGTHS, graph_bytes, shapes_of
from engines.models.shape import model_shape
from paper_figures.common.figure import Page
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, said
from paper_figures.laps.contenders import CONTENDERS, LMSYS, MIDDLE, MODELS, rate_of
from paper_figures.laps.layout import GRAPHS, PRINTED, choices, laps_figure, laps_page
from paper_figures.laps.measures import GRAPH_SHARE, LATE, MEAN
from repro.reports.claims import Finding, load_claims
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

BUDGETS_GB = (0.0, 0.5, 1.0, 2.5, 5.0, 11.0)
LOADS = (0.1, 0.5)


def cell(view: View, graphs: str, budget_gb: float, load: float) -> Cell:
    knobs: dict[str, Scalar] = {"model": MIDDLE, "transient": True, **GRAPHS[graphs], "graph_budget_gb": budget_gb}
    return CONTENDERS["laps"].cell(view, LMSYS, knobs, rate=rate_of(load))


def row(view: View, load: float, graphs: str) -> list[Cell]:
    """Return one cell per memory budget."""
    return [cell(view, graphs, budget_gb, load) for budget_gb in BUDGETS_GB]


def cells(view: View) -> list[Cell]:
    return [each for load in LOADS for graphs in GRAPHS for each in row(view, load, graphs)]


def graphs_in(budget_gb: float) -> int:
    """Return how many graphs of the grid fit into this memory."""
    size = graph_bytes(MIDDLE, model_shape(MIDDLE).n_layers)
    return len(shapes_of("nearest", round(budget_gb * 1e9), size))


def page(runs: Runs) -> Page:
    notes = []
    for load in LOADS:
        for graphs in GRAPHS:
            texts = [
                f"{budget:g} GB {number(runs.at(each, GRAPH_SHARE)):.0f} % by a graph, {said(runs.at(each, MEAN), 'ms')}, {number(runs.at(each, LATE)):.1f} % late"
                for budget, each in zip(BUDGETS_GB, row(runs.view, load, graphs), strict=True)
            ]
            notes.append(f"Load {load:g}, {graphs}: {'; '.join(texts)}")
    titles = {load: f"load {load:g}" for load in LOADS}
    ticks = [f"{budget:g}\n({graphs_in(budget)})" for budget in BUDGETS_GB]
    return laps_page(
        runs,
        panels=choices(
            runs,
            (GRAPH_SHARE, MEAN),
            titles,
            partial(row, runs.view),
            ticks,
            GRAPHS,
            x_label="GB of graphs (number of them)",
        ),
        columns=len(LOADS),
        conclusions=[conclusion(runs)],
        about=f"Qwen2.5-14B on one instance, Poisson, {GRAPH_MB[MIDDLE]} MB a graph as printed: memory and time of a capture are the paper's and await a GPU run.",
        notes=notes,
    )


def conclusion(runs: Runs) -> str:
    low, high = LOADS
    none, some, whole = (cell(runs.view, "cheapest", budget, low) for budget in (BUDGETS_GB[0], 2.5, BUDGETS_GB[-1]))
    without, *_, forced = row(runs.view, high, PRINTED)
    return (
        f"At a load of {low:g} all {len(GRID)} graphs change mean TTFT by {said(runs.versus(whole, none, MEAN), '%')}, the smallest {graphs_in(2.5)} of them by "
        f"{said(runs.versus(some, none, MEAN), '%')}; at {high:g} replaying the nearest one always, for batches of one bucket, changes it by {said(runs.versus(forced, without, MEAN), '%', 0)}."
    )


def findings(runs: Runs) -> list[Finding]:
    capture = next(claim.expected.value for claim in load_claims("laps") if claim.id == "laps-graph-capture")
    assert isinstance(capture, tuple)
    rows: dict[str, tuple[float | tuple[float, ...], str]] = {
        "laps-bucket-grid": (
            float(len(GRID)),
            f"{len(LENGTHS)} lengths by {len(BATCHES)} batch sizes, as captured here",
        ),
        "laps-grid-memory": (
            tuple(len(GRID) * GRAPH_MB[model] / 1e3 for model in MODELS),
            "the grid times the printed memory of a graph",
        ),
        "laps-grid-capture": (
            tuple(len(GRID) * float(seconds) for seconds in capture),
            "the grid times the printed time of a capture",
        ),
    }
    return [runs.finding(claim, value, how, obtained="computed") for claim, (value, how) in rows.items()]


FIGURE = laps_figure("cost", "LAPS, §4.2", page=page, cells=cells, findings=findings)
