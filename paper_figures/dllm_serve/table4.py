"""dLLM-Serve Table 4: latency and throughput at a high rate."""

from typing import Any

from paper_figures.common.caption import dataset_title, obtained_text, prompt_sources, validity_text
from paper_figures.common.figure import Columns, Page, table
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, said, shown, times
from paper_figures.dllm_serve import comparison, layout
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS, SYSTEMS
from paper_figures.dllm_serve.curve import (
    LONGEST_WAIT,
    MEAN_LATENCY,
    P99_LATENCY,
    THROUGHPUT,
    Curve,
    Curves,
    batch_sentence,
    curves_of,
    gains_of,
)
from paper_figures.dllm_serve.fig5 import cells
from repro.reports.claims import Finding
from repro.reports.figures import SINGLE_REFRESH, View
from repro.runs.statistics import Interval

CARD = layout.TABLE_4_CARD
BASE = "sparse-dllm"
"""Speedups are relative to it, as in the paper."""
ORDER = ("dllm-cache", "sparse-dllm", "fast-dllm", OURS, SINGLE_REFRESH)
"""Rows per data set in the paper's order, then our variant if it is compared."""
PAPER_ORDER = ("burst", "osc", "livebench")
"""Data sets by dLLM-Serve's printed throughput, the highest first."""


def page(runs: Runs) -> Page:
    view, curves = runs.view, curves_of(runs)
    rate, printed = max(view.dllm.rates), layout.table4_rows() if view.platform.name == CARD else {}
    rows = [
        (curve, printed.get((dataset, system), {}))
        for dataset in DATASETS
        for system in ORDER
        if (curve := curves.by_name.get((dataset, system))) is not None
    ]
    return Page(
        table=table(rows, in_text(curves)),
        csv=table(rows, in_csv(curves, view)),
        notes=[*layout.origin_of_compared(runs), prompt_sources(curves.runs), *batch_sentence(curves)],
        after_heading=f" - {view.platform.title}, {rate:g} req/s",
    )


Row = tuple[Curve, dict[str, Any]]
"""A curve, and the values that the paper prints for it."""


def in_csv(curves: Curves, view: View) -> Columns[Row]:
    return {
        "platform": lambda row: view.platform.name,
        "reading": lambda row: view.reading if row[0].system in BASELINES else None,
        "dataset": lambda row: row[0].dataset,
        "system": lambda row: row[0].system,
        "mean_latency_s": lambda row: row[0].last(MEAN_LATENCY).mean,
        "p99_latency_s": lambda row: row[0].last(P99_LATENCY).mean,
        "longest_wait_s": lambda row: row[0].last(LONGEST_WAIT).mean,
        "throughput_tok_s": lambda row: row[0].last(THROUGHPUT).mean,
        "speedup": lambda row: speedup(row[0], curves).mean,
        "speedup_low": lambda row: speedup(row[0], curves).low,
        "speedup_high": lambda row: speedup(row[0], curves).high,
        "paper_mean_latency_s": lambda row: row[1].get("avg_latency_s"),
        "paper_throughput_tok_s": lambda row: row[1].get("throughput_tok_s"),
        "paper_speedup": lambda row: row[1].get("speedup_vs_base_printed"),
        "num_runs": lambda row: len(row[0].last_runs),
        "obtained": lambda row: obtained_text(row[0].last_runs),
        "valid": lambda row: layout.all_valid(row[0].last_runs),
    }


def in_text(curves: Curves) -> Columns[Row]:
    return {
        "dataset": lambda row: dataset_title(row[0].dataset),
        "system": lambda row: row[0].label,
        "mean latency s": lambda row: said(row[0].last(MEAN_LATENCY), digits=2),
        "paper s": lambda row: shown(row[1].get("avg_latency_s"), "g"),
        "P99 s": lambda row: shown(row[0].last(P99_LATENCY).mean),
        "longest wait s": lambda row: shown(row[0].last(LONGEST_WAIT).mean),
        "throughput tok/s": lambda row: said(row[0].last(THROUGHPUT), digits=2),
        "paper tok/s": lambda row: shown(row[1].get("throughput_tok_s"), "g"),
        "speedup": lambda row: times(speedup(row[0], curves)),
        "paper speedup": lambda row: shown(row[1].get("speedup_vs_base_printed"), "g", "x"),
        "valid": lambda row: validity_text(row[0].last_runs),
    }


