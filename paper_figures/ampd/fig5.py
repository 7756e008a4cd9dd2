"""AMPD Figure 5: ablation, and where prefills run.

The paper does not say how its base, "w/o AR+PR", picks a prefill worker. We show both ways: the shortest queue, and at random, as
Algorithm 1 does while all workers have slack.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paper_figures.ampd.attainment import Attainments, cell_interval, floor_of, tabulate
from paper_figures.ampd.contenders import CONTENDERS, DETAIL_MODEL, DETAIL_RATE, TRACES, details, grid, panel_of
from paper_figures.ampd.layout import DEFAULT, ampd_figure, repeats_of, seeds_text
from paper_figures.common.figure import Columns, Page, Picture, table
from paper_figures.common.panel import OF_SHARES, AtMost, Axis, Bars, Layer, Mark, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import Look, system_look
from paper_figures.common.words import number, said
from repro.reports.claims import Finding, load_table, stated_together
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.workloads.sessions import load_session_card

ABLATED = ("dureader", "gaia")
LADDER = ("none", "none-random", "pr", "ar", "ampd")
RUNGS = ("w/o\nAR+PR", "the same,\nrandom", "w/o\nAR", "w/o\nPR", "AMPD")
PAPER_LOOK = Look(color="black", marker="D")
KNOWN_TRACE = "dureader"
"""The paper prints AMPD's attainment on this trace, in Figure 6."""
BASES = ("none", "none-random")
SHARES = ("ampd", "ours")
GAINS = {
    "ampd-ar-dureader": ("dureader", "ar"),
    "ampd-full-dureader": ("dureader", "ampd"),
    "ampd-ar-gaia": ("gaia", "ar"),
    "ampd-full-gaia": ("gaia", "ampd"),
}
SERIES = {"AMPD w/o PR (adaptive routing only)": "ar", "AMPD (full)": "ampd", "local execution": "local"}
"""Series of the printed table -> our names."""


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    part: str
    trace: str
    contender: str
    at: Interval
    paper: float | None = None


def columns(view: View) -> Columns[AblationRow]:
    return {
        "part": lambda row: row.part,
        "trace": lambda row: row.trace,
        "contender": lambda row: row.contender,
        "value_percent": lambda row: row.at.mean,
        "half_width": lambda row: row.at.half_width,
        "paper_percent": lambda row: row.paper,
        "obtained": lambda row: view.obtained,
    }


def cells(view: View) -> list[Cell]:
    ablated = grid(view, LADDER, [panel_of(DETAIL_MODEL, trace) for trace in ABLATED], (DETAIL_RATE,))
    return [*ablated, *grid(view, SHARES, details(), (DETAIL_RATE,))]


def ladder_of(runs: Runs) -> Attainments:
    return tabulate(runs, LADDER, [panel_of(DETAIL_MODEL, trace) for trace in ABLATED], (DETAIL_RATE,))


def shares_of(runs: Runs) -> Attainments:
    """Shares of local prefills."""
    return tabulate(runs, SHARES, details(), (DETAIL_RATE,), of=Measure(path="local_share"))


def gain_of(ladder: Attainments, name: str, base: str, trace: str, floor: float) -> Interval:
    """Return the gain in percent."""
    return cell_interval(ladder, name, base, ABLATED.index(trace), 0, floor)


def printed() -> dict[tuple[str, str], float]:
    """Return (trace, contender) -> gain in percent, and (trace, "local") -> share."""
    return {
        (str(row["trace"]).lower(), SERIES[str(row["series"])]): float(str(row["value"]))
        for row in load_table("ampd/fig5.csv")
        if str(row["series"]) in SERIES
    }


def rows_of(runs: Runs) -> list[AblationRow]:
    ladder, shares, paper, floor = ladder_of(runs), shares_of(runs), printed(), floor_of(runs.view)
    rows = []
    for row, trace in enumerate(ABLATED):
        rows += [
            AblationRow(part="attainment", trace=trace, contender=name, at=ladder.at(name, row, 0)) for name in LADDER
        ]
        for base in BASES:
            for name in LADDER[2:]:
                gain, part = gain_of(ladder, name, base, trace, floor), f"gain over {CONTENDERS[base].title}"
                value = paper.get((trace, name)) if base == "none" else None
                rows.append(AblationRow(part=part, trace=trace, contender=name, at=gain, paper=value))
    for row, trace in enumerate(TRACES):
        for name in SHARES:
            value = paper.get((trace, "local")) if name == "ampd" else None
            share = shares.at(name, row, 0)
            rows.append(AblationRow(part="local prefills", trace=trace, contender=name, at=share, paper=value))
    return rows


