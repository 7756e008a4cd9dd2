"""A row of panels, one per data set: a measure of every system against the arrival rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.common.caption import (
    batch_sentence,
    curves_obtained,
    held_out_note,
    invalid_notes,
    missing_note,
    prompt_sources,
    require_runs,
    seeds_sentence,
)
from paper_figures.common.comparison import Comparison
from paper_figures.common.curve import Curve, Measure, curve_of, dataset_title
from repro.reports.figures import View
from repro.runs.store import StoredRun
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CSV_COLUMNS = (
    "platform",
    "reading",
    "dataset",
    "system",
    "batch_size",
    "rate_req_s",
    "seed",
    "throughput_tok_s",
    "mean_latency_s",
    "p50_latency_s",
    "p99_latency_s",
    "std_latency_s",
    "span_latency_s",
    "outside_forward_share",
    "num_requests",
    "obtained",
    "valid",
    "run_folder",
)

MIN_TICK_GAP = 0.1
"""Least distance, as a share of the axis, at which two rates have a tick each."""


@dataclass(frozen=True, kw_only=True)
class PaperValue:
    """A printed value, drawn hollow at its rate, or beside the panel's last one where none is printed; ``is_bound`` where
    only a lower bound is."""

    dataset: str
    system: str
    rate: float | None
    value: float
    is_bound: bool = False


def curves_of(comparison: Comparison, name: str, runs: Sequence[StoredRun], platform: Platform) -> list[Curve]:
    require_runs(name, runs, platform)
    return comparison.curves(runs)


def draw(
    comparison: Comparison,
    curves: Sequence[Curve],
    measure: Measure,
    paper: Sequence[PaperValue],
    out: Path,
    *,
    name: str,
    title: str,
    caption: Sequence[str],
    is_log: bool = False,
    finish: Callable[[Axes, Sequence[Curve]], None] = lambda axes, curves: None,
) -> tuple[Path, Path, Path]:
    """PNG, PDF and caption. ``finish`` adds what only one figure has to a panel."""
    with style.drawing():
        figure, panels = style.row_of_panels([dataset_title(dataset) for dataset in comparison.datasets])
        for axes, dataset in zip(panels, comparison.datasets, strict=True):
            own = [curve for curve in curves if curve.dataset == dataset]
            _draw_panel(axes, own, measure, [value for value in paper if value.dataset == dataset], is_log)
            axes.set_xlabel("arrival rate (req/s)")
            if own:
                finish(axes, own)
        panels[0].set_ylabel(measure.label)
        return style.publish(figure, panels, out, name, title=title, caption=caption)


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], measure: Measure, paper: Sequence[PaperValue], is_log: bool
) -> None:
    if not curves:
        axes.text(0.5, 0.5, "no runs stored", transform=axes.transAxes, ha="center", color=style.GUIDE_COLOR)
        return
    rates = [point.rate for curve in curves for point in curve.points]
    ends = [
        interval.mean + side * (interval.half_width or 0.0)
        for curve in curves
        for _, interval in curve.usable(measure)
        if interval.mean is not None
        for side in (-1, 0, 1)
    ]
    ends = [end for end in (*ends, *(value.value for value in paper)) if end > 0 or not is_log]
    span = max(rates) - min(rates) or max(rates)
    margin = 0.24 if any(value.rate is None for value in paper) else 0.1
    axes.set_xlim(max(0.0, min(rates) - 0.08 * span), max(rates) + margin * span)
    ticks = sorted(set(rates))
    if all(after - before >= MIN_TICK_GAP * span for before, after in pairwise(ticks)):
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    if is_log and ends:
        style.log_scale(axes)
        axes.set_ylim(min(ends) / 1.4, 1.6 * max(ends))
    else:
        axes.set_ylim(0, 1.15 * max(ends, default=0) or 1)
    for curve in curves:
        _draw_curve(axes, curve, measure)
    for value in paper:
        look = style.system_look(value.system)
        if value.is_bound:
            axes.axhline(
                value.value,
                linestyle=(0, (1, 3)),
                linewidth=1,
                color=look.color,
                zorder=1,
                label=f"{look.title} (paper, above)",
            )
            continue
        place = max(rates) + 0.14 * span if value.rate is None else value.rate
        label = f"{look.title} (paper)"
        style.paper_marker(axes, place, value.value, color=look.color, marker=look.marker, label=label)


def _draw_curve(axes: Axes, curve: Curve, measure: Measure) -> None:
    look = style.system_look(curve.system)
    usable = curve.usable(measure)
    spread = [interval.half_width or 0.0 for _, interval in usable]
    means = [interval.mean or 0.0 for _, interval in usable]
    axes.errorbar(
        [rate for rate, _ in usable],
        means,
        yerr=spread if any(spread) else None,
        marker=look.marker,
        capsize=2,
        color=look.color,
        label=curve.label,
        zorder=3,
    )
    invalid = [
        (point.rate, value)
        for point in curve.points
        for run in point.runs
        if not run.validity.valid and (value := measure.of(run)) is not None
    ]
    if invalid:
        axes.plot(
            *zip(*invalid, strict=True),
            linestyle="none",
            marker="x",
            markersize=7,
            markeredgewidth=1.8,
            color=look.color,
            label=f"{curve.label}, INVALID run",
            zorder=5,
        )


def caption(curves: Sequence[Curve], lead: Sequence[str], rest: Sequence[str] = ()) -> list[str]:
    """What every such figure says of itself between ``lead``, which stands under the panels, and ``rest``."""
    runs = [run for curve in curves for point in curve.points for run in point.runs]
    lengths = sorted({point.gen_length for curve in curves for point in curve.points})
    found = [
        *lead,
        seeds_sentence(runs),
        *rest,
        prompt_sources(runs),
        f"{' and '.join(f'{length:g}' for length in lengths)} tokens generated per request.",
        *curves_obtained(curves),
    ]
    if batches := batch_sentence(curves):
        found.append(batches)
    if invalid := sum(not run.validity.valid for run in runs):
        found.insert(0, f"x: {invalid} INVALID of {len(runs)} runs, not joined by the line.")
    return found


def save_csv(
    comparison: Comparison,
    curves: Sequence[Curve],
    paper: Sequence[PaperValue],
    measure: Measure,
    view: View,
    out: Path,
    name: str,
) -> Path:
    """A reading is one of the baselines'."""
    rows = [
        _csv_row(run, view, None if curve.system == comparison.own else view.reading)
        for curve in curves
        for point in curve.points
        for run in point.runs
    ]
    for value in paper:
        known: dict[str, object] = {
            "platform": view.platform.name,
            "dataset": value.dataset,
            "system": value.system,
            measure.column: value.value,
            "obtained": "paper",
        }
        rows.append(tuple(known.get(column) for column in CSV_COLUMNS))
    return style.save_csv(out / f"{name}.csv", CSV_COLUMNS, rows)


