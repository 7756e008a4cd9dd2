"""LAPS §4.2: what captured graphs cost, as printed, and what a budget of graph memory is worth (simulated)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.laps.buckets import BATCHES, GRAPH_MB, GRID, LENGTHS, captured_buckets, graph_bytes
from engines.models.shape import model_shape
from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import MEAN, Pairs, late, number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, MODELS, PAIRED_SEEDS, seeded
from paper_figures.laps.graphs import GRAPHS, draw_choices
from paper_figures.laps.layout import (
    CSV_COLUMNS,
    csv_rows,
    finding,
    obtained_sentence,
    place_of,
    seeds_sentence,
    title_of,
)
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

NAME = "cost"
TITLE = "LAPS §4.2: memory and time of graphs, and what a budget of them is worth"
SOURCE = "LAPS, §4.2"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
BUDGETS_GB = (0.0, 0.5, 1.0, 2.5, 5.0, 11.0)
LOADS = (0.1, 0.5)


def cell(view: View, graphs: str, budget_gb: float, load: float, figure: str | None = None) -> Cell:
    return CONTENDERS["laps"].cell(
        figure,
        view,
        LMSYS,
        {"model": MIDDLE, "transient": True, "graphs": graphs, "graph_budget_gb": budget_gb},
        rate=round(load * CAPACITY[MIDDLE], 3),
    )


def cells(view: View) -> list[Cell]:
    return seeded(
        [cell(view, graphs, budget_gb, load, NAME) for load in LOADS for graphs in GRAPHS for budget_gb in BUDGETS_GB],
        view,
    )


def graphs_in(budget_gb: float) -> int:
    """Of the grid, within so much memory."""
    size = graph_bytes(MIDDLE, model_shape(MIDDLE).n_layers)
    return len(captured_buckets(round(budget_gb * 1e9), size))


def graph_share(run: StoredRun) -> float | None:
    value = run.summary["graph_share"]
    return None if value is None else 100 * value


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    measures = (("steps by a graph (%)", graph_share), ("mean TTFT (ms)", MEAN))
    with style.drawing():
        figure, axes = style.grid_of_panels([f"load {load:g}" for _ in measures for load in LOADS], columns=len(LOADS))
        draw_choices(
            axes,
            pairs,
            measures,
            LOADS,
            lambda load, graphs: [cell(view, graphs, budget, load) for budget in BUDGETS_GB],
            [f"{budget:g}\n({graphs_in(budget)})" for budget in BUDGETS_GB],
        )
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=len(measures),
            title=f"{title_of(TITLE, view)}; x: GB of graphs (number of them)",
            caption=[
                conclusion(pairs, view),
                obtained_sentence(),
                f"Qwen2.5-14B on one instance, Poisson, {GRAPH_MB[MIDDLE]} MB a graph as printed: memory and time of a capture are the paper's and await a GPU run.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.2,
        )
    rows = [
        (
            model,
            f"{GRAPH_MB[model]} MB",
            f"{len(GRID) * GRAPH_MB[model] / 1e3:.1f} GB",
            "8 to 12 s",
            "5.6 to 8.4 min",
            "awaiting a GPU run",
        )
        for model in MODELS
    ]
    notes = [
        conclusion(pairs, view),
        *(
            f"Load {load:g}, {graphs}: "
            + "; ".join(
                f"{budget:g} GB {number(pairs.at(cell(view, graphs, budget, load), graph_share)):.0f} % by a graph, "
                f"{said(pairs.at(cell(view, graphs, budget, load), MEAN), 'ms')}, {number(pairs.at(cell(view, graphs, budget, load), late)):.1f} % late"
                for budget in BUDGETS_GB
            )
            for load in LOADS
            for graphs in GRAPHS
        ),
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("model", "a graph, printed", f"grid of {len(GRID)}", "a capture, printed", "the grid", "measured"),
        rows=tuple(rows),
        notes=(*notes, *invalid_notes(runs)),
    )


def conclusion(pairs: Pairs, view: View) -> str:
    low, high = LOADS
    none, some, whole = (cell(view, "cheapest", budget, low) for budget in (BUDGETS_GB[0], 2.5, BUDGETS_GB[-1]))
    forced = pairs.versus(cell(view, "nearest", BUDGETS_GB[-1], high), cell(view, "nearest", BUDGETS_GB[0], high), MEAN)
    return (
        f"At a load of {low:g} all {len(GRID)} graphs change mean TTFT by {said(pairs.versus(whole, none, MEAN), '%')}, the smallest {graphs_in(2.5)} of them by "
        f"{said(pairs.versus(some, none, MEAN), '%')}; at {high:g} replaying the nearest one always changes it by {said(forced, '%', 0)}."
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    stated = {claim.id: claim.expected.value for claim in load_claims("laps")}
    capture = stated["laps-graph-capture"]
    assert isinstance(capture, tuple)
    return [
        finding(
            "laps-bucket-grid",
            float(len(GRID)),
            f"{len(LENGTHS)} lengths by {len(BATCHES)} batch sizes, as captured here",
            obtained="computed",
        ),
        finding(
            "laps-grid-memory",
            tuple(len(GRID) * GRAPH_MB[model] / 1e3 for model in MODELS),
            "the grid times the printed memory of a graph",
            obtained="computed",
        ),
        finding(
            "laps-grid-capture",
            tuple(len(GRID) * float(seconds) for seconds in capture),
            "the grid times the printed time of a capture",
            obtained="computed",
        ),
    ]
