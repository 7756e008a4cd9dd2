"""dLLM-Serve Figure 5: jitter under high load."""

from collections.abc import Mapping
from dataclasses import dataclass

from paper_figures.common.caption import dataset_title, obtained_text, prompt_sources
from paper_figures.common.figure import Columns, Page, Picture, Table, table
from paper_figures.common.panel import Axis, Bars, Guide, Layer, Mark, Panel
from paper_figures.common.runs import Measure, Runs, paired
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS, look_of, ours_of, rate_cells
from paper_figures.dllm_serve.curve import Curves, batch_sentence, curves_of
from paper_figures.dllm_serve.layout import CARD, PAPER, PRINTED, all_valid, comparison_figure, printed_in
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

SOURCE = f"{PAPER}, Figure 5, §6.3"
STD = Measure(path="e2el_s/std", column="std_latency_s", label="standard deviation")
SPAN = Measure(path="e2el_s/span", column="span_latency_s", label="tail span (max - min)")
COLORS = {STD: "#0072B2", SPAN: "#E69F00"}
PRINTED_AS = {STD: "sd_reduction_pct", SPAN: "span_reduction_pct"}
GROUP_WIDTH = 0.72
"""Width of all bars of a data set together."""


@dataclass(frozen=True, kw_only=True)
class SpreadGain:
    """The best baseline's spread of latencies over dLLM-Serve's, by repeat; None if a run is missing or invalid."""

    dataset: str
    ours: str
    """dLLM-Serve, or its variant."""
    measure: Measure
    best: str | None
    ours_s: float | None
    best_s: float | None
    gain: Interval
    paper: float | None

    @property
    def reduction_percent(self) -> float | None:
        return None if self.gain.mean is None else 100 * (1 - 1 / self.gain.mean)


def cells(view: View) -> list[Cell]:
    """Return the runs of Figure 3 at its highest rate."""
    return rate_cells(view, lambda dataset: (max(view.dllm.rates),))


def gain_of(
    curves: Curves, dataset: str, ours: str, measure: Measure, paper: Mapping[tuple[str, Measure], float]
) -> SpreadGain:
    """Compare with the best baseline, which has the smallest mean spread over the repeats."""
    spreads: dict[str, dict[int, float]] = {}
    for system in (ours, *BASELINES):
        curve = curves.of(dataset, system)
        spreads[system] = curve.values(curve.last_rate, measure)
    means = {system: sum(values.values()) / len(values) for system, values in spreads.items() if values}
    best = min((system for system in BASELINES if system in means), key=means.__getitem__, default=None)
    our_spreads = dict(sorted(spreads[ours].items()))
    best_spreads = {seed: spreads[best][seed] for seed in our_spreads if best and seed in spreads[best]}
    return SpreadGain(
        dataset=dataset,
        ours=ours,
        measure=measure,
        best=best,
        ours_s=means.get(ours),
        best_s=means.get(best) if best else None,
        gain=paired(best_spreads, our_spreads, "ratio"),
        paper=paper.get((dataset, measure)) if ours == OURS else None,
    )


def gains_of(runs: Runs) -> list[SpreadGain]:
    curves, paper = curves_of(runs), paper_gains(runs.view)
    return [
        gain_of(curves, dataset, ours, measure, paper)
        for dataset in DATASETS
        for ours in ours_of(runs.view)
        for measure in COLORS
    ]


def paper_gains(view: View) -> dict[tuple[str, Measure], float]:
    """Return the bars that the text states as reductions."""
    values = printed_in("fig5") if view.platform.name == CARD else {}
    return {
        (dataset, measure): 1 / (1 - values[dataset_title(dataset)][PRINTED_AS[measure]] / 100)
        for dataset in DATASETS
        if dataset_title(dataset) in values
        for measure in COLORS
    }