def _csv_row(run: StoredRun, view: View, reading: str | None) -> tuple[object, ...]:
    cell, latency = run.cell, run.summary["e2el_s"]
    return (
        view.platform.name,
        reading,
        cell.dataset,
        cell.system,
        run.facts.get("batch_size"),
        cell.rate,
        cell.seed,
        run.summary["throughput_tok_s"],
        latency["mean"],
        latency["p50"],
        latency["p99"],
        latency["std"],
        latency["span"],
        run.summary["outside_forward_share"],
        run.num_requests,
        run.obtained,
        run.validity.valid,
        cell.folder_name,
    )


def notes(comparison: Comparison, curves: Sequence[Curve], view: View, rates: Sequence[float]) -> list[str]:
    """What is wrong or missing, and how good the simulation is where it can be checked."""
    runs = [run for curve in curves for point in curve.points for run in point.runs]
    asked = [
        (dataset, system, rate) for dataset in comparison.datasets for system in comparison.systems for rate in rates
    ]
    missing = []
    for dataset, system, rate in asked:
        curve = curve_of(curves, dataset, system)
        point = None if curve is None else curve.at(rate)
        if point is None or len(point.runs) < view.num_runs:
            missing.append(f"{dataset_title(dataset)} {style.system_look(system).title} at {rate:g} req/s")
    found = [*invalid_notes(runs), *missing_note(missing, len(asked)), *curves_obtained(curves)]
    if any(run.record.obtained == "simulated" for run in runs):
        found += held_out_note(view.platform)
    return found
