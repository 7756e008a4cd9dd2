"""dLLM-Serve Figure 3 (§6.2): throughput under increasing arrival rates, one panel per data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import UserError
from paper_figures import style
from paper_figures.dllm_serve.caption import how_obtained, prompt_sources
from paper_figures.dllm_serve.curve import (
    DATASETS,
    Curve,
    PaperValue,
    Point,
    Series,
    dataset_title,
    load_curves,
    paper_peaks,
)
from repro import paths
from repro.cell import Cell
from repro.figures import Rendered
from repro.platforms import Platform
from repro.store import StoredRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig3"
TITLE = "dLLM-Serve Figure 3: throughput against arrival rate"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 3, §6.2"
PLATFORMS = ("cpu-tiny", "rtx4090")
SEED = 0

PAPER_FIGURE = "dllm-serve/fig3"
PAPER_PLATFORM = "rtx4090"
"""The paper's card: its values are comparable there and nowhere else."""

CSV_COLUMNS = (
    "platform", "dataset", "system", "batch_size", "rate_req_s", "throughput_tok_s", "mean_latency_s", "p50_latency_s",
    "p99_latency_s", "outside_forward_share", "num_requests", "obtained", "valid", "run_folder",
)  # fmt: skip
TABLE_COLUMNS = ("dataset", "system", "peak tok/s", "at req/s", "dLLM-Serve is", "obtained", "valid")


def cells(platform: Platform) -> list[Cell]:
    return [
        Cell(
            figure=NAME,
            system=series.system,
            dataset=dataset,
            platform=platform.name,
            executor=platform.executor,
            rate=rate,
            seed=SEED,
            knobs=() if series.batch_size is None else (("batch_size", series.batch_size),),
        )
        for dataset in DATASETS
        for series in _series(platform)
        for rate in platform.rates
    ]


def _series(platform: Platform) -> tuple[Series, ...]:
    both = (Series(system="dllm-serve"), Series(system="sparse-dllm"))
    # Its published code serves one request at a time; how much of the gap that is, only a large card's runs can say.
    return (*both, Series(system="sparse-dllm", batch_size=1)) if platform.name == PAPER_PLATFORM else both


def render(runs: Sequence[StoredRun], platform: Platform, out: Path) -> Rendered:
    if not runs:
        raise UserError(f"figure {NAME} on platform={platform.name!r} has no runs: run 'repro reproduce {NAME}' first")
    curves = load_curves(runs)
    paper = paper_peaks(PAPER_FIGURE) if platform.name == PAPER_PLATFORM else ()
    files = _draw(curves, paper, platform, out)
    rows = [_csv_row(point, platform) for curve in curves for point in curve.points]
    rows += [_csv_paper_row(value, platform) for value in paper]
    return Rendered(
        files=(*files, style.save_csv(out / f"{NAME}-{platform.name}.csv", CSV_COLUMNS, rows)),
        columns=TABLE_COLUMNS,
        rows=tuple([_table_row(curve, curves) for curve in curves] + [_table_paper_row(value) for value in paper]),
        notes=tuple(_notes(curves, paper, platform)),
    )


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(curves: Sequence[Curve], paper: Sequence[PaperValue], platform: Platform, out: Path) -> tuple[Path, Path]:
    with style.drawing():
        figure, panels = style.row_of_panels([dataset_title(name) for name in DATASETS])
        for axes, dataset in zip(panels, DATASETS, strict=True):
            own = [curve for curve in curves if curve.dataset == dataset]
            _draw_panel(axes, own, [value for value in paper if value.dataset == dataset])
            axes.set_xlabel("arrival rate (req/s)")
        panels[0].set_ylabel("throughput (tok/s)")
        title = f"{TITLE}\n{platform.title}"
        style.compose(figure, panels, title=title, caption=_caption(curves, paper), legend_columns=4)
        return style.save(figure, out, f"{NAME}-{platform.name}")


def _draw_panel(axes: Axes, curves: Sequence[Curve], paper: Sequence[PaperValue]) -> None:
    points = [point for curve in curves for point in curve.points]
    if not points:
        axes.text(0.5, 0.5, "no runs stored", transform=axes.transAxes, ha="center", color=style.GUIDE_COLOR)
        return
    rates = [point.rate for point in points]
    heights = [point.throughput or 0 for point in points] + [value.throughput for value in paper]
    span = max(rates) - min(rates) or max(rates)
    axes.set_xlim(max(0.0, min(rates) - 0.08 * span), max(rates) + 0.1 * span)
    axes.set_ylim(0, 1.15 * max(heights) or 1)

    per_request = sum(point.gen_length for point in points) / len(points)
    load = (axes.get_xlim()[0], axes.get_xlim()[1])
    axes.plot(load, [rate * per_request for rate in load], linestyle="--", linewidth=1, color=style.GUIDE_COLOR,
              label="offered load", zorder=1)  # fmt: skip
    for curve in curves:
        _draw_curve(axes, curve)
    for value in paper:
        look = style.system_look(value.system)
        axes.plot([max(rates)], [value.throughput], linestyle="none", marker=look.marker, markersize=8, fillstyle="none",
                  markeredgewidth=1.4, color=look.color, label=f"{look.title} (paper, peak)", zorder=4)  # fmt: skip
        axes.annotate(f"paper {value.throughput:g}", (max(rates), value.throughput), xytext=(0, 7), textcoords="offset points",
                      ha="center", fontsize=7, color=look.color)  # fmt: skip


