"""LAPS queues: late turns against the longest wait, by the share for those given up.

This figure of our own shows what an order of prefills can give. A share of 0 for those given up is Moore's and Hodgson's order alone; a
share of 1 is first come, first served. The orders of others are points.
"""

from collections.abc import Sequence

from paper_figures.common.contender import Contender
from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Labels, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, rate_of, tuned
from paper_figures.laps.layout import laps_figure, laps_page, line
from paper_figures.laps.measures import CUT, LATE, LATE_1K, LONGEST, P99
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

LOADS = (0.5, 0.7, 0.8, 0.95, 1.05)
DRAWN = (0.8, 0.95, 1.05)
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
USUAL = 0.125
SEARCHED = "sglang-tuned"
OTHERS = ("sglang", SEARCHED, "laps", "srpt", "srpt-aging", "edf", "moore-hodgson", "reserve")
UNDRAWN = "edf"
"""If all have one limit, edf serves by arrival, and its line lies beside SGLang's."""


def contender(name: str) -> Contender:
    return tuned("sglang") if name == SEARCHED else CONTENDERS[name]


def cell(view: View, name: str, load: float, **own: Scalar) -> Cell:
    return contender(name).cell(view, LMSYS, {"model": MIDDLE, "transient": True, **own}, rate=rate_of(load))


def front(view: View, share: float, load: float) -> Cell:
    knobs: dict[str, Scalar] = {} if share == USUAL else {"share": share}
    if share == 1:
        knobs["patience"] = 0.0
    return cell(view, "on-time", load, **knobs)


def cells(view: View) -> list[Cell]:
    return [
        *(cell(view, name, load) for load in LOADS for name in OTHERS),
        *(front(view, share, load) for load in LOADS for share in SHARES),
    ]


def panel(runs: Runs, wait: Measure, load: float) -> Panel:
    def places(own: Sequence[Cell]) -> list[float]:
        return [number(runs.at(each, wait)) for each in own]

    def over_wait(name: str, own: Sequence[Cell]) -> Line:
        look = {"linestyle": "none", "marker": "D"} if name == SEARCHED else {}
        title = contender(name).title
        return line(runs, contender(name).name.removesuffix("-tuned"), places(own), own, LATE, title, **look)

    ours = over_wait("on-time", [front(runs.view, share, load) for share in SHARES])
    fronts = [front(runs.view, share, load) for share in SHARES]
    waits, lates = ([number(runs.at(each, measure)) for each in fronts] for measure in (wait, LATE))
    names = [f"share {SHARES[0]:g}", *(f"{share:g}" for share in SHARES[1:])]
    shares = Labels(texts=names, places=waits, values=lates)
    others = [over_wait(name, [cell(runs.view, name, load)]) for name in OTHERS if name != UNDRAWN]
    return Panel(
        title=f"load {load:g}",
        layers=[ours, *others, shares],
        x=Axis(label=wait.label, better="lower"),
        y=Axis(label=LATE.label, better="lower", scale="plain log"),
    )


def page(runs: Runs) -> Page:
    return laps_page(
        runs,
        panels=[panel(runs, wait, load) for load in DRAWN for wait in (LONGEST, P99)],
        columns=2,
        conclusions=[standing(runs), prices(runs)],
        about=f"One instance, {MIDDLE}, Poisson turns with LMSYS-Chat-1M's shares; load 1 is {CAPACITY[MIDDLE]:g} turns/s. On-time with a "
        f"share of {', '.join(f'{share:g}' for share in SHARES)} for those given up, as labelled; with 1 at once, all by due time. Loads of 0.5 and 0.7 and {CONTENDERS[UNDRAWN].title}, which lies beside SGLang PD, are in the CSV alone. {CUT}",
    )


def standing(runs: Runs) -> str:
    """Tell the loads at which On-time has more late turns than another, outside noise, and how its longest wait compares."""
    texts = []
    for name in OTHERS:
        more = [
            f"{load:g}"
            for load in LOADS
            if is_above(runs.versus(front(runs.view, USUAL, load), cell(runs.view, name, load), LATE, "points"))
        ]
        texts.append(f"{contender(name).title} {', '.join(more) or 'none'}")
    ratios = [
        number(runs.at(front(runs.view, USUAL, load), LONGEST))
        / number(runs.at(cell(runs.view, "sglang", load), LONGEST))
        for load in LOADS
    ]
    listed = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    return f"Loads at which On-time has more late turns, outside noise, than {'; '.join(texts)}. Its longest wait is {listed} times SGLang's."


def prices(runs: Runs) -> str:
    def of(share: float, load: float) -> str:
        cell = front(runs.view, share, load)
        return (
            f"{share:g}: {said(runs.at(cell, LATE))} % late, {number(runs.at(cell, LATE_1K)):.0f} % above 1,000 tokens, longest "
            f"{number(runs.at(cell, LONGEST)) / 1e3:.1f} s"
        )

    return f"By share at a load of {DRAWN[1]:g}: {'; '.join(of(share, DRAWN[1]) for share in SHARES)}."


FIGURE = laps_figure("queues", "ours; the objective of LAPS §4.1", page=page, cells=cells)
