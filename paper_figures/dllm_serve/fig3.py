"""dLLM-Serve Figure 3: throughput against arrival rate."""

from collections.abc import Iterator, Sequence

from paper_figures.common.caption import dataset_title
from paper_figures.common.figure import Page
from paper_figures.common.panel import Layer, Points
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import GUIDE_COLOR, Look, system_look
from paper_figures.common.words import number, said
from paper_figures.dllm_serve import comparison, rates
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS, SYSTEMS, look_of, rate_cells
from paper_figures.dllm_serve.curve import THROUGHPUT, Curve, Curves, curves_of, gains_of
from paper_figures.dllm_serve.layout import CARD, PAPER, TABLE_4_CARD, comparison_figure, printed_in, table4_rows
from paper_figures.dllm_serve.rates import PaperValue
from repro.reports.claims import Finding
from repro.reports.figures import SINGLE_REFRESH, View
from repro.runs.cell import Cell

SOURCE = f"{PAPER}, Figure 3, §6.2"
TABLE_4_RATE = 1.0
SERVED = Measure(path="request_throughput")


def cells(view: View) -> list[Cell]:
    return rate_cells(view, view.dllm.rates_of)


def page(runs: Runs) -> Page:
    curves, paper = curves_of(runs), paper_peaks(runs.view)
    sentences = [
        *(printed_sentences(paper, runs.view) if paper else []),
        "Throughput: tokens of finished requests over the time from first arrival to last finish. "
        "Offered load: nominal rate x tokens per request; the arrivals drawn can be a little faster or slower.",
    ]
    return Page(
        csv=rates.csv_of(curves, paper, THROUGHPUT, runs.view),
        picture=rates.picture(rates.panels(curves, THROUGHPUT, paper, guides=offered_load), curves, sentences),
        notes=[*ratio_notes(curves, paper), *saturation_notes(curves)],
    )


def printed_sentences(paper: Sequence[PaperValue], view: View) -> list[str]:
    if paper[0].rate is None:
        values = ", ".join(
            f"{dataset_title(value.dataset)} {system_look(value.system).title} {value.value:g}" for value in paper
        )
        drawn = f"Dotted: the paper's peaks, printed in {SOURCE}, across the panel because it prints no rates ({values} tok/s)."
    else:
        drawn = f"Hollow: the paper's Table 4, at its {TABLE_4_RATE:g} req/s."
    fitted = "Where the calibration was fitted on one of them, meeting it is no prediction."
    return [drawn, *rates.none_printed(paper), *([fitted] if view.obtained == "simulated" else [])]


def paper_peaks(view: View) -> list[PaperValue]:
    """Return the peaks that the paper's text prints, and Table 4 on its card. The figure's other points are not in the text."""
    if view.platform.name == TABLE_4_CARD:
        return table4_values("throughput_tok_s")
    values = printed_in("fig3") if view.platform.name == CARD else {}
    return [
        PaperValue(dataset=dataset, system=system.lower(), rate=None, value=float(value))
        for dataset in DATASETS
        for system, value in values.get(f"{dataset_title(dataset)}_peak", {}).items()
    ]


def table4_values(column: str) -> list[PaperValue]:
    """Return the values that Table 4 prints, all at one rate."""
    return [
        PaperValue(dataset=dataset, system=system, rate=TABLE_4_RATE, value=float(row[column]))
        for (dataset, system), row in table4_rows().items()
    ]


