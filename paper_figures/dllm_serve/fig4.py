"""dLLM-Serve Figure 4 (§6.3): mean end-to-end latency against the arrival rate; the runs of Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import rate_panels
from paper_figures.common.caption import figure_title, obtained_text, validity_text
from paper_figures.common.curve import MEAN_LATENCY, Curve, curve_of, dataset_title
from paper_figures.common.rate_panels import PaperValue
from paper_figures.dllm_serve.comparison import BASELINES, COMPARISON, DATASETS, OURS, reading_sentence
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.platforms import Platform

NAME = "fig4"
TITLE = "dLLM-Serve Figure 4: mean latency against arrival rate"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 4, §6.3"
PLATFORMS = ("cpu-tiny", "rtx4090")
PAPER_PLATFORM = "rtx4090"
DECIDES_ON = (PAPER_PLATFORM,)


def cells(view: View) -> list[Cell]:
    return COMPARISON.cells(NAME, view, view.dllm.rates)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    paper = paper_latencies(view.platform)
    stem = f"{NAME}-{view.stem}"
    lead = [
        reading_sentence(view),
        "Latency: from a request's arrival to its last token, queueing included; mean over finished requests, log scale.",
    ]
    if paper:
        lead.append("Hollow marker and dotted line: the paper's, which says 'above' of the baselines.")
    files = rate_panels.draw(
        COMPARISON,
        curves,
        MEAN_LATENCY,
        paper,
        out,
        name=stem,
        title=figure_title(TITLE, runs, view),
        caption=rate_panels.caption(curves, lead, [f"The paper's values are printed in {SOURCE}."] if paper else []),
        is_log=True,
    )
    rates = sorted({point.rate for curve in curves for point in curve.points})
    low, high = rates[0], rates[-1]
    return Rendered(
        files=(*files, rate_panels.save_csv(COMPARISON, curves, paper, MEAN_LATENCY, view, out, stem)),
        columns=(
            "dataset",
            "system",
            f"mean s at {low:g} req/s",
            f"mean s at {high:g} req/s",
            "of dLLM-Serve's",
            "obtained",
            "valid",
        ),
        rows=tuple(_table_row(curve, curves, low, high) for curve in curves),
        notes=(*rate_panels.notes(COMPARISON, curves, view, view.dllm.rates), reading_sentence(view)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name != PAPER_PLATFORM or view.reading != "published":
        return []
    curves = rate_panels.curves_of(COMPARISON, NAME, runs, view.platform)
    low, high = min(view.dllm.rates), max(view.dllm.rates)
    at_high = {system: _mean(curves, "burst", system, high) for system in (OURS, *BASELINES)}
    at_low = {
        (dataset, system): _mean(curves, dataset, system, low) for dataset in DATASETS for system in (OURS, *BASELINES)
    }
    if None in at_high.values() or None in at_low.values():
        return []
    ours = at_high[OURS]
    base = min(value for system in BASELINES if (value := at_high[system]) is not None)
    assert ours is not None
    spread = max(
        (at_low[dataset, system] or 0) / (at_low[dataset, OURS] or 1) for dataset in DATASETS for system in BASELINES
    )
    obtained = view.obtained
    return [
        Finding(
            claim="dllm-low-load-equal",
            value=spread,
            obtained=obtained,
            how=f"largest ratio of a baseline's mean latency to dLLM-Serve's at {low:g} req/s, over the data sets",
        ),
        Finding(
            claim="dllm-4090-burst-base-lat",
            value=base,
            obtained=obtained,
            how=f"least of the baselines' mean latencies on Burst at {high:g} req/s",
        ),
        Finding(
            claim="dllm-4090-burst-serve-lat", value=ours, obtained=obtained, how=f"mean on Burst at {high:g} req/s"
        ),
        Finding(
            claim="dllm-4090-burst-lat-ratio",
            value=base / ours,
            obtained=obtained,
            how=f"best baseline's mean over dLLM-Serve's on Burst at {high:g} req/s",
        ),
    ]


def paper_latencies(platform: Platform) -> tuple[PaperValue, ...]:
    """dLLM-Serve's mean on Burst at 0.5 req/s, and the bound its text gives for the baselines."""
    if platform.name != PAPER_PLATFORM:
        return ()
    stated = {claim.id: claim.expected.value for claim in load_claims("dllm-serve")}
    ours, bound = stated["dllm-4090-burst-serve-lat"], stated["dllm-4090-burst-base-lat"]
    assert isinstance(ours, float | int)
    assert isinstance(bound, float | int)
    return (
        PaperValue(dataset="burst", system=OURS, rate=0.5, value=float(ours)),
        PaperValue(dataset="burst", system="fast-dllm", rate=0.5, value=float(bound), is_bound=True),
    )


def _table_row(curve: Curve, curves: Sequence[Curve], low: float, high: float) -> tuple[str, ...]:
    runs = [run for point in curve.points for run in point.runs]
    own, ours = (_mean(curves, curve.dataset, system, high) for system in (curve.system, OURS))
    ratio = f"{own / ours:.2f}x" if own and ours and curve.system != OURS else "-"
    at_low = _mean(curves, curve.dataset, curve.system, low)
    return (
        dataset_title(curve.dataset),
        curve.label,
        "-" if at_low is None else f"{at_low:.4g}",
        "-" if own is None else f"{own:.4g}",
        ratio,
        obtained_text(runs),
        validity_text(runs),
    )


def _mean(curves: Sequence[Curve], dataset: str, system: str, rate: float) -> float | None:
    curve = curve_of(curves, dataset, system)
    point = None if curve is None else curve.at(rate)
    return None if point is None else point.interval(MEAN_LATENCY).mean