def _draw_curve(axes: Axes, curve: Curve) -> None:
    look = style.system_look(curve.series.system)
    line = ":" if curve.series.batch_size is not None else "-"
    axes.plot([rate for rate, _ in curve.usable], [value for _, value in curve.usable], linestyle=line, marker=look.marker,
              color=look.color, label=curve.series.label, zorder=3)  # fmt: skip
    invalid = [(p.rate, p.throughput) for p in curve.points if not p.valid and p.throughput is not None]
    if invalid:
        axes.plot(*zip(*invalid, strict=True), linestyle="none", marker="x", markersize=7, markeredgewidth=1.8,
                  color=look.color, label=f"{curve.series.label}, INVALID run", zorder=5)  # fmt: skip


def _caption(curves: Sequence[Curve], paper: Sequence[PaperValue]) -> list[str]:
    points = [point for curve in curves for point in curve.points]
    lengths = sorted({point.gen_length for point in points})
    sentences = [
        *how_obtained(curves),
        "Prompts: " + "; ".join(prompt_sources(curves)) + ".",
        f"{' and '.join(f'{length:g}' for length in lengths)} tokens generated per request, seed {_seeds(points)}. "
        "Throughput: tokens of finished requests over the time from first arrival to last finish. "
        "Offered load: nominal rate x tokens per request; the arrivals drawn can be a little faster or slower.",
    ]
    batches = _batches(curves)
    if batches:
        sentences.append(f"Largest static batch: {batches}.")
    if paper:
        sentences.append(
            f"Hollow markers: peaks printed in {SOURCE}, whose rates it does not print; drawn at the highest rate. "
            "Where the calibration was fitted on one of them, meeting it is no prediction."
        )
    invalid = sum(not point.valid for point in points)
    if invalid:
        sentences.append(f"x: {invalid} INVALID of {len(points)} runs, not joined by the line.")
    return sentences


def _seeds(points: Iterable[Point]) -> str:
    return ", ".join(str(seed) for seed in sorted({point.run.cell.seed for point in points}))


def _batches(curves: Sequence[Curve]) -> str:
    texts = []
    for curve in curves:
        sizes = {size for point in curve.points if (size := point.used_batch_size) is not None}
        if sizes and curve.series.batch_size is None:
            texts.append(f"{dataset_title(curve.dataset)} {' or '.join(map(str, sorted(sizes)))}")
    return ", ".join(texts)


# -- CSV, table, notes ------------------------------------------------------------------------------------


def _csv_row(point: Point, platform: Platform) -> tuple[object, ...]:
    run, latency = point.run, point.run.summary["e2el_s"]
    return (
        platform.name, point.dataset, point.series.system, point.used_batch_size, point.rate, point.throughput, latency["mean"],
        latency["p50"], latency["p99"], run.summary["outside_forward_share"], run.record.num_requests, run.record.obtained,
        point.valid, run.cell.folder_name,
    )  # fmt: skip


def _csv_paper_row(value: PaperValue, platform: Platform) -> tuple[object, ...]:
    """The rate of a printed peak is not stated, so it stays empty here whatever the figure does."""
    known = {"platform": platform.name, "dataset": value.dataset, "system": value.system,
             "throughput_tok_s": value.throughput, "obtained": "paper"}  # fmt: skip
    return tuple(known.get(column) for column in CSV_COLUMNS)


def _table_row(curve: Curve, curves: Sequence[Curve]) -> tuple[str, ...]:
    invalid = sum(not point.valid for point in curve.points)
    obtained = sorted({point.run.record.obtained for point in curve.points})
    rate, throughput = curve.peak or (None, None)
    ratio = _ratio(curve, curves)
    return (
        dataset_title(curve.dataset),
        curve.series.label,
        "-" if throughput is None else f"{throughput:.1f}{'' if curve.is_saturated else ' (not saturated)'}",
        "-" if rate is None else f"{rate:g}",
        "-" if ratio is None else f"{ratio:.2f}x",
        ", ".join(obtained),
        "yes" if not invalid else f"{invalid} of {len(curve.points)} runs INVALID",
    )


def _table_paper_row(value: PaperValue) -> tuple[str, ...]:
    title = style.system_look(value.system).title
    return (dataset_title(value.dataset), title, f"{value.throughput:g}", "not stated", "-", "paper", "-")


