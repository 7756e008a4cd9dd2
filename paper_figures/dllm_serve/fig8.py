"""dLLM-Serve Figure 8 (§6.6): features added one by one, throughput relative to Sparse-dLLM.

The paper's ladder, then two rungs of our own: look-ahead admission and a single Refresh per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.common.caption import (
    figure_title,
    held_out_note,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    prompt_sources,
    require_runs,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.curve import dataset_title
from paper_figures.common.repeats import Repeats
from paper_figures.dllm_serve.comparison import DATASETS, reading_sentence
from repro.reports.ablation import LADDER, Variant
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_figures
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun, over_repeats
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig8"
TITLE = "dLLM-Serve Figure 8: ablation of relative throughput"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 8, §6.6"
PLATFORMS = ("cpu-tiny", "rtx4090")
PAPER_PLATFORMS = ("rtx4090",)
"""The paper does not say which card; Table 4's ratios on the L40S differ, so it is taken to be the RTX 4090."""
DECIDES_ON = PAPER_PLATFORMS

COLORS = ("#D55E00", "#A6CEE3", "#56B4E9", "#0072B2", "#B2DF8A", "#009E73")
BAR_WIDTH = 0.14
CSV_COLUMNS = (
    "platform",
    "reading",
    "dataset",
    "rung",
    "ours",
    "relative_throughput",
    "half_width",
    "throughput_tok_s",
    "mean_latency_s",
    "p99_latency_s",
    "mean_running",
    "kv_rows",
    "paper_relative_throughput",
    "obtained",
    "valid",
)
TABLE_COLUMNS = ("dataset", "rung", "tok/s", "relative", "paper", "mean latency s", "running", "obtained", "valid")

PRINTED_STEPS = (
    ("osc", "scheduler", 1, 2),
    ("osc", "budgeting", 2, 3),
    ("burst", "scheduler", 1, 2),
    ("burst", "budgeting", 2, 3),
    ("livebench", "both", 1, 3),
)
"""(data set, what is added, from rung, to rung) of the gains that follow from printed numbers."""

Runs = dict[tuple[str, Variant], tuple[StoredRun, ...]]


def cells(view: View) -> list[Cell]:
    """Every rung at the platform's highest rate. Simulated, Figure 3 has the first rung and the full system already;
    measured, all rungs are made together."""
    return [
        rung.cell(view, dataset, max(view.dllm.rates), seed, NAME)
        for dataset in DATASETS
        for rung in LADDER
        for seed in view.seeds
    ]


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    by_rung = runs_by_rung(runs, view)
    printed = paper_ladder(view.platform)
    stem = f"{NAME}-{view.stem}"
    files = _draw(by_rung, printed, runs, view, out, stem)
    missing = [f"{dataset_title(dataset)} {rung.label}" for (dataset, rung), found in by_rung.items() if not found]
    notes = [
        *_monotone_notes(by_rung),
        *invalid_notes(runs),
        *missing_note(missing, len(by_rung)),
        *how_obtained(runs, ["runs"] * len(runs)),
        reading_sentence(view),
    ]
    if any(run.record.obtained == "simulated" for run in runs):
        notes += held_out_note(view.platform)
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, _csv_rows(by_rung, printed, view))),
        columns=TABLE_COLUMNS,
        rows=tuple(_table_row(key, found, by_rung, printed) for key, found in by_rung.items() if found),
        notes=tuple(notes),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name not in PAPER_PLATFORMS or view.reading != "published":
        return []
    by_rung = runs_by_rung(runs, view)
    gains = {(dataset, rung): relative(by_rung, dataset, rung).mean for dataset, rung in by_rung}
    known = {key: value for key, value in gains.items() if value is not None}
    if len(known) < len(gains):
        return []
    found = [
        Finding(
            claim=f"dllm-abl-{name}-{dataset}",
            value=known[dataset, rung],
            obtained=view.obtained,
            how="throughput over Sparse-dLLM's at the highest rate; the paper names no card",
        )
        for dataset in DATASETS
        for name, rung in zip(("engine", "scheduler", "full"), LADDER[1:4], strict=True)
    ]
    steps = [
        (
            known[dataset, LADDER[1]] - 1,
            known[dataset, LADDER[2]] - known[dataset, LADDER[1]],
            known[dataset, LADDER[3]] - known[dataset, LADDER[2]],
        )
        for dataset in DATASETS
    ]
    found.append(
        Finding(
            claim="dllm-abl-increments",
            value=tuple(
                known[dataset, LADDER[last]] / known[dataset, LADDER[first]]
                for dataset, _, first, last in PRINTED_STEPS
            ),
            obtained=view.obtained,
            how="a rung's throughput over that of the rung before, or of the engine alone where none is printed between",
            of=tuple(f"{dataset}/{what}" for dataset, what, *_ in PRINTED_STEPS),
        )
    )
    found.append(
        Finding(
            claim="dllm-abl-engine-largest",
            value=tuple(engine for engine, *_ in steps),
            obtained=view.obtained,
            how="gain of the engine alone, per data set",
            holds=all(engine > max(later) for engine, *later in steps),
        )
    )
    return found


def runs_by_rung(runs: Sequence[StoredRun], view: View) -> Runs:
    repeats = Repeats(runs, view)
    return {
        (dataset, rung): repeats.of(rung.cell(view, dataset, max(view.dllm.rates), 0, NAME))
        for dataset in DATASETS
        for rung in LADDER
    }