def offered_load(curves: Sequence[Curve], limits: tuple[float, float]) -> list[Layer]:
    lengths = [curve.gen_length(rate) for curve in curves for rate in curve.by_rate]
    per_request = sum(lengths) / len(lengths)
    look = Look(color=GUIDE_COLOR, marker="", linestyle="--")
    loads = [rate * per_request for rate in limits]
    return [Points(label="offered load", places=limits, values=loads, look=look, width=1, zorder=1)]


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    curves, view = curves_of(runs), runs.view
    peaks = {name: curve.peak for name, curve in curves.by_name.items()}
    peak = {name: point[1] for name, point in peaks.items() if point is not None}
    if len(peak) < len(DATASETS) * len(SYSTEMS):
        return []
    gains = {dataset: number(gain) for dataset, gain in gains_of(curves).items()}
    labels, top_rate = comparison.labels(view), max(view.dllm.rates)
    best_dataset = max(DATASETS, key=gains.__getitem__)
    served = {
        system: max(SERVED(run) or 0.0 for run in curves.by_name["burst", system].runs if run.validity.valid)
        for system in SYSTEMS
    }
    running = [curve.last_runs[0].summary["mean_running"] for curve in curves.all if curve.system == OURS]
    over_fast = number(curves.versus("burst", OURS, "fast-dllm", THROUGHPUT))
    rising = [dataset_title(curve.dataset) for curve in curves.all if curve.system == OURS and not curve.is_saturated]
    caveat = f", not saturated on {' and '.join(rising)}" if rising else ""
    up_to, by_data = f"peak over rates up to {top_rate:g} req/s", tuple(labels.values())
    over_best, at_most = f"peak over the best baseline's{caveat}", "at most, Burst"
    rows: list[tuple[str, float | tuple[float, ...], str, tuple[str, ...]]] = [
        ("dllm-abs-tput-4090", tuple(gains.values()), f"{over_best}, by data set", by_data),
        ("dllm-contrib-upto", gains[best_dataset], f"{over_best}, most of the data sets", (labels[best_dataset],)),
        ("dllm-concl-tput", gains[best_dataset], f"{over_best}, most of the data sets", (labels[best_dataset],)),
        ("dllm-4090-burst-peak", peak["burst", OURS], up_to, ()),
        ("dllm-4090-burst-fast", peak["burst", "fast-dllm"], up_to, ()),
        ("dllm-4090-burst-ratio", over_fast, "ratio of the two peaks", ()),
        ("dllm-4090-sparse-inferred", peak["burst", "sparse-dllm"], up_to, ()),
        (
            "dllm-wall-025",
            max(served[system] for system in BASELINES),
            f"requests/s the best baseline serves {at_most}",
            (),
        ),
        ("dllm-linear-04", served[OURS], f"requests/s dLLM-Serve serves {at_most}", ()),
        (
            "dllm-serve-best-tput",
            tuple(comparison.ranks_of(peak).values()),
            f"rank of dLLM-Serve's peak throughput, by data set{caveat}",
            by_data,
        ),
        (
            "dllm-concurrency-target",
            min(running),
            f"requests in flight, mean over time at {top_rate:g} req/s, least of the data sets",
            (),
        ),
    ]
    return [*(runs.finding(claim, value, how, of=of) for claim, value, how, of in rows), comparison.token_cap(runs)]


# -- table and notes ----------------------------------------------------------------------------------------


def ratio_text(curve: Curve, curves: Curves, ours: str = OURS) -> str:
    """Peak of dLLM-Serve, or of its variant, over that of ``curve``, for the same data set."""
    if curve.system == ours:
        return "-"
    ratio = curves.versus(curve.dataset, ours, curve.system, THROUGHPUT)
    return "-" if ratio.mean is None else said(ratio, "x", 2)


def ratio_notes(curves: Curves, paper: Sequence[PaperValue]) -> Iterator[str]:
    by_pair: dict[tuple[str, str], list[str]] = {}
    for contender in (OURS, SINGLE_REFRESH):
        for curve in curves.all:
            if (text := ratio_text(curve, curves, contender)) != "-":
                key = (look_of(contender).title, curve.label)
                by_pair.setdefault(key, []).append(f"{text} ({dataset_title(curve.dataset)})")
    for (title, label), ratios in by_pair.items():
        yield f"Peak throughput of {title} over {label}: {', '.join(ratios)}."
    for dataset in dict.fromkeys(value.dataset for value in paper):
        printed = {value.system: value.value for value in paper if value.dataset == dataset}
        ours = printed.pop(OURS)
        for system, value in printed.items():
            yield f"Paper, {dataset_title(dataset)}: {ours / value:.2f}x over {system_look(system).title}."


def saturation_notes(curves: Curves) -> Iterator[str]:
    rising = [
        f"{dataset_title(curve.dataset)} {curve.label}"
        for curve in curves.all
        if curve.usable(THROUGHPUT) and not curve.is_saturated
    ]
    if rising:
        yield f"Not saturated at the highest rate, so its peak may lie higher: {', '.join(rising)}."


FIGURE = comparison_figure("fig3", SOURCE, page=page, cells=cells, findings=findings)