def page(runs: Runs) -> Page:
    curves, gains, paper = curves_of(runs), gains_of(runs), paper_gains(runs.view)
    stated = f"Hollow diamonds: the paper's reductions, as gains, stated in {SOURCE}, on LiveBench alone."
    caption = [
        "Gain: spread of end-to-end latencies of the baseline that spreads least, over dLLM-Serve's; above 1 dLLM-Serve "
        "spreads less.",
        *([stated] if paper else []),
        prompt_sources(curves.runs),
        *batch_sentence(curves),
    ]
    measured = table(gains, columns(runs))
    name, rows = runs.view.platform.name, list(measured.rows)
    for (dataset, measure), value in paper.items():
        rows.append((name, None, dataset, OURS, measure.column, *[None] * 3, value, *[None] * 2, "paper", None))
    return Page(
        table=Table(columns=measured.columns, rows=rows),
        picture=Picture(panels=[panel(gains, max(curve.last_rate for curve in curves.all))], caption=caption),
    )


def columns(runs: Runs) -> Columns[SpreadGain]:
    return {
        "platform": lambda gain: runs.view.platform.name,
        "reading": lambda gain: runs.view.reading,
        "dataset": lambda gain: gain.dataset,
        "system": lambda gain: gain.ours,
        "measure": lambda gain: gain.measure.column,
        "dllm_serve_s": lambda gain: gain.ours_s,
        "best_baseline": lambda gain: gain.best,
        "best_baseline_s": lambda gain: gain.best_s,
        "gain": lambda gain: gain.gain.mean,
        "gain_low": lambda gain: gain.gain.low,
        "gain_high": lambda gain: gain.gain.high,
        "obtained": lambda gain: obtained_text(runs.all),
        "valid": lambda gain: all_valid(runs.all),
    }


def panel(gains: list[SpreadGain], rate: float) -> Panel:
    layers, marks = list[Layer](), list[Layer]()
    series = [(ours, measure) for ours in dict.fromkeys(gain.ours for gain in gains) for measure in COLORS]
    width = GROUP_WIDTH / len(series)
    for index, (ours, measure) in enumerate(series):
        series_gains = [gain for gain in gains if (gain.ours, gain.measure) == (ours, measure)]
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(series_gains))]
        is_variant = ours != OURS
        bars = Bars(
            label=f"{measure.label}, {look_of(ours).title}" if is_variant else measure.label,
            places=places,
            at=[gain.gain for gain in series_gains],
            width=width,
            color=COLORS[measure],
            hatch="///" if is_variant else None,
            edge="white" if is_variant else None,
            is_numbered=True,
        )
        layers.append(bars)
        marks += [
            Mark(label="paper", place=place, value=gain.paper, look=PRINTED, size=7)
            for place, gain in zip(places, series_gains, strict=True)
            if gain.paper is not None
        ]
    return Panel(
        title=f"at {rate:g} req/s",
        layers=[*layers, *marks, Guide(value=1, label="best baseline")],
        x=Axis(ticks=range(len(DATASETS)), names=list(map(dataset_title, DATASETS))),
        y=Axis(label="gain over the\nbest baseline (x)", better="higher", margin=0.15),
    )


def findings(runs: Runs) -> list[Finding]:
    rate, results = max(runs.view.dllm.rates), []
    reductions = {
        (gain.dataset, gain.measure): gain.reduction_percent
        for gain in gains_of(runs)
        if gain.ours == OURS and gain.reduction_percent is not None
    }
    for claim, measure in (("dllm-jitter-sd", STD), ("dllm-jitter-span", SPAN)):
        if (value := reductions.get(("livebench", measure))) is not None:
            how = f"against the best baseline on LiveBench at {rate:g} req/s"
            results.append(runs.finding(claim, value, how))
    others = {
        f"{dataset}/{measure.column.partition('_')[0]}": value
        for (dataset, measure), value in reductions.items()
        if dataset != "livebench"
    }
    if len(others) == 2 * len(COLORS):
        how = f"standard deviation and span, percent below the best baseline, at {rate:g} req/s"
        results.append(runs.finding("dllm-jitter-others", tuple(others.values()), how, of=tuple(others)))
    curves = curves_of(runs)
    for claim, name in (("dllm-jitter-cache-min", "min"), ("dllm-jitter-cache-max", "max")):
        value = curves.of("burst", "dllm-cache").last(Measure(path=f"e2el_s/{name}")).mean
        if value is not None:
            results.append(runs.finding(claim, value, f"dLLM-Cache on Burst at {rate:g} req/s"))
    return results


FIGURE = comparison_figure("fig5", SOURCE, page=page, cells=cells, findings=findings)