def relative(by_rung: Runs, dataset: str, rung: Variant) -> Interval:
    """Throughput over that of the first rung, by repeat."""
    base = {run.cell.seed: run.summary["throughput_tok_s"] for run in by_rung[dataset, LADDER[0]] if run.validity.valid}
    ratios = [
        run.summary["throughput_tok_s"] / base[run.cell.seed]
        for run in by_rung[dataset, rung]
        if run.validity.valid and run.summary["throughput_tok_s"] is not None and base.get(run.cell.seed)
    ]
    return mean_interval(ratios)


def paper_ladder(platform: Platform) -> dict[tuple[str, Variant], float]:
    if platform.name not in PAPER_PLATFORMS:
        return {}
    values = next(entry for entry in load_figures("dllm-serve") if entry.id == "dllm-serve/fig8").values
    return {
        (dataset, rung): float(value)
        for dataset in DATASETS
        for rung, value in zip(LADDER, values[dataset_title(dataset)], strict=False)
        if value is not None
    }


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(
    by_rung: Runs,
    printed: dict[tuple[str, Variant], float],
    runs: Sequence[StoredRun],
    view: View,
    out: Path,
    stem: str,
) -> tuple[Path, Path, Path]:
    with style.drawing():
        figure, (axes,) = style.row_of_panels([f"at {max(view.dllm.rates):g} req/s"])
        for i, (rung, color) in enumerate(zip(LADDER, COLORS, strict=True)):
            _draw_rung(axes, by_rung, printed, rung, i, color)
        axes.axhline(1, linestyle="--", linewidth=1, color=style.GUIDE_COLOR)
        axes.set_xticks(range(len(DATASETS)), [dataset_title(dataset) for dataset in DATASETS])
        axes.set_ylabel("throughput relative\nto Sparse-dLLM (x)")
        axes.margins(y=0.12)
        sentences = [
            "Rungs are cumulative; hatched ones are this project's own, not the paper's.",
            reading_sentence(view),
            seeds_sentence(runs),
        ]
        if printed:
            sentences.insert(1, "Hollow diamonds: the paper's values, whose card and rate it does not state.")
            sentences.append(f"The paper's values are those of {SOURCE}.")
        sentences += [prompt_sources(runs), *how_obtained(runs, ["runs"] * len(runs))]
        title = figure_title(TITLE, runs, view)
        return style.publish(figure, [axes], out, stem, title=title, caption=sentences, width_inches=style.WIDE_INCHES)


def _draw_rung(
    axes: Axes, by_rung: Runs, printed: dict[tuple[str, Variant], float], rung: Variant, index: int, color: str
) -> None:
    gains = [relative(by_rung, dataset, rung) for dataset in DATASETS]
    places = [x + (index - (len(LADDER) - 1) / 2) * BAR_WIDTH for x in range(len(DATASETS))]
    spread = [gain.half_width or 0.0 for gain in gains]
    axes.bar(
        places,
        [gain.mean or 0.0 for gain in gains],
        BAR_WIDTH,
        yerr=spread if any(spread) else None,
        capsize=2,
        color=color,
        hatch="///" if rung.is_ours else None,
        edgecolor="white",
        label=rung.label,
    )
    for place, gain, dataset in zip(places, gains, DATASETS, strict=True):
        style.foot_label(axes, place, gain.mean)
        if (value := printed.get((dataset, rung))) is not None:
            style.paper_marker(axes, place, value, color="black", marker="D", label="paper", size=5)


# -- CSV, table, notes ------------------------------------------------------------------------------------


def _csv_rows(by_rung: Runs, printed: dict[tuple[str, Variant], float], view: View) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for (dataset, rung), own in by_rung.items():
        gain = relative(by_rung, dataset, rung)
        rows.append(
            (
                view.platform.name,
                view.reading if rung is LADDER[0] else None,
                dataset,
                rung.label,
                rung.is_ours,
                gain.mean,
                gain.half_width,
                over_repeats(own, "throughput_tok_s").mean,
                over_repeats(own, "e2el_s", "mean").mean,
                over_repeats(own, "e2el_s", "p99").mean,
                over_repeats(own, "mean_running").mean,
                own[0].record.manifest.get("facts", {}).get("kv_rows") if own else None,
                printed.get((dataset, rung)),
                obtained_text(own),
                all(run.validity.valid for run in own),
            )
        )
    return rows


def _table_row(
    key: tuple[str, Variant], own: tuple[StoredRun, ...], by_rung: Runs, printed: dict[tuple[str, Variant], float]
) -> tuple[str, ...]:
    dataset, rung = key
    gain, paper = relative(by_rung, dataset, rung).mean, printed.get(key)
    return (
        dataset_title(dataset),
        rung.label + (" (ours)" if rung.is_ours else ""),
        _text(over_repeats(own, "throughput_tok_s").mean),
        "-" if gain is None else f"{gain:.2f}x",
        "-" if paper is None else f"{paper:.2f}x",
        _text(over_repeats(own, "e2el_s", "mean").mean),
        _text(over_repeats(own, "mean_running").mean),
        obtained_text(own),
        validity_text(own),
    )


def _monotone_notes(by_rung: Runs) -> list[str]:
    notes = []
    for dataset in DATASETS:
        gains = [(rung, relative(by_rung, dataset, rung).mean) for rung in LADDER]
        falls = [
            f"{after.label[2:]} ({later / earlier:.3f}x)"
            for (_, earlier), (after, later) in pairwise(gains)
            if earlier is not None and later is not None and later < earlier
        ]
        if falls:
            notes.append(f"Not monotone on {dataset_title(dataset)}: {', '.join(falls)} below the rung before.")
    return notes


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
