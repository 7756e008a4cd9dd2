"""Panels in a row, one per data set: a measure of every system against the arrival rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paper_figures.common.caption import dataset_title, prompt_sources
from paper_figures.common.figure import Columns, Picture, Table
from paper_figures.common.panel import Axis, Guide, Layer, Line, Mark, Panel, Points, Text
from paper_figures.common.runs import Measure
from paper_figures.common.style import system_look
from paper_figures.dllm_serve.comparison import DATASETS, OURS, contender_of
from paper_figures.dllm_serve.curve import (
    LONGEST_WAIT,
    MEAN_LATENCY,
    P99_LATENCY,
    THROUGHPUT,
    Curve,
    Curves,
    batch_sentence,
    per_processor_second,
)
from repro.reports.figures import View
from repro.runs.statistics import Interval, from_logarithms, mean_interval
from repro.runs.store import StoredRun

BESIDE = 0.012
"""Lines are shifted apart by this share of the axis, so that equal systems do not hide each other."""
MIN_TICK_GAP = 0.17
"""The smallest distance between two named ticks, as a share of the axis."""
RUN_COLUMNS: Columns[StoredRun] = {
    "dataset": lambda run: run.cell.dataset,
    "system": lambda run: contender_of(run.cell),
    "batch_size": lambda run: run.facts.get("batch_size"),
    "rate_req_s": lambda run: run.cell.rate,
    "seed": lambda run: run.cell.seed,
    "throughput_tok_s": THROUGHPUT,
    "mean_latency_s": MEAN_LATENCY,
    "p50_latency_s": Measure(path="e2el_s/p50"),
    "p99_latency_s": P99_LATENCY,
    "longest_wait_s": LONGEST_WAIT,
    "std_latency_s": Measure(path="e2el_s/std"),
    "span_latency_s": Measure(path="e2el_s/span"),
    "outside_forward_share": Measure(path="outside_forward_share"),
    "tokens_per_processor_s": per_processor_second,
    "num_requests": lambda run: run.num_requests,
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run_folder": lambda run: run.cell.folder_name,
}
CSV_COLUMNS = ("platform", "reading", *RUN_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class PaperValue:
    """A printed value, hollow at its rate; dotted across the panel without a rate, or if it is a lower bound (``is_bound``)."""

    dataset: str
    system: str
    rate: float | None
    value: float
    is_bound: bool = False

    def layer(self) -> Layer:
        look = system_look(self.system)
        if self.rate is not None and not self.is_bound:
            name = f"{self.rate:g}"
            return Mark(label=f"{look.title} (paper)", place=self.rate, value=self.value, look=look, size=7, name=name)
        label = f"{look.title} (paper{', above' if self.is_bound else ': peak'})"
        return Guide(
            value=self.value, label=label, is_printed=True, linestyle=(0, (1, 2)), color=look.color, width=1.4, zorder=1
        )


def panels(
    curves: Curves,
    measure: Measure,
    paper: Sequence[PaperValue],
    *,
    is_log: bool = False,
    guides: Callable[[Sequence[Curve], tuple[float, float]], list[Layer]] = lambda curves, limits: [],
) -> list[Panel]:
    """``guides`` returns layers that only one figure has, from a panel's curves and the limits of the rates."""
    drawn: list[Panel] = []
    for dataset in DATASETS:
        shown = [curve for curve in curves.all if curve.dataset == dataset]
        printed = [value for value in paper if value.dataset == dataset]
        x, y, layers = Axis(), Axis(), list[Layer]()
        if shown:
            rates = sorted({rate for curve in shown for rate in curve.by_rate})
            span = rates[-1] - rates[0] or rates[-1]
            ends = (max(0.0, rates[0] - 0.08 * span), rates[-1] + 0.1 * span)
            x = Axis(limits=ends, ticks=rates, names=_tick_names(rates))
            y = _heights(shown, measure, printed, is_log=is_log)
            for index, curve in enumerate(shown):
                shift = BESIDE * (index - (len(shown) - 1) / 2) * span
                layers += _curve(curve, measure, shift, is_log=is_log)
            layers += [value.layer() for value in printed]
            layers += guides(shown, ends)
        drawn.append(
            Panel(
                title=dataset_title(dataset),
                layers=layers or [Text(text="no runs stored")],
                x=replace(x, label="arrival rate (req/s)"),
                y=replace(y, label=measure.label, better=measure.better),
            )
        )
    return drawn


