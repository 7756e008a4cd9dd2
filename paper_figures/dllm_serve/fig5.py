"""dLLM-Serve Figure 5 (§6.3): jitter under high load, as the gain over the best baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import rate_panels, style
from paper_figures.common.caption import (
    batch_sentence,
    curves_obtained,
    figure_title,
    invalid_notes,
    obtained_text,
    prompt_sources,
    seeds_sentence,
)
from paper_figures.common.curve import Curve, Measure, curve_of, dataset_title
from paper_figures.dllm_serve.comparison import BASELINES, COMPARISON, DATASETS, OURS, reading_sentence
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_figures
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig5"
TITLE = "dLLM-Serve Figure 5: jitter under high load"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 5, §6.3"
PLATFORMS = ("cpu-tiny", "rtx4090")
PAPER_PLATFORM = "rtx4090"
DECIDES_ON = (PAPER_PLATFORM,)

MEASURES = (
    Measure(column="std_latency_s", label="standard deviation", of=lambda run: run.summary["e2el_s"]["std"]),
    Measure(column="span_latency_s", label="tail span (max - min)", of=lambda run: run.summary["e2el_s"]["span"]),
)
COLORS = ("#0072B2", "#E69F00")
BAR_WIDTH = 0.36
CSV_COLUMNS = (
    "platform",
    "reading",
    "dataset",
    "measure",
    "dllm_serve_s",
    "best_baseline",
    "best_baseline_s",
    "gain",
    "gain_half_width",
    "obtained",
    "valid",
)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A spread of latencies: the best baseline's over dLLM-Serve's, by repeat; None where a run is missing or invalid."""

    dataset: str
    measure: Measure
    best: str | None
    ours_s: float | None
    best_s: float | None
    gain: Interval

    @property
    def reduction_percent(self) -> float | None:
        return None if self.gain.mean is None else 100 * (1 - 1 / self.gain.mean)


