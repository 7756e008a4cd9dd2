"""dLLM-Serve Figure 8: ablation of relative throughput.

The paper's ladder and three rungs of our own. Before the paper's we add static batching, which published Sparse-dLLM lacks. After them we
add a single Refresh per block and look-ahead admission.
"""

import math
from collections.abc import Callable
from itertools import pairwise

from paper_figures.common.caption import dataset_title, obtained_text, prompt_sources
from paper_figures.common.figure import Columns, Page, Picture, cell_by_cell, table
from paper_figures.common.panel import Axis, Bars, Guide, Layer, Line, Mark, Panel
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.common.style import WIDEST_INCHES, Look
from paper_figures.dllm_serve import layout
from paper_figures.dllm_serve.comparison import DATASETS
from paper_figures.dllm_serve.curve import MEAN_LATENCY, THROUGHPUT, per_processor_second
from repro.reports.ablation import LADDER, Variant, rungs
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

SOURCE = f"{layout.PAPER}, Figure 8, §6.6"
COLORS = dict(zip(LADDER, ("#D55E00", "#F5B27A", "#A6CEE3", "#56B4E9", "#0072B2", "#B2DF8A", "#009E73"), strict=True))
SPENT = Look(color=layout.PROCESSOR_COLOR, marker=".", linestyle="none")
SPENT_BESIDE = 0.3
"""A bar's value by processor time is shifted by this share of the bar, as the interval is in the middle."""
PROCESSOR_TIME = (
    "tokens per second that a processor worked on the requests, which others on the machine hardly take any of"
)
GROUP_WIDTH = 0.84
"""Width of all bars of a data set together."""
PRINTED_RUNGS = tuple(rung for rung in LADDER if not rung.is_ours)
"""Sparse-dLLM, + engine, + scheduler, + budgeting; the last is dLLM-Serve as published."""
P99, RUNNING = Measure(path="e2el_s/p99"), Measure(path="mean_running")
PRINTED_STEPS = {
    "osc/scheduler": (1, 2),
    "osc/budgeting": (2, 3),
    "burst/scheduler": (1, 2),
    "burst/budgeting": (2, 3),
    "livebench/both": (1, 3),
}
"""Data set and addition -> from rung, to rung: the gains that follow from printed numbers."""


Place = tuple[str, Variant]
"""Data set and rung."""


def places(view: View) -> list[Place]:
    return [(dataset, rung) for dataset in DATASETS for rung in rungs(view)]


def cell(view: View, dataset: str, rung: Variant) -> Cell:
    return rung.cell(view, dataset, max(view.dllm.rates), 0, "fig8")


def cells(view: View) -> list[Cell]:
    """Return every rung at the platform's highest rate. If simulated, Figure 3 already has the first rung and the full system; if
    measured, all rungs are made together."""
    return cell_by_cell((cell(view, *place) for place in places(view)), view)


def relative(runs: Runs, dataset: str, rung: Variant, of: Of = THROUGHPUT) -> Interval:
    """Return throughput over that of the first rung, by repeat."""
    return runs.versus(cell(runs.view, dataset, rung), cell(runs.view, dataset, LADDER[0]), of, "ratio")


def paper_ladder(view: View) -> dict[tuple[str, Variant], float]:
    values = layout.printed_in("fig8") if view.platform.name in layout.CARDS else {}
    return {
        (dataset, rung): float(value)
        for dataset in DATASETS
        for rung, value in zip(PRINTED_RUNGS, values.get(dataset_title(dataset), ()), strict=False)
        if value is not None
    }


def page(runs: Runs) -> Page:
    printed = (
        f"Hollow diamonds: the paper's values ({SOURCE}), whose card and rate it does not state. It prints none of the scheduler on "
        "LiveBench."
    )
    caption = [
        "Rungs are cumulative; hatched ones are this project's own, not the paper's.",
        *([printed] if paper_ladder(runs.view) else []),
        *([] if runs.view.is_simulated else [f"Dots: {PROCESSOR_TIME}, with their own intervals."]),
        prompt_sources(runs.all),
    ]
    return Page(
        table=table(places(runs.view), columns(runs)),
        picture=Picture(panels=[panel(runs)], caption=caption, width_inches=WIDEST_INCHES),
        notes=share_notes(runs),
    )


def columns(runs: Runs) -> Columns[Place]:
    view, printed = runs.view, paper_ladder(runs.view)

    def own(place: Place) -> tuple[StoredRun, ...]:
        return runs.of(cell(view, *place))

    def mean(of: Of) -> Callable[[Place], float | None]:
        return lambda place: runs.at(cell(view, *place), of).mean

    return {
        "platform": lambda place: view.platform.name,
        "reading": lambda place: view.reading if place[1] is LADDER[0] else None,
        "dataset": lambda place: place[0],
        "rung": lambda place: place[1].label,
        "ours": lambda place: place[1].is_ours,
        "relative_throughput": lambda place: relative(runs, *place).mean,
        "low": lambda place: relative(runs, *place).low,
        "high": lambda place: relative(runs, *place).high,
        "by_processor_time": lambda place: relative(runs, *place, per_processor_second).mean,
        "by_processor_time_low": lambda place: relative(runs, *place, per_processor_second).low,
        "by_processor_time_high": lambda place: relative(runs, *place, per_processor_second).high,
        "log_share": lambda place: shares(runs, place[0]).get(place[1]),
        "throughput_tok_s": mean(THROUGHPUT),
        "mean_latency_s": mean(MEAN_LATENCY),
        "p99_latency_s": mean(P99),
        "mean_running": mean(RUNNING),
        "kv_rows": lambda place: own(place)[0].facts.get("kv_rows") if own(place) else None,
        "paper_relative_throughput": printed.get,
        "obtained": lambda place: obtained_text(own(place)),
        "valid": lambda place: layout.all_valid(own(place)),
    }