def _tick_names(rates: Sequence[float]) -> list[str]:
    """Name each rate that lies far enough below the next named one. The highest rate is always named."""
    names, above = list[str](), math.inf
    for rate in reversed(rates):
        is_far = above - rate >= MIN_TICK_GAP * (rates[-1] - rates[0])
        names.append(f"{rate:g}" if is_far else "")
        above = rate if is_far else above
    return names[::-1]


def none_printed(paper: Sequence[PaperValue]) -> list[str]:
    """Tell which panels have no value from the paper."""
    missing = [dataset_title(dataset) for dataset in DATASETS if dataset not in {value.dataset for value in paper}]
    return [f"The paper's text states no value of {' and '.join(missing)}."] if missing else []


def _heights(curves: Sequence[Curve], measure: Measure, paper: Sequence[PaperValue], *, is_log: bool) -> Axis:
    """Fit the axis to all intervals and printed values, with free space above."""
    ends = [value.value for value in paper]
    for curve in curves:
        for interval in _points(curve, measure, is_log=is_log).values():
            mean, (below, above) = interval.mean or 0.0, interval.arms
            ends += [mean - below, mean, mean + above]
    positive = [end for end in ends if end > 0]
    if is_log and positive:
        return Axis(scale="plain log", limits=(min(positive) / 1.4, 1.6 * max(positive)))
    return Axis(limits=(0, 1.15 * max(ends, default=0) or 1))


def _points(curve: Curve, measure: Measure, *, is_log: bool) -> dict[float, Interval]:
    """Return means by rate. On a logarithmic axis they and their intervals are geometric, so that none reaches below zero."""
    means = curve.usable(measure)
    if not is_log:
        return means
    values = {rate: list(curve.values(rate, measure).values()) for rate in means}
    return {
        rate: from_logarithms(mean_interval([math.log(value) for value in sample])) if min(sample) > 0 else means[rate]
        for rate, sample in values.items()
    }


def _curve(curve: Curve, measure: Measure, by: float, *, is_log: bool) -> list[Layer]:
    """Draw valid runs as a line and invalid ones as crosses, shifted by ``by`` from their rates."""
    usable = _points(curve, measure, is_log=is_log)
    places = [rate + by for rate in usable]
    names = [f"{rate:g}" for rate in usable]
    line = Line(label=curve.label, places=places, at=list(usable.values()), look=curve.look, zorder=3, names=names)
    invalid = [
        (rate + by, value)
        for rate, runs in curve.by_rate.items()
        for run in runs
        if not run.validity.valid and (value := measure(run)) is not None
    ]
    crosses = Points(
        label=f"{curve.label}, INVALID run",
        places=[rate for rate, _ in invalid],
        values=[value for _, value in invalid],
        look=replace(curve.look, marker="x", linestyle="none"),
        size=7,
        edge=1.8,
        zorder=5,
    )
    return [line, crosses] if invalid else [line]


def picture(panels: Sequence[Panel], curves: Curves, sentences: Sequence[str]) -> Picture:
    """Make the picture; its caption has ``sentences``, and what every such figure says of itself."""
    invalid = sum(not run.validity.valid for run in curves.runs)
    lengths = sorted({curve.gen_length(rate) for curve in curves.all for rate in curve.by_rate})
    caption = [
        *([f"x: {invalid} INVALID of {len(curves.runs)} runs, not joined by the line."] if invalid else []),
        *sentences,
        "Lines lie a little beside each other.",
        prompt_sources(curves.runs),
        f"{' and '.join(f'{length:g}' for length in lengths)} tokens generated per request.",
        *batch_sentence(curves),
    ]
    return Picture(panels=panels, caption=caption)


def csv_of(curves: Curves, paper: Sequence[PaperValue], measure: Measure, view: View) -> Table:
    """Only rows of baselines have a reading."""
    rows: list[tuple[object, ...]] = []
    for run in curves.runs:
        reading = None if run.cell.system == OURS else view.reading
        rows.append((view.platform.name, reading, *(column(run) for column in RUN_COLUMNS.values())))
    for value in paper:
        fields: dict[str, object] = {
            "platform": view.platform.name,
            "dataset": value.dataset,
            "system": value.system,
            measure.column: value.value,
            "obtained": "paper",
        }
        rows.append(tuple(fields.get(column) for column in CSV_COLUMNS))
    return Table(columns=CSV_COLUMNS, rows=rows)
