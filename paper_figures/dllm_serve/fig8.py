"""dLLM-Serve Figure 8 (§6.6): features added one by one, throughput relative to Sparse-dLLM.

The paper's ladder, then two rungs of our own: look-ahead admission and a single Refresh per block.
"""

from __future__ import annotations

from itertools import pairwise

from paper_figures.common.caption import (
    dataset_title,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    prompt_sources,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Bars, Guide, Layer, Mark, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import WIDE_INCHES
from paper_figures.common.words import ends, said, shown
from paper_figures.dllm_serve.comparison import DATASETS, reading_sentence
from paper_figures.dllm_serve.curve import MEAN_LATENCY, THROUGHPUT
from paper_figures.dllm_serve.fig3 import CARD
from paper_figures.dllm_serve.layout import (
    PAPER,
    PRINTED,
    SIMULATED_RUNS,
    all_valid,
    dllm_figure,
    printed_in,
    simulation_note,
)
from repro.reports.ablation import LADDER, Variant
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

SOURCE = f"{PAPER}, Figure 8, §6.6"
"""The paper does not say which card; Table 4's ratios on the L40S differ, so it is taken to be the RTX 4090."""
COLORS = dict(zip(LADDER, ("#D55E00", "#A6CEE3", "#56B4E9", "#0072B2", "#B2DF8A", "#009E73"), strict=True))
BAR_WIDTH = 0.14
PLACES = [(dataset, rung) for dataset in DATASETS for rung in LADDER]
P99, RUNNING = Measure(path="e2el_s/p99"), Measure(path="mean_running")
PRINTED_STEPS = {
    "osc/scheduler": (1, 2),
    "osc/budgeting": (2, 3),
    "burst/scheduler": (1, 2),
    "burst/budgeting": (2, 3),
    "livebench/both": (1, 3),
}
"""Data set and what is added: from rung, to rung; the gains that follow from printed numbers."""


def cell(view: View, dataset: str, rung: Variant) -> Cell:
    return rung.cell(view, dataset, max(view.dllm.rates), 0, "fig8")


def cells(view: View) -> list[Cell]:
    """Every rung at the platform's highest rate. Simulated, Figure 3 has the first rung and the full system already;
    measured, all rungs are made together."""
    return cell_by_cell((cell(view, *place) for place in PLACES), view)


def relative(runs: Runs, dataset: str, rung: Variant) -> Interval:
    """Throughput over that of the first rung, by repeat."""
    return runs.versus(cell(runs.view, dataset, rung), cell(runs.view, dataset, LADDER[0]), THROUGHPUT, "ratio")


def paper_ladder(view: View) -> dict[tuple[str, Variant], float]:
    values = printed_in("fig8") if view.platform.name == CARD else {}
    return {
        (dataset, rung): float(value)
        for dataset in DATASETS
        for rung, value in zip(LADDER, values.get(dataset_title(dataset), ()), strict=False)
        if value is not None
    }


def page(runs: Runs) -> Page:
    printed, reading = paper_ladder(runs.view), reading_sentence(runs.view)
    obtained = how_obtained(runs.all)
    missing = [
        f"{dataset_title(dataset)} {rung.label}"
        for dataset, rung in PLACES
        if not runs.of(cell(runs.view, dataset, rung))
    ]
    caption = [
        "Rungs are cumulative; hatched ones are this project's own, not the paper's.",
        *(["Hollow diamonds: the paper's values, whose card and rate it does not state."] if printed else []),
        reading,
        seeds_sentence(runs.all),
        *([f"The paper's values are those of {SOURCE}."] if printed else []),
        prompt_sources(runs.all),
        *obtained,
    ]
    return Page(
        table=Table(
            columns=(
                *("dataset", "rung", "tok/s", "relative", "paper", "mean latency s", "running", "obtained", "valid"),
            ),
            rows=[table_row(runs, *place) for place in PLACES if runs.of(cell(runs.view, *place))],
        ),
        csv=Table(
            columns=(
                *("platform", "reading", "dataset", "rung", "ours", "relative_throughput", "low", "high"),
                *("throughput_tok_s", "mean_latency_s", "p99_latency_s", "mean_running", "kv_rows"),
                *("paper_relative_throughput", "obtained", "valid"),
            ),
            rows=[csv_row(runs, *place) for place in PLACES],
        ),
        picture=Picture(panels=[panel(runs)], caption=caption, width_inches=WIDE_INCHES),
        notes=[
            *monotone_notes(runs),
            *invalid_notes(runs.all),
            *missing_note(missing, len(PLACES)),
            *obtained,
            reading,
            *simulation_note(runs),
        ],
    )


def panel(runs: Runs) -> Panel:
    layers: list[Layer] = []
    printed = paper_ladder(runs.view)
    for index, rung in enumerate(LADDER):
        places = [place + (index - (len(LADDER) - 1) / 2) * BAR_WIDTH for place in range(len(DATASETS))]
        layers.append(
            Bars(
                label=rung.label,
                places=places,
                at=[relative(runs, dataset, rung) for dataset in DATASETS],
                width=BAR_WIDTH,
                capsize=2,
                color=COLORS[rung],
                hatch="///" if rung.is_ours else None,
                edge="white",
                is_numbered=True,
            )
        )
        layers += [
            Mark(label="paper", place=place, value=printed[dataset, rung], look=PRINTED, size=5)
            for place, dataset in zip(places, DATASETS, strict=True)
            if (dataset, rung) in printed
        ]
    return Panel(
        title=f"at {max(runs.view.dllm.rates):g} req/s",
        layers=[*layers, Guide(value=1)],
        x=Axis(ticks=range(len(DATASETS)), names=list(map(dataset_title, DATASETS))),
        y=Axis(label="throughput relative\nto Sparse-dLLM (x)", margin=0.12),
    )


def csv_row(runs: Runs, dataset: str, rung: Variant) -> tuple[object, ...]:
    asked, gain, view = cell(runs.view, dataset, rung), relative(runs, dataset, rung), runs.view
    own = runs.of(asked)
    return (
        *(view.platform.name, view.reading if rung is LADDER[0] else None, dataset, rung.label, rung.is_ours),
        *ends(gain),
        *(runs.at(asked, of).mean for of in (THROUGHPUT, MEAN_LATENCY, P99, RUNNING)),
        own[0].facts.get("kv_rows") if own else None,
        paper_ladder(view).get((dataset, rung)),
        *(obtained_text(own), all_valid(own)),
    )


def table_row(runs: Runs, dataset: str, rung: Variant) -> tuple[str, ...]:
    asked = cell(runs.view, dataset, rung)
    own = runs.of(asked)
    throughput, latency, running = (shown(runs.at(asked, of).mean) for of in (THROUGHPUT, MEAN_LATENCY, RUNNING))
    return (
        dataset_title(dataset),
        rung.label + (" (ours)" if rung.is_ours else ""),
        throughput,
        said(relative(runs, dataset, rung), "x", 2),
        shown(paper_ladder(runs.view).get((dataset, rung)), ".2f", "x"),
        latency,
        running,
        obtained_text(own),
        validity_text(own),
    )


def monotone_notes(runs: Runs) -> list[str]:
    notes = []
    for dataset in DATASETS:
        gains = [(rung, relative(runs, dataset, rung).mean) for rung in LADDER]
        falls = [
            f"{after.label[2:]} ({later / earlier:.3f}x)"
            for (_, earlier), (after, later) in pairwise(gains)
            if earlier is not None and later is not None and later < earlier
        ]
        if falls:
            notes.append(f"Not monotone on {dataset_title(dataset)}: {', '.join(falls)} below the rung before.")
    return notes


def findings(runs: Runs) -> list[Finding]:
    means = {place: relative(runs, *place).mean for place in PLACES}
    known = {place: mean for place, mean in means.items() if mean is not None}
    if len(known) < len(means):
        return []
    how = "throughput over Sparse-dLLM's at the highest rate; the paper names no card"
    found = [
        runs.finding(f"dllm-abl-{name}-{dataset}", known[dataset, rung], how)
        for dataset in DATASETS
        for name, rung in zip(("engine", "scheduler", "full"), LADDER[1:4], strict=True)
    ]
    increments = tuple(
        known[name.partition("/")[0], LADDER[last]] / known[name.partition("/")[0], LADDER[first]]
        for name, (first, last) in PRINTED_STEPS.items()
    )
    how = "a rung's throughput over that of the rung before, or of the engine alone where none is printed between"
    found.append(runs.finding("dllm-abl-increments", increments, how, of=tuple(PRINTED_STEPS)))
    rungs = [[1.0, *(known[dataset, rung] for rung in LADDER[1:4])] for dataset in DATASETS]
    steps = [[later - earlier for earlier, later in pairwise(own)] for own in rungs]
    engines = tuple(engine for engine, *_ in steps)
    largest = all(engine > max(later) for engine, *later in steps)
    how = "gain of the engine alone, per data set"
    return [*found, runs.finding("dllm-abl-engine-largest", engines, how, holds=largest)]


FIGURE = dllm_figure(
    "fig8",
    SOURCE,
    platforms=("cpu-tiny", CARD),
    page=page,
    cells=cells,
    findings=findings,
    card=CARD,
    num_runs=SIMULATED_RUNS,
)