def panel(runs: Runs) -> Panel:
    layers, marks = list[Layer](), list[Layer]()
    printed = paper_ladder(runs.view)
    ladder = rungs(runs.view)
    width = GROUP_WIDTH / len(ladder)
    for index, rung in enumerate(ladder):
        positions = [place + (index - (len(ladder) - 1) / 2) * width for place in range(len(DATASETS))]
        layers.append(
            Bars(
                label=rung.label,
                places=positions,
                at=[relative(runs, dataset, rung) for dataset in DATASETS],
                width=width,
                capsize=2,
                color=COLORS[rung],
                hatch="///" if rung.is_ours else None,
                edge="white",
                is_numbered=True,
            )
        )
        if not runs.view.is_simulated:
            ratios = [relative(runs, dataset, rung, per_processor_second) for dataset in DATASETS]
            shifted = [place + SPENT_BESIDE * width for place in positions]
            marks.append(Line(label="by processor time", places=shifted, at=ratios, look=SPENT, capsize=0, zorder=4))
        marks += [
            Mark(label="paper", place=place, value=printed[dataset, rung], look=layout.PRINTED, size=5)
            for place, dataset in zip(positions, DATASETS, strict=True)
            if (dataset, rung) in printed
        ]
    return Panel(
        title=f"at {max(runs.view.dllm.rates):g} req/s",
        layers=[*layers, *marks, Guide(value=1)],
        x=Axis(ticks=range(len(DATASETS)), names=list(map(dataset_title, DATASETS))),
        y=Axis(label="throughput relative\nto Sparse-dLLM (x)", better="higher", margin=0.12),
    )


def shares(runs: Runs, dataset: str) -> dict[Variant, float]:
    """Return each rung's share in dLLM-Serve's gain over the first, in logarithms that add up to one; empty without a gain."""
    means = {rung: relative(runs, dataset, rung).mean for rung in rungs(runs.view)}
    ladder = [rung for rung in means if rung in PRINTED_RUNGS or "reading" in dict(rung.knobs)]
    logs = [math.log(mean) for rung in ladder if (mean := means[rung])]
    if len(logs) < len(ladder) or logs[-1] <= 0:
        return {}
    steps = [after - before for before, after in pairwise(logs)]
    return {rung: step / logs[-1] for rung, step in zip(ladder[1:], steps, strict=True)}


def share_notes(runs: Runs) -> list[str]:
    texts: dict[str, list[str]] = {}
    for dataset in DATASETS:
        for rung, share in shares(runs, dataset).items():
            texts.setdefault(rung.label[2:], []).append(f"{100 * share:.0f} % ({dataset_title(dataset)})")
    if not texts:
        return []
    text = "; ".join(f"{label} {', '.join(parts)}" for label, parts in texts.items())
    return [f"Of dLLM-Serve's gain over Sparse-dLLM, in logarithms: {text}."]


def findings(runs: Runs) -> list[Finding]:
    means = {place: relative(runs, *place).mean for place in places(runs.view)}
    known = {place: mean for place, mean in means.items() if mean is not None}
    if len(known) < len(means):
        return []
    how = "throughput over Sparse-dLLM's at the highest rate; the paper names no card"
    results = [
        runs.finding(f"dllm-abl-{name}-{dataset}", known[dataset, rung], how)
        for dataset in DATASETS
        for name, rung in zip(("engine", "scheduler", "full"), PRINTED_RUNGS[1:], strict=True)
    ]
    increments = tuple(
        known[name.partition("/")[0], PRINTED_RUNGS[last]] / known[name.partition("/")[0], PRINTED_RUNGS[first]]
        for name, (first, last) in PRINTED_STEPS.items()
    )
    how = "a rung's throughput over that of the rung before, or of the engine alone where none is printed between"
    results.append(runs.finding("dllm-abl-increments", increments, how, of=tuple(PRINTED_STEPS)))
    ladders = [[1.0, *(known[dataset, rung] for rung in PRINTED_RUNGS[1:])] for dataset in DATASETS]
    steps = [[later - earlier for earlier, later in pairwise(ladder)] for ladder in ladders]
    engines = tuple(engine for engine, *_ in steps)
    largest = all(engine > max(later) for engine, *later in steps)
    how = "gain of the engine alone, per data set"
    return [*results, runs.finding("dllm-abl-engine-largest", engines, how, holds=largest)]


FIGURE = layout.comparison_figure(
    "fig8", SOURCE, platforms=("cpu-tiny", *layout.CARDS), card=layout.CARDS, page=page, cells=cells, findings=findings
)
