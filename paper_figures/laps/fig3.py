"""LAPS Figure 3: P90 TTFT of short prompts mixed with long ones."""

from paper_figures.common.figure import Page
from paper_figures.common.runs import Runs
from paper_figures.common.words import is_above, number, said
from paper_figures.laps.interference import MIXTURES, cell, cells, panels
from paper_figures.laps.layout import laps_figure, laps_page
from paper_figures.laps.measures import P90_LONG, P90_SHORT
from repro.reports.claims import Finding
from repro.runs.statistics import Interval


def wait(runs: Runs, longs: int, shorts: int, kappa: float = 0.0) -> Interval:
    return runs.at(cell(runs.view, longs, shorts, kappa), P90_SHORT)


def page(runs: Runs) -> Page:
    mixtures = MIXTURES[runs.view.platform.executor]
    shorts, first, last = mixtures.shorts[0], mixtures.longs[0], mixtures.longs[-1]
    alone, one, many = (said(wait(runs, longs, shorts), "ms", 0) for longs in (0, first, last))
    label = "P90" if mixtures.model is None else "P90, kappa 0"
    return laps_page(
        runs,
        panels=panels(runs, P90_SHORT, "short"),
        conclusions=[
            f"Short prompts of {shorts} clients wait {alone} alone, {one} beside {first} client with long prompts and {many} beside {last} ({label})."
        ],
        about=f"{mixtures.sentence} Runs of Figure 1.",
    )


def findings(runs: Runs) -> list[Finding]:
    mixed = MIXTURES[runs.view.platform.executor].mixed
    rises, more = [], 0
    for longs, shorts in mixed:
        both, only_shorts, only_longs = (cell(runs.view, *pair) for pair in ((longs, shorts), (0, shorts), (longs, 0)))
        rises.append(runs.versus(both, only_shorts, P90_SHORT))
        more += number(rises[-1]) > number(runs.versus(both, only_longs, P90_LONG))
    up, low, high = sum(map(is_above, rises)), min(map(number, rises)), max(map(number, rises))
    return [
        runs.finding(
            "laps-fig3-interference",
            high,
            f"{1 + low / 100:.1f} to {1 + high / 100:.0f} times as long; rises outside noise in {up} of {len(mixed)} mixtures, relatively more than for long ones "
            f"in {more}; kappa 0",
            holds=up == more == len(mixed),
        ),
        runs.finding(
            "laps-convoy",
            float(more),
            f"P90 TTFT over that alone is larger for short prompts in {more} of {len(mixed)} mixtures; kappa 0",
            holds=more == len(mixed),
        ),
    ]


FIGURE = laps_figure("fig3", "LAPS, Figure 3, §2.2", page=page, cells=cells, findings=findings)
