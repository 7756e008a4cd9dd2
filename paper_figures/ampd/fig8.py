"""AMPD Figure 8: end-to-end latency against arrival rate."""

from dataclasses import replace

import numpy as np

from paper_figures.ampd.attainment import Attainments, rates_of, tabulate
from paper_figures.ampd.contenders import grid, panels
from paper_figures.ampd.layout import SWITCHES, ampd_figure, over_rates, repeats_of, seeds_text
from paper_figures.common.figure import Page, Picture, Table
from paper_figures.common.panel import Axis
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import said
from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

SHOWN = ("ampd", "ours", "dynamo", "vllm-tuned")


def cells(view: View) -> list[Cell]:
    return grid(view, SHOWN, panels(), rates_of(view))


def latencies(runs: Runs) -> Attainments:
    """Mean latencies in seconds."""
    return tabulate(runs, SHOWN, panels(), rates_of(runs.view), of=Measure(path="e2el_s/mean"))


def page(runs: Runs) -> Page:
    table = latencies(runs)
    means = table.means
    ratio = means["ampd"] / means["dynamo"]

    def at(name: str, row: int, column: int) -> Interval:
        return replace(
            table.at(name, row, column), mean=float(means[name][row, column]), half_width=half(name, row, column)
        )

    def half(name: str, row: int, column: int) -> float:
        return (table.at(name, row, column).half_width or 0.0) / 100

    return Page(
        picture=Picture(
            panels=over_rates(table, SHOWN, at, Axis(label="mean latency (s)", better="lower", limits=(0, None))),
            columns=3,
            caption=[
                f"AMPD's mean latency is {np.nanmedian(ratio):.2f} times Dynamo's in the median cell.",
                "Last token minus arrival of a session. AMPD and Dynamo on Table 2's plan, vLLM tuned for attainment, so that its deployment, "
                f"and its latency with it, may be another one at the next rate. {SWITCHES} The paper's text states no value of this figure.",
                repeats_of(runs.view, is_share=False),
            ],
        ),
        csv=Table(
            columns=("panel", "rate_sessions_s", "contender", "e2el_mean_s", "half_width", "over_dynamo", "obtained"),
            rows=[
                (
                    *(panel.title, rate, name, means[name][row].tolist()[column], half(name, row, column)),
                    *(means[name][row].tolist()[column] / means["dynamo"][row, column], runs.view.obtained),
                )
                for row, panel in enumerate(table.panels)
                for name in SHOWN
                for column, rate in enumerate(table.rates)
            ],
        ),
    )


def findings(runs: Runs) -> list[Finding]:
    table = latencies(runs)
    median = table.interval(lambda means: float(np.nanmedian(means["ampd"] / means["dynamo"])))
    ratio = table.means["ampd"] / table.means["dynamo"]
    how = (
        f"median ratio over {ratio.size} cells {said(median, digits=3)}, from {np.nanmin(ratio):.2f} to {np.nanmax(ratio):.2f}, "
        f"Dynamo lower in {int((ratio > 1).sum())}; on AMPD's plan, 99 sessions, {seeds_text(runs.view)}"
    )
    return [runs.finding("ampd-e2e", float(np.nanmedian(ratio)), how)]


FIGURE = ampd_figure("fig8", "AMPD, Figure 8, App. B", page=page, cells=cells, findings=findings)
