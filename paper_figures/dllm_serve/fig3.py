"""dLLM-Serve Figure 3 (§6.2): throughput under increasing arrival rates, one panel per data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import rate_panels, style
from paper_figures.common.caption import figure_title, obtained_text, validity_text
from paper_figures.common.curve import THROUGHPUT, Curve, curve_of, dataset_title
from paper_figures.common.rate_panels import PaperValue
from paper_figures.dllm_serve.comparison import BASELINES, COMPARISON, DATASETS, OURS, reading_sentence
from paper_figures.dllm_serve.speedups import gains_of, labels, ranks_of, token_cap
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_figures
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig3"
TITLE = "dLLM-Serve Figure 3: throughput against arrival rate"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 3, §6.2"
PLATFORMS = ("cpu-tiny", "rtx4090")

PAPER_FIGURE = "dllm-serve/fig3"
PAPER_PLATFORM = "rtx4090"
"""The paper's card: its values are comparable there and nowhere else."""
DECIDES_ON = (PAPER_PLATFORM,)

TABLE_COLUMNS = ("dataset", "system", "peak tok/s", "at req/s", "dLLM-Serve is", "obtained", "valid")


def cells(view: View) -> list[Cell]:
    return COMPARISON.cells(NAME, view, view.dllm.rates)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    paper = paper_peaks(view.platform)
    stem = f"{NAME}-{view.stem}"
    lead, sentences = (
        [reading_sentence(view)],
        [
            "Throughput: tokens of finished requests over the time from first arrival to last finish. "
            "Offered load: nominal rate x tokens per request; the arrivals drawn can be a little faster or slower."
        ],
    )
    if paper:
        values = ", ".join(
            f"{dataset_title(value.dataset)} {style.system_look(value.system).title} {value.value:g}" for value in paper
        )
        lead.append(f"Hollow: the paper's peaks, beside the last rate because it prints no rates ({values} tok/s).")
        sentences.append(
            f"The paper's peaks are those printed in {SOURCE}. Where the calibration was fitted on one of them, meeting it "
            "is no prediction."
        )
    files = rate_panels.draw(
        COMPARISON,
        curves,
        THROUGHPUT,
        paper,
        out,
        name=stem,
        title=figure_title(TITLE, runs, view),
        caption=rate_panels.caption(curves, lead, sentences),
        finish=_offered_load,
    )
    rows = [_table_row(curve, curves) for curve in curves]
    return Rendered(
        files=(*files, rate_panels.save_csv(COMPARISON, curves, paper, THROUGHPUT, view, out, stem)),
        columns=TABLE_COLUMNS,
        rows=(*rows, *map(_table_paper_row, paper)),
        notes=tuple(_notes(curves, paper, view)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """Against the paper only on its card, and only baselines as published."""
    if view.platform.name != PAPER_PLATFORM or view.reading != "published":
        return []
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    obtained = view.obtained
    peaks = {(curve.dataset, curve.system): curve.peak for curve in curves}
    if any(peak is None for peak in peaks.values()) or len(peaks) < len(DATASETS) * (1 + len(BASELINES)):
        return []
    peak = {key: value[1] for key, value in peaks.items() if value is not None}
    gains = gains_of(peak)
    of = labels(view)
    most = max(DATASETS, key=gains.__getitem__)
    last = max(view.dllm.rates)
    served = {
        key: max(run.summary["request_throughput"] for point in curve.points for run in point.valid_runs)
        for curve in curves
        for key in [(curve.dataset, curve.system)]
    }

    def found(claim: str, value: float | tuple[float, ...], how: str, of: tuple[str, ...] = ()) -> Finding:
        return Finding(claim=claim, value=value, obtained=obtained, how=how, of=of)

    saturated = [curve.points[-1] for curve in curves if curve.system == OURS]
    over_fast = peak["burst", OURS] / peak["burst", "fast-dllm"]
    return [
        found(
            "dllm-abs-tput-4090",
            tuple(gains.values()),
            "peak over the best baseline's, by data set",
            tuple(of.values()),
        ),
        *(
            found(claim, gains[most], "peak over the best baseline's, most of the data sets", (of[most],))
            for claim in ("dllm-contrib-upto", "dllm-concl-tput")
        ),
        found("dllm-4090-burst-peak", peak["burst", OURS], f"peak over rates up to {last:g} req/s"),
        found("dllm-4090-burst-fast", peak["burst", "fast-dllm"], f"peak over rates up to {last:g} req/s"),
        found("dllm-4090-burst-ratio", over_fast, "ratio of the two peaks"),
        found("dllm-4090-sparse-inferred", peak["burst", "sparse-dllm"], f"peak over rates up to {last:g} req/s"),
        found(
            "dllm-wall-025",
            max(served["burst", system] for system in BASELINES),
            "requests/s the best baseline serves when saturated, Burst",
        ),
        found("dllm-linear-04", served["burst", OURS], "requests/s dLLM-Serve serves when saturated, Burst"),
        found(
            "dllm-serve-best-tput",
            tuple(ranks_of(peak).values()),
            "rank of dLLM-Serve's saturated throughput, by data set",
            tuple(of.values()),
        ),
        found(
            "dllm-concurrency-target",
            min(point.runs[0].summary["mean_running"] for point in saturated),
            f"requests in flight, mean over time at {last:g} req/s, least of the data sets",
        ),
        *token_cap(runs, view),
    ]


def paper_peaks(platform: Platform) -> tuple[PaperValue, ...]:
    """Peaks that the paper's text prints; the figure's other points are not in the text."""
    if platform.name != PAPER_PLATFORM:
        return ()
    figure = next(entry for entry in load_figures("dllm-serve") if entry.id == PAPER_FIGURE)
    return tuple(
        PaperValue(dataset=dataset, system=system.lower(), rate=None, value=float(value))
        for dataset in DATASETS
        for system, value in figure.values.get(f"{dataset_title(dataset)}_peak", {}).items()
    )


def _offered_load(axes: Axes, curves: Sequence[Curve]) -> None:
    lengths = [point.gen_length for curve in curves for point in curve.points]
    per_request = sum(lengths) / len(lengths)
    load = axes.get_xlim()
    axes.plot(
        load,
        [rate * per_request for rate in load],
        linestyle="--",
        linewidth=1,
        color=style.GUIDE_COLOR,
        label="offered load",
        zorder=1,
    )


# -- table and notes --------------------------------------------------------------------------------------


def _table_row(curve: Curve, curves: Sequence[Curve]) -> tuple[str, ...]:
    runs = [run for point in curve.points for run in point.runs]
    rate, throughput = curve.peak or (None, None)
    ratio = _ratio(curve, curves)
    return (
        dataset_title(curve.dataset),
        curve.label,
        "-" if throughput is None else f"{throughput:.1f}{'' if curve.is_saturated else ' (not saturated)'}",
        "-" if rate is None else f"{rate:g}",
        "-" if ratio is None else f"{ratio:.2f}x",
        obtained_text(runs),
        validity_text(runs),
    )


def _table_paper_row(value: PaperValue) -> tuple[str, ...]:
    title = style.system_look(value.system).title
    return (dataset_title(value.dataset), title, f"{value.value:g}", "not stated", "-", "paper", "-")


def _ratio(curve: Curve, curves: Sequence[Curve]) -> float | None:
    """Peak of dLLM-Serve over that of ``curve``, in the same panel."""
    ours = curve_of(curves, curve.dataset, OURS)
    if ours is None or ours is curve or ours.peak is None or curve.peak is None or curve.peak[1] <= 0:
        return None
    return ours.peak[1] / curve.peak[1]


def _notes(curves: Sequence[Curve], paper: Sequence[PaperValue], view: View) -> Iterable[str]:
    yield from _ratio_notes(curves, paper)
    yield from _saturation_notes(curves)
    yield from _outside_forward_notes(curves)
    yield from rate_panels.notes(COMPARISON, curves, view, view.dllm.rates)
    yield reading_sentence(view)


def _ratio_notes(curves: Sequence[Curve], paper: Sequence[PaperValue]) -> Iterable[str]:
    by_system: dict[str, list[str]] = {}
    for curve in curves:
        ratio = _ratio(curve, curves)
        if ratio is not None:
            by_system.setdefault(curve.label, []).append(f"{ratio:.2f}x ({dataset_title(curve.dataset)})")
    for label, ratios in by_system.items():
        yield f"Peak throughput of dLLM-Serve over {label}: {', '.join(ratios)}."
    for dataset in dict.fromkeys(value.dataset for value in paper):
        printed = {value.system: value.value for value in paper if value.dataset == dataset}
        ours = printed.pop(OURS)
        for system, value in printed.items():
            yield f"Paper, {dataset_title(dataset)}: {ours / value:.2f}x over {style.system_look(system).title}."


def _saturation_notes(curves: Sequence[Curve]) -> Iterable[str]:
    rising = [
        f"{dataset_title(curve.dataset)} {curve.label}"
        for curve in curves
        if curve.usable(THROUGHPUT) and not curve.is_saturated
    ]
    if rising:
        yield f"Not saturated at the highest rate, so its peak may lie higher: {', '.join(rising)}."


def _outside_forward_notes(curves: Sequence[Curve]) -> Iterable[str]:
    """Only where it was measured: a simulated step is all forward."""
    shares: dict[str, list[float]] = {}
    for curve in curves:
        for run in (run for point in curve.points for run in point.runs):
            share = run.summary["outside_forward_share"]
            if run.record.obtained == "measured" and share is not None:
                shares.setdefault(curve.label, []).append(share)
    if shares:
        texts = [f"{label} {100 * min(found):.1f} to {100 * max(found):.1f} %" for label, found in shares.items()]
        yield f"Share of step time outside the model's forward (measured): {', '.join(texts)}."