def page(runs: Runs) -> Page:
    ladder, shares, paper = ladder_of(runs), shares_of(runs), printed()
    panels = [
        Panel(
            title=f"{load_session_card(trace).title}: attainment",
            layers=[bars([ladder.at(name, row, 0) for name in LADDER]), *printed_of(trace)],
            x=Axis(ticks=range(len(LADDER)), names=RUNGS),
            y=Axis(label="SLO attainment (%)", better="higher", limits=(0, 105)),
        )
        for row, trace in enumerate(ABLATED)
    ]
    marks: list[Layer] = [
        Mark(label="paper", place=place, value=paper[trace, "local"], look=PAPER_LOOK)
        for place, trace in enumerate(TRACES)
        if (trace, "local") in paper
    ]
    places = range(len(TRACES))
    local = Panel(
        title="prefills on decode workers",
        layers=[bars([shares.at("ampd", row, 0) for row in places]), *marks],
        x=Axis(ticks=places, names=[load_session_card(trace).title for trace in TRACES]),
        y=Axis(label="prefills (%)", limits=(0, None)),
    )
    return Page(
        table=table(rows_of(runs), columns(runs.view)),
        picture=Picture(
            panels=[*panels, local],
            columns=2,
            after_title=f"; {DETAIL_MODEL}, {DETAIL_RATE:g} sessions/s",
            caption=[
                *conclusions(ladder, floor_of(runs.view)),
                "AR: adaptive routing, PR: prefill reordering; without AR prefills join the shortest queue, or one at random.",
                f"Attainment in {DEFAULT}.",
                "Hollow: the paper's. It prints gains, and AMPD's attainment on DuReader in Figure 6, from which the others follow there; on GAIA "
                "arrows: at most, from the printed gain.",
                "Gains over both bases, and those printed, are in the CSV.",
                repeats_of(runs.view),
            ],
        ),
    )


def printed_of(trace: str) -> list[Layer]:
    """Draw what the paper's numbers tell about attainments on a trace: of the base, without reordering, and of AMPD."""
    paper = printed()
    rungs = {"none": 1.0, "ar": 1 + paper[trace, "ar"] / 100, "ampd": 1 + paper[trace, "ampd"] / 100}
    places = [LADDER.index(name) for name in rungs]
    if trace == KNOWN_TRACE:
        base, *_ = stated_together("ampd", "ampd-derived-abs")
        values = [base * ratio / rungs["ampd"] for ratio in rungs.values()]
        marks = zip(places, values, strict=True)
        return [Mark(label="paper", place=place, value=value, look=PAPER_LOOK) for place, value in marks]
    bounds = [100 * ratio / rungs["ampd"] for ratio in rungs.values()]
    return [
        AtMost(label="at most, from the printed gain", places=places[:2], bounds=bounds[:2], look=PAPER_LOOK, arrow=6)
    ]


def bars(values: Sequence[Interval]) -> Bars:
    return Bars(
        label=None, places=range(len(values)), at=values, width=0.6, color=system_look("ampd").color, within=OF_SHARES
    )


def conclusions(ladder: Attainments, floor: float) -> list[str]:
    """Gains over two bases without both techniques: one joins the shortest queue, the other dispatches at random."""
    texts = []
    for trace in ABLATED:
        shortest, random = (said(gain_of(ladder, "ampd", base, trace, floor), "%") for base in BASES)
        texts.append(
            f"{load_session_card(trace).title}: both together gain {shortest} over joining the shortest queue, {random} over dispatch at random."
        )
    return texts


def findings(runs: Runs) -> list[Finding]:
    ladder, shares, floor = ladder_of(runs), shares_of(runs), floor_of(runs.view)
    setup = f"{DETAIL_MODEL} at {DETAIL_RATE:g}/s, Table 2's plan, {DEFAULT}, {seeds_text(runs.view)}"
    base = number(ladder.at("none", 1, 0))
    room = f"the base attains {base:.0f} %, so that at most {100 * (100 / base - 1) if base else math.inf:.0f} % are left to gain"
    results = []
    for claim, (trace, name) in GAINS.items():
        by_base = {each: gain_of(ladder, name, each, trace, floor) for each in BASES}
        texts = "; ".join(f"{said(gain, '%')} over {CONTENDERS[each].title}" for each, gain in by_base.items())
        prefix = f"{room}; " if trace == "gaia" else ""
        results.append(runs.finding(claim, number(by_base["none"]), f"{prefix}{texts}; {setup}"))
    for claim, trace in (("ampd-pr-low", "dureader"), ("ampd-pr-high", "gaia")):
        on_top, alone = gain_of(ladder, "ampd", "ar", trace, floor), gain_of(ladder, "pr", "none", trace, floor)
        how = f"{said(on_top, '%')} on top of adaptive routing, {said(alone, '%')} without it, {trace}; {setup}"
        results.append(runs.finding(claim, number(on_top), how))
    totals = tuple(number(gain_of(ladder, "ampd", "none", trace, floor)) for trace in ABLATED)
    how = f"over {CONTENDERS['none'].title}; {room} in GAIA; {setup}"
    results.append(runs.finding("ampd-total-range", totals, how, of=ABLATED))
    local = {trace: shares.at("ampd", row, 0) for row, trace in enumerate(TRACES)}
    for trace, share in local.items():
        results.append(runs.finding(f"ampd-local-{trace}", number(share), f"{said(share, '%')} of prefills; {setup}"))
    values = tuple(map(number, local.values()))
    return [*results, runs.finding("ampd-local-range", values, f"of prefills; {setup}", of=tuple(local))]


FIGURE = ampd_figure("fig5", "AMPD, Figure 5, §7.2", page=page, cells=cells, findings=findings)