def speedup(curve: Curve, curves: Curves) -> Interval:
    return curves.versus(curve.dataset, curve.system, BASE, THROUGHPUT, curve.last_rate)


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    curves = curves_of(runs)
    suffix = f", {max(runs.view.dllm.rates):g} req/s"
    results = [*entries(runs, curves, suffix), *comparisons(runs, curves, suffix), *latencies(runs, curves, suffix)]
    ours = [curves.by_name[dataset, OURS] for dataset in PAPER_ORDER if (dataset, OURS) in curves.by_name]
    if len(ours) == len(DATASETS):
        sizes = tuple(float(sum(curve.last_runs[0].summary["num_requests"].values())) for curve in ours)
        how = "requests of the runs: a choice after the inferred ones, not a result"
        results.append(runs.finding("dllm-n-requests", sizes, how, obtained="computed"))
    return [*results, comparison.token_cap(runs)]


def entries(runs: Runs, curves: Curves, at: str) -> list[Finding]:
    """Findings on the table's own numbers."""
    results = []
    for curve in curves.all:
        latency, throughput, ratio = (
            curve.last(MEAN_LATENCY).mean,
            curve.last(THROUGHPUT).mean,
            speedup(curve, curves).mean,
        )
        if throughput is None or latency is None or ratio is None:
            continue
        claim = f"dllm-t4-{curve.dataset}-{'serve' if curve.system == OURS else curve.system}"
        results += [
            runs.finding(f"{claim}-lat", latency, f"mean over requests{at}"),
            runs.finding(f"{claim}-tput", throughput, f"tokens of finished requests over the window{at}"),
            runs.finding(f"{claim}-speedup", ratio, f"throughput over Sparse-dLLM's{at}"),
        ]
    return results


def comparisons(runs: Runs, curves: Curves, at: str) -> list[Finding]:
    means = {name: curve.last(THROUGHPUT).mean for name, curve in curves.by_name.items()}
    throughput = {name: mean for name, mean in means.items() if mean is not None}
    if len(throughput) < len(DATASETS) * len(SYSTEMS):
        return []
    labels, ours = comparison.labels(runs.view), {dataset: throughput[dataset, OURS] for dataset in DATASETS}
    order, by_data = sorted(DATASETS, key=lambda dataset: -ours[dataset]), tuple(labels.values())
    gains, ranks = (
        tuple(map(number, gains_of(curves, max(runs.view.dllm.rates)).values())),
        tuple(comparison.ranks_of(throughput).values()),
    )
    return [
        runs.finding("dllm-abs-tput-l40s", gains, f"over the best baseline, by data set{at}", of=by_data),
        runs.finding("dllm-serve-best-tput", ranks, f"rank of dLLM-Serve's throughput, by data set{at}", of=by_data),
        runs.finding(
            "dllm-t4-serve-order",
            tuple(ours[dataset] for dataset in PAPER_ORDER),
            f"dLLM-Serve's throughput{at}; here {' > '.join(map(dataset_title, order))}",
            of=tuple(labels[dataset] for dataset in PAPER_ORDER),
            holds=tuple(order) == PAPER_ORDER,
        ),
        runs.finding("dllm-l40s-burst", ours["burst"], f"Burst{at}"),
    ]


def latencies(runs: Runs, curves: Curves, at: str) -> list[Finding]:
    """Findings on a baseline's latency over dLLM-Serve's."""
    rows = (
        ("dllm-t4-livebench-lat-gain", "livebench", "fast-dllm", MEAN_LATENCY, "Fast-dLLM's mean latency", "LiveBench"),
        ("dllm-l40s-osc-lat-ratio", "osc", BASE, MEAN_LATENCY, "Sparse-dLLM's mean latency", "OSC"),
        ("dllm-abs-tail-latency", "osc", BASE, P99_LATENCY, "Sparse-dLLM's p99 latency", "OSC"),
    )
    results = []
    for claim, dataset, baseline, measure, label, title in rows:
        ratio = curves.versus(dataset, baseline, OURS, measure, max(runs.view.dllm.rates)).mean
        if ratio is not None:
            results.append(runs.finding(claim, ratio, f"{label} over dLLM-Serve's on {title}{at}"))
    return results


FIGURE = layout.dllm_figure(
    "table4",
    f"{layout.PAPER}, Table 4, §6.2",
    platforms=(CARD,),
    page=page,
    cells=cells,
    findings=findings,
    card=CARD,
    num_runs=layout.SIMULATED_RUNS,
)
