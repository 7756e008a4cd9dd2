"""dLLM-Serve Table 4 (§6.2): latency and throughput on the L40S at 1 req/s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paper_figures.common import rate_panels, style
from paper_figures.common.caption import batch_sentence, obtained_text, prompt_sources, seeds_sentence, validity_text
from paper_figures.common.curve import MEAN_LATENCY, THROUGHPUT, Curve, Measure, curve_of, dataset_title
from paper_figures.common.table import save_table
from paper_figures.dllm_serve.comparison import COMPARISON, DATASETS, OURS, reading_sentence
from paper_figures.dllm_serve.speedups import gains_of, labels, ranks_of, token_cap
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "table4"
TITLE = "dLLM-Serve Table 4: latency and throughput at a high rate"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Table 4, §6.2"
PLATFORMS = ("l40s",)
PAPER_PLATFORM = "l40s"
DECIDES_ON = (PAPER_PLATFORM,)

BASE = "sparse-dllm"
"""Speedups are over it, as the paper's."""

ORDER = ("dllm-cache", "sparse-dllm", "fast-dllm", "dllm-serve")
"""Rows per data set, as the paper's."""

PAPER_ORDER = ("burst", "osc", "livebench")
"""Data sets by dLLM-Serve's printed throughput, the highest first."""

CSV_COLUMNS = (
    "platform",
    "reading",
    "dataset",
    "system",
    "mean_latency_s",
    "throughput_tok_s",
    "speedup",
    "paper_mean_latency_s",
    "paper_throughput_tok_s",
    "paper_speedup",
    "num_runs",
    "obtained",
    "valid",
)
TABLE_COLUMNS = (
    "dataset",
    "system",
    "mean latency s",
    "paper s",
    "throughput tok/s",
    "paper tok/s",
    "speedup",
    "paper speedup",
    "valid",
)


