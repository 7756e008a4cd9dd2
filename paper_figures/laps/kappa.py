"""LAPS kappa: the mixing penalty that the printed throughput needs."""

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Guide, Line, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, plural
from paper_figures.laps.contenders import CONTENDERS, LARGE, MIDDLE
from paper_figures.laps.fig6 import CLAIMS, Place, cell
from paper_figures.laps.layout import crossing, laps_figure, laps_page
from paper_figures.laps.measures import RPS
from repro.reports.claims import stated
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

KAPPAS = (0.0, 0.15, 0.3, 0.45, 0.6)
PLACES = ((MIDDLE, 1, 64), (LARGE, 1, 64), (MIDDLE, 8, 64), (LARGE, 8, 64))
"""Model, instances, clients; the paper states gains for many clients."""
NAMES = ("sglang", "laps", "reserve")


def cells(view: View) -> list[Cell]:
    return [cell(view, name, place, kappa) for place in PLACES for kappa in KAPPAS for name in NAMES]


def printed(place: Place) -> float:
    return stated("laps", CLAIMS[place[1]])


def title(place: Place) -> str:
    return f"{place[0]}, {plural(place[1], 'instance')}"


def gain(runs: Runs, name: str, place: Place, kappa: float) -> Interval:
    return runs.versus(cell(runs.view, name, place, kappa), cell(runs.view, "sglang", place, kappa), RPS)


def needed(runs: Runs, place: Place) -> float | None:
    """Return the kappa at which LAPS's gain is the printed one, interpolated between simulated ones; None if it is above them all."""
    gains = [number(gain(runs, "laps", place, kappa)) for kappa in KAPPAS]
    return crossing(KAPPAS, gains, printed(place) - 0.5)  # the paper prints whole percents


def conclusion(runs: Runs) -> str:
    texts = []
    for place in PLACES:
        kappa = needed(runs, place)
        text = f"above {KAPPAS[-1]:g}" if kappa is None else f"{kappa:.2f}"
        texts.append(f"{text} for {title(place)}")
    return f"The printed gains of 20 % (one instance) and 33 % (eight) need kappa = {', '.join(texts)}; what was measured of it: docs/silicon.md, docs/simulation.md."


def panel(runs: Runs, place: Place) -> Panel:
    lines = [
        Line(
            label=CONTENDERS[name].title,
            places=KAPPAS,
            at=[gain(runs, name, place, kappa) for kappa in KAPPAS],
            look=CONTENDERS[name].look,
        )
        for name in NAMES[1:]
    ]
    return Panel(
        title=title(place),
        layers=[Guide(value=printed(place), label="printed: up to", is_printed=True), *lines],
        x=Axis(label="kappa", ticks=KAPPAS),
        y=Axis(label="turns/s over SGLang PD (%)", better="higher"),
    )


def page(runs: Runs) -> Page:
    return laps_page(
        runs,
        panels=[panel(runs, place) for place in PLACES],
        columns=2,
        conclusions=[conclusion(runs)],
        about="kappa: how much longer a step takes that holds short and long prompts than by its matrices and attention. A roofline gives 0. Policies do not know "
        "it; the short end of a long prompt counts as short. Closed loop of 64 clients.",
    )


FIGURE = laps_figure("kappa", "ours; LAPS §2.2, §4.1", page=page, cells=cells)