def _ratio(curve: Curve, curves: Sequence[Curve]) -> float | None:
    """Peak of dLLM-Serve over that of ``curve``, in the same panel."""
    ours = next((c for c in curves if c.dataset == curve.dataset and c.series.system == "dllm-serve"), None)
    if ours is None or ours is curve or ours.peak is None or curve.peak is None or curve.peak[1] <= 0:
        return None
    return ours.peak[1] / curve.peak[1]


def _notes(curves: Sequence[Curve], paper: Sequence[PaperValue], platform: Platform) -> Iterable[str]:
    yield from _invalid_notes(curves)
    yield from _missing_notes(curves, platform)
    yield from _ratio_notes(curves, paper)
    yield from _saturation_notes(curves)
    yield from _outside_forward_notes(curves)
    yield from how_obtained(curves)
    if platform.gpu is not None and any(p.run.record.obtained == "simulated" for c in curves for p in c.points):
        yield _held_out_note(platform.gpu)


def _invalid_notes(curves: Sequence[Curve]) -> Iterable[str]:
    for curve in curves:
        for point in curve.points:
            if not point.valid:
                drawn = "" if point.throughput is not None else " (nothing to draw)"
                yield f"INVALID{drawn}: {point.run.cell.folder_name}: {'; '.join(point.run.validity.reasons)}"


def _missing_notes(curves: Sequence[Curve], platform: Platform) -> Iterable[str]:
    there = {(curve.dataset, curve.series, point.rate) for curve in curves for point in curve.points}
    asked = [(dataset, series, rate) for dataset in DATASETS for series in _series(platform) for rate in platform.rates]
    missing = [key for key in asked if key not in there]
    if missing:
        names = ", ".join(
            f"{dataset_title(dataset)} {series.label} at {rate:g} req/s" for dataset, series, rate in missing[:3]
        )
        yield f"{len(missing)} of {len(asked)} runs are missing: {names}{', ...' if len(missing) > 3 else ''}"


def _ratio_notes(curves: Sequence[Curve], paper: Sequence[PaperValue]) -> Iterable[str]:
    by_series: dict[Series, list[str]] = {}
    for curve in curves:
        ratio = _ratio(curve, curves)
        if ratio is not None:
            by_series.setdefault(curve.series, []).append(f"{ratio:.2f}x ({dataset_title(curve.dataset)})")
    for series, ratios in by_series.items():
        yield f"Peak throughput of dLLM-Serve over {series.label}: {', '.join(ratios)}."
    for dataset in dict.fromkeys(value.dataset for value in paper):
        printed = {value.system: value.throughput for value in paper if value.dataset == dataset}
        ours = printed.pop("dllm-serve")
        drawn = {curve.series.system for curve in curves}
        for system, value in printed.items():
            note = "" if system in drawn else "; that system was not run here, so this is no check of the ratios above"
            yield f"Paper, {dataset_title(dataset)}: {ours / value:.2f}x over {style.system_look(system).title}{note}."


def _saturation_notes(curves: Sequence[Curve]) -> Iterable[str]:
    rising = [
        f"{dataset_title(curve.dataset)} {curve.series.label}"
        for curve in curves
        if curve.usable and not curve.is_saturated
    ]
    if rising:
        yield f"Not saturated at the highest rate, so its peak may lie higher: {', '.join(rising)}."


def _outside_forward_notes(curves: Sequence[Curve]) -> Iterable[str]:
    """Only where it was measured: a simulated step is all forward."""
    shares: dict[str, list[float]] = {}
    for curve in curves:
        for point in curve.points:
            share = point.run.summary["outside_forward_share"]
            if point.run.record.obtained == "measured" and share is not None:
                shares.setdefault(curve.series.label, []).append(share)
    if shares:
        texts = [f"{label} {100 * min(found):.1f} to {100 * max(found):.1f} %" for label, found in shares.items()]
        yield f"Share of step time outside the model's forward (measured): {', '.join(texts)}."


def _held_out_note(card: str) -> str:
    """Errors on the stated numbers that the calibration was not fitted on, from ``repro calibrate``'s report."""
    path = paths.CALIBRATION / f"{card}-report.json"
    if not path.is_file():
        return f"No comparison of the {card} calibration with values it was not fitted on is stored: run 'repro calibrate'."
    try:
        held_out = [c for c in json.loads(path.read_text(encoding="utf-8"))["comparisons"] if c["role"] == "held out"]
        texts = [f"{c['what']} {float(c['error_percent']):+.1f} %" for c in held_out if c["error_percent"] is not None]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path.name} cannot be used ({type(error).__name__}: {error}): run 'repro calibrate' again"
        ) from error
    return f"Simulated against stated values that {card} was not fitted on: {'; '.join(texts) or 'none has a number'}."
