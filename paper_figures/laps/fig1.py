"""LAPS Figure 1: P90 TTFT of long prompts mixed with short ones."""

from paper_figures.common.figure import Page
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, is_below, number, said
from paper_figures.laps.interference import MIXTURES, cell, cells, panels
from paper_figures.laps.layout import laps_figure, laps_page
from paper_figures.laps.measures import P90_LONG
from repro.reports.claims import Finding
from repro.runs.statistics import Interval


def rise(runs: Runs, longs: int, shorts: int, kappa: float = 0.0) -> Interval:
    return runs.versus(cell(runs.view, longs, shorts, kappa), cell(runs.view, longs, 0, kappa), P90_LONG)


def page(runs: Runs) -> Page:
    mixtures = MIXTURES[runs.view.platform.executor]
    first, last, shorts = mixtures.longs[0], mixtures.longs[-1], mixtures.shorts[-1]
    texts = [
        f"by {said(rise(runs, first, shorts, kappa), '%', 0)} beside {first} long client and {said(rise(runs, last, shorts, kappa), '%', 0)} beside {last}"
        + ("" if mixtures.model is None else f" at kappa {kappa:g}")
        for kappa in mixtures.kappas
    ]
    about = "" if mixtures.model is None else " kappa: how much longer a mixed step takes than its parts."
    return laps_page(
        runs,
        panels=panels(runs, P90_LONG, "long"),
        conclusions=[f"{shorts} clients with short prompts change the P90 TTFT of long ones {'; '.join(texts)}."],
        about=mixtures.sentence + about,
    )


def findings(runs: Runs) -> list[Finding]:
    rises = [rise(runs, *pair) for pair in MIXTURES[runs.view.platform.executor].mixed]
    up, down = sum(map(is_above, rises)), sum(map(is_below, rises))
    most = max(rises, key=number)
    how = (
        f"P90 TTFT rises outside noise in {up} of {len(rises)} mixtures and falls in {down}, by up to {said(most, '%')}, more with more short prompts and less "
        "with more long ones; kappa 0"
    )
    return [runs.finding("laps-fig1-interference", number(most), how, holds=up == len(rises))]


FIGURE = laps_figure("fig1", "LAPS, Figure 1, §1", page=page, cells=cells, findings=findings)