def cells(view: View) -> list[Cell]:
    """Every system at the platform's highest rate, which on the paper's card is its 1 req/s."""
    return COMPARISON.cells(NAME, view, (max(view.dllm.rates),))


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    printed = paper_rows() if view.platform.name == PAPER_PLATFORM else {}
    stem = f"{NAME}-{view.stem}"
    rows, csv_rows = [], []
    for dataset in DATASETS:
        for system in ORDER:
            if (curve := curve_of(curves, dataset, system)) is None:
                continue
            own = curve.points[-1].runs
            latency, throughput = (_interval(curves, dataset, system, m) for m in (MEAN_LATENCY, THROUGHPUT))
            speedup = _ratio(curves, dataset, system)
            stated = printed.get((dataset, system), {})
            paper = (stated.get("avg_latency_s"), stated.get("throughput_tok_s"), stated.get("speedup_vs_base_printed"))
            valid = all(run.validity.valid for run in own)
            rows.append(
                (
                    dataset_title(dataset),
                    curve.label,
                    _text(latency),
                    _number(paper[0]),
                    _text(throughput),
                    _number(paper[1]),
                    "-" if speedup is None else f"{speedup:.2f}x",
                    "-" if paper[2] is None else f"{paper[2]:g}x",
                    validity_text(own),
                )
            )
            csv_rows.append(
                (
                    view.platform.name,
                    None if system == OURS else view.reading,
                    dataset,
                    system,
                    latency.mean,
                    throughput.mean,
                    speedup,
                    *paper,
                    len(own),
                    obtained_text(own),
                    valid,
                )
            )
    all_runs = [run for curve in curves for point in curve.points for run in point.runs]
    notes = [
        *rate_panels.notes(COMPARISON, curves, view, (max(view.dllm.rates),)),
        reading_sentence(view),
        prompt_sources(all_runs),
        seeds_sentence(all_runs),
    ]
    if batches := batch_sentence(curves):
        notes.append(batches)
    title = f"{TITLE} - {view.platform.title}, {max(view.dllm.rates):g} req/s"
    return save_table(
        out,
        stem,
        title=title,
        columns=TABLE_COLUMNS,
        rows=rows,
        notes=notes,
        csv_columns=CSV_COLUMNS,
        csv_rows=csv_rows,
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name != PAPER_PLATFORM or view.reading != "published":
        return []
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    throughput = {(d, s): _interval(curves, d, s, THROUGHPUT).mean for d in DATASETS for s in COMPARISON.systems}
    latency = {(d, s): _interval(curves, d, s, MEAN_LATENCY).mean for d in DATASETS for s in COMPARISON.systems}
    rate = max(view.dllm.rates)
    found: list[Finding] = []

    def add(claim: str, value: float | tuple[float, ...], how: str, of: tuple[str, ...] = ()) -> None:
        found.append(Finding(claim=claim, value=value, obtained=view.obtained, how=f"{how}, {rate:g} req/s", of=of))

    for dataset in DATASETS:
        for system in COMPARISON.systems:
            short = "serve" if system == OURS else system
            own, mean, base = throughput[dataset, system], latency[dataset, system], throughput[dataset, BASE]
            if own is None or mean is None or base is None:
                continue
            add(f"dllm-t4-{dataset}-{short}-lat", mean, "mean over requests")
            add(f"dllm-t4-{dataset}-{short}-tput", own, "tokens of finished requests over the window")
            add(f"dllm-t4-{dataset}-{short}-speedup", own / base, "throughput over Sparse-dLLM's")
    complete = {key: value for key, value in throughput.items() if value is not None}
    if len(complete) == len(throughput):
        of = tuple(labels(view).values())
        add("dllm-abs-tput-l40s", tuple(gains_of(complete).values()), "over the best baseline, by data set", of)
        add(
            "dllm-serve-best-tput",
            tuple(ranks_of(complete).values()),
            "rank of dLLM-Serve's throughput, by data set",
            of,
        )
        order = sorted(DATASETS, key=lambda dataset: -complete[dataset, OURS])
        found.append(
            Finding(
                claim="dllm-t4-serve-order",
                value=tuple(complete[dataset, OURS] for dataset in PAPER_ORDER),
                obtained=view.obtained,
                how=f"dLLM-Serve's throughput, {rate:g} req/s; here {' > '.join(map(dataset_title, order))}",
                of=tuple(labels(view)[dataset] for dataset in PAPER_ORDER),
                holds=tuple(order) == PAPER_ORDER,
            )
        )
        add("dllm-l40s-burst", complete["burst", OURS], "Burst")
    ours, fast = latency["livebench", OURS], latency["livebench", "fast-dllm"]
    if ours and fast:
        add("dllm-t4-livebench-lat-gain", fast / ours, "Fast-dLLM's mean latency over dLLM-Serve's on LiveBench")
    ours, base = latency["osc", OURS], latency["osc", BASE]
    if ours and base:
        add("dllm-l40s-osc-lat-ratio", base / ours, "Sparse-dLLM's mean latency over dLLM-Serve's on OSC")
    tails = {s: _interval(curves, "osc", s, _P99).mean for s in (OURS, BASE)}
    if tails[OURS] and tails[BASE]:
        add(
            "dllm-abs-tail-latency",
            (tails[BASE] or 0.0) / (tails[OURS] or 1.0),
            "Sparse-dLLM's p99 latency over dLLM-Serve's on OSC",
        )
    sizes = tuple(
        float(sum(curve.points[-1].runs[0].summary["num_requests"].values()))
        for dataset in ("burst", "osc", "livebench")
        if (curve := curve_of(curves, dataset, OURS)) is not None
    )
    if len(sizes) == len(DATASETS):
        how = "requests of the runs: a choice after the inferred ones, not a result"
        found.append(Finding(claim="dllm-n-requests", value=sizes, obtained="computed", how=how))
    return [*found, *token_cap(runs, view)]


_P99 = Measure(column="p99_latency_s", label="p99 latency (s)", of=lambda run: run.summary["e2el_s"]["p99"])


def paper_rows() -> dict[tuple[str, str], dict[str, Any]]:
    titles = {dataset_title(dataset): dataset for dataset in DATASETS}
    systems = {style.system_look(system).title: system for system in COMPARISON.systems}
    found = {}
    for row in load_table("dllm_serve/table4.csv"):
        system = systems[str(row["system"]).replace(" (Ours)", "")]
        found[titles[str(row["dataset"])], system] = dict(row)
    return found


def _interval(curves: Sequence[Curve], dataset: str, system: str, measure: Measure) -> Interval:
    curve = curve_of(curves, dataset, system)
    if curve is None:
        return Interval(mean=None, half_width=None, n=0, confidence=0.95)
    return curve.points[-1].interval(measure)


def _ratio(curves: Sequence[Curve], dataset: str, system: str) -> float | None:
    own, base = (_interval(curves, dataset, name, THROUGHPUT).mean for name in (system, BASE))
    return own / base if own is not None and base else None


def _text(interval: Interval) -> str:
    if interval.mean is None:
        return "-"
    return f"{interval.mean:.2f}" + (f" ± {interval.half_width:.2f}" if interval.half_width else "")


def _number(value: object) -> str:
    return "-" if value is None else f"{value:g}"