def cells(view: View) -> list[Cell]:
    """Runs of Figure 3 at its highest rate."""
    return COMPARISON.cells(NAME, view, (max(view.dllm.rates),))


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    gains = [gain_of(curves, dataset, measure) for dataset in DATASETS for measure in MEASURES]
    stem = f"{NAME}-{view.stem}"
    paper = paper_gains(view.platform)
    files = _draw(gains, curves, paper, view, out, stem)
    obtained, valid = obtained_text(runs), all(run.validity.valid for run in runs)
    rows: list[tuple[object, ...]] = [
        (
            view.platform.name,
            view.reading,
            gain.dataset,
            gain.measure.column,
            gain.ours_s,
            gain.best,
            gain.best_s,
            gain.gain.mean,
            gain.gain.half_width,
            obtained,
            valid,
        )
        for gain in gains
    ]
    rows += [
        (view.platform.name, None, dataset, column, None, None, None, value, None, "paper", None)
        for (dataset, column), value in paper.items()
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=(
            "dataset",
            "spread of",
            "dLLM-Serve s",
            "best baseline",
            "its s",
            "gain",
            "reduction",
            "paper",
            "obtained",
        ),
        rows=tuple(_table_row(gain, paper, obtained) for gain in gains),
        notes=(*invalid_notes(runs), *curves_obtained(curves), reading_sentence(view)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name != PAPER_PLATFORM or view.reading != "published":
        return []
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    obtained = view.obtained
    rate = max(view.dllm.rates)
    found = []
    reductions = {
        (dataset, measure.column): gain_of(curves, dataset, measure).reduction_percent
        for dataset in DATASETS
        for measure in MEASURES
    }
    for claim, column in (("dllm-jitter-sd", "std_latency_s"), ("dllm-jitter-span", "span_latency_s")):
        if (value := reductions["livebench", column]) is not None:
            how = f"against the best baseline on LiveBench at {rate:g} req/s"
            found.append(Finding(claim=claim, value=value, obtained=obtained, how=how))
    others = {
        f"{dataset}/{column.partition('_')[0]}": value
        for (dataset, column), value in reductions.items()
        if dataset != "livebench" and value is not None
    }
    if len(others) == 2 * len(MEASURES):
        how = f"standard deviation and span, percent below the best baseline, at {rate:g} req/s"
        found.append(
            Finding(
                claim="dllm-jitter-others", value=tuple(others.values()), obtained=obtained, how=how, of=tuple(others)
            )
        )
    cache = curve_of(curves, "burst", "dllm-cache")
    for claim, name in (("dllm-jitter-cache-min", "min"), ("dllm-jitter-cache-max", "max")):
        values = [] if cache is None else [run.summary["e2el_s"][name] for run in cache.points[-1].valid_runs]
        if values:
            how = f"dLLM-Cache on Burst at {rate:g} req/s"
            found.append(Finding(claim=claim, value=sum(values) / len(values), obtained=obtained, how=how))
    return found


def gain_of(curves: Sequence[Curve], dataset: str, measure: Measure) -> Gain:
    """The best baseline is the one with the least mean spread over the repeats."""
    spreads: dict[str, dict[int, float]] = {}
    for system in (OURS, *BASELINES):
        curve = curve_of(curves, dataset, system)
        runs = () if curve is None else curve.points[-1].valid_runs
        spreads[system] = {run.cell.seed: value for run in runs if (value := measure.of(run)) is not None}
    means = {system: sum(found.values()) / len(found) for system, found in spreads.items() if found}
    best = min((system for system in BASELINES if system in means), key=means.__getitem__, default=None)
    shared = sorted(spreads[OURS].keys() & spreads[best].keys()) if best else []
    ratios = [spreads[best][seed] / spreads[OURS][seed] for seed in shared if best and spreads[OURS][seed] > 0]
    return Gain(
        dataset=dataset,
        measure=measure,
        best=best,
        ours_s=means.get(OURS),
        best_s=means.get(best) if best else None,
        gain=mean_interval(ratios),
    )


def paper_gains(platform: Platform) -> dict[tuple[str, str], float]:
    """Bars that the text states as reductions; (data set, measure) -> gain."""
    if platform.name != PAPER_PLATFORM:
        return {}
    values = next(entry for entry in load_figures("dllm-serve") if entry.id == "dllm-serve/fig5").values
    return {
        (dataset, column): 1 / (1 - values[dataset_title(dataset)][key] / 100)
        for dataset in DATASETS
        if dataset_title(dataset) in values
        for column, key in (("std_latency_s", "sd_reduction_pct"), ("span_latency_s", "span_reduction_pct"))
    }


def _draw(
    gains: Sequence[Gain],
    curves: Sequence[Curve],
    paper: dict[tuple[str, str], float],
    view: View,
    out: Path,
    stem: str,
) -> tuple[Path, Path, Path]:
    rate = max(point.rate for curve in curves for point in curve.points)
    runs = [run for curve in curves for point in curve.points for run in point.runs]
    with style.drawing():
        figure, (axes,) = style.row_of_panels([f"at {rate:g} req/s"])
        for side, measure, color in zip((-1, 1), MEASURES, COLORS, strict=True):
            _draw_bars(axes, [gain for gain in gains if gain.measure is measure], paper, side, color)
        axes.axhline(1, linestyle="--", linewidth=1, color=style.GUIDE_COLOR, label="best baseline")
        axes.set_xticks(range(len(DATASETS)), [dataset_title(dataset) for dataset in DATASETS])
        axes.set_ylabel("gain over the\nbest baseline (x)")
        axes.margins(y=0.15)
        sentences = [
            "Gain: spread of end-to-end latencies of the baseline that spreads least, over dLLM-Serve's; above 1 dLLM-Serve "
            "spreads less.",
            reading_sentence(view),
            seeds_sentence(runs),
        ]
        if paper:
            sentences.insert(2, "Hollow diamonds: the paper's reductions, as gains.")
            sentences.append(f"The paper's reductions are stated in {SOURCE}.")
        sentences += [prompt_sources(runs), *curves_obtained(curves)]
        if batches := batch_sentence(curves):
            sentences.append(batches)
        title = figure_title(TITLE, runs, view)
        return style.publish(figure, [axes], out, stem, title=title, caption=sentences, width_inches=style.WIDE_INCHES)


def _draw_bars(axes: Axes, gains: Sequence[Gain], paper: dict[tuple[str, str], float], side: int, color: str) -> None:
    places = [x + side * BAR_WIDTH / 2 for x in range(len(gains))]
    spread = [gain.gain.half_width or 0.0 for gain in gains]
    axes.bar(
        places,
        [gain.gain.mean or 0.0 for gain in gains],
        BAR_WIDTH,
        yerr=spread if any(spread) else None,
        capsize=3,
        color=color,
        label=gains[0].measure.label,
    )
    for place, gain in zip(places, gains, strict=True):
        style.foot_label(axes, place, gain.gain.mean)
        if (value := paper.get((gain.dataset, gain.measure.column))) is not None:
            style.paper_marker(axes, place, value, color="black", marker="D", label="paper", size=7)


def _table_row(gain: Gain, paper: dict[tuple[str, str], float], obtained: str) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    printed = paper.get((gain.dataset, gain.measure.column))
    return (
        dataset_title(gain.dataset),
        gain.measure.label,
        seconds(gain.ours_s),
        "-" if gain.best is None else style.system_look(gain.best).title,
        seconds(gain.best_s),
        "-" if gain.gain.mean is None else f"{gain.gain.mean:.2f}x",
        "-" if gain.reduction_percent is None else f"{gain.reduction_percent:.0f} %",
        "-" if printed is None else f"{printed:.2f}x",
        obtained,
    )
