"""LAPS orders: On-time against the best of five rivals, all searched alike, over ten loads of 15,000 turns.

Compares late turns, and mean, P99 and longest TTFT. One search, of the same size for all, sets each system's free knobs for each load.
Its trials have 3,000 turns, on seeds that no run here uses. On-time also runs with its defaults.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, is_below, number
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, rate_of, tuned
from paper_figures.laps.layout import laps_figure, laps_page, line
from paper_figures.laps.measures import CUT, LATE, LONGEST, MEAN, P99
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.tuning import CANDIDATES, TRIALS

OURS = "on-time"
RIVALS = ("sglang", "srpt", "srpt-aging", "edf", "moore-hodgson")
LOADS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)
TURNS = 15_000
BEHIND = 0.1
"""If our late turns exceed a rival's by more than this share, we call ours far behind."""


def cell(view: View, name: str, load: float, *, is_tuned: bool = True) -> Cell:
    contender = tuned(name) if is_tuned else CONTENDERS[name]
    knobs: dict[str, Scalar] = {"model": MIDDLE, "transient": True, "num_prompts": TURNS}
    return contender.cell(view, LMSYS, knobs, rate=rate_of(load))


def cells(view: View) -> list[Cell]:
    tuned_cells = [cell(view, name, load) for load in LOADS for name in (OURS, *RIVALS)]
    return [*tuned_cells, *(cell(view, OURS, load, is_tuned=False) for load in LOADS)]


def best_of(runs: Runs, rivals: Sequence[str], load: float) -> str:
    """Return the rival with the fewest late turns on average."""
    return min(rivals, key=lambda name: number(runs.at(cell(runs.view, name, load), LATE)))


class Standing(NamedTuple):
    ahead: list[float]
    """Loads at which On-time has fewer late turns than the best rival, outside noise."""
    behind: list[float]
    """Loads at which it has more, outside noise."""
    far_behind: list[float]
    """Loads at which its mean exceeds the rival's by more than ``BEHIND``."""


def standing(runs: Runs, rivals: Sequence[str], *, is_tuned: bool) -> Standing:
    result = Standing([], [], [])
    for load in LOADS:
        ours, best = cell(runs.view, OURS, load, is_tuned=is_tuned), cell(runs.view, best_of(runs, rivals, load), load)
        gap = runs.versus(ours, best, LATE, "points")
        if is_below(gap):
            result.ahead.append(load)
        if is_above(gap):
            result.behind.append(load)
        if number(gap) > BEHIND * number(runs.at(best, LATE)):
            result.far_behind.append(load)
    return result


def concluded(runs: Runs) -> list[str]:
    groups = {"of the five": RIVALS, "but for Moore-Hodgson": RIVALS[:-1]}
    texts = []
    for title, is_tuned in (("On-time, tuned,", True), ("On-time by its defaults", False)):
        for group, rivals in groups.items():
            ahead, behind, far = map(len, standing(runs, rivals, is_tuned=is_tuned))
            texts.append(
                f"{title} has fewer late turns than the best rival {group}, outside noise, at {ahead} of {len(LOADS)} loads, more at "
                f"{behind}, and over {100 * BEHIND:.0f} % more in the mean at {far}."
            )
    return texts


def panel(runs: Runs, of: Measure) -> Panel:
    lines = [
        line(runs, name, LOADS, [cell(runs.view, name, load) for load in LOADS], of, tuned(name).title)
        for name in (OURS, *RIVALS)
    ]
    plain = [cell(runs.view, OURS, load, is_tuned=False) for load in LOADS]
    return Panel(
        title=of.label,
        layers=[*lines, line(runs, OURS, LOADS, plain, of, linestyle="--")],
        x=Axis(label="load", ticks=(0.5, 0.7, 0.9, 1.1)),
        y=Axis(label=of.label, better="lower", scale="plain log"),
    )


def page(runs: Runs) -> Page:
    return laps_page(
        runs,
        panels=[panel(runs, of) for of in (LATE, MEAN, P99, LONGEST)],
        columns=2,
        conclusions=concluded(runs),
        about=f"One instance, {MIDDLE}, {TURNS:,} Poisson turns with LMSYS-Chat-1M's shares; load 1 is {CAPACITY[MIDDLE]:g} turns/s. "
        f"Through: one search of up to {CANDIDATES} candidates and {TRIALS} trials of 3,000 turns on other seeds, for the fewest late "
        f"turns. Dashed: On-time by its defaults. The longest TTFT is a mean of the runs' maxima. {CUT}",
    )


FIGURE = laps_figure("orders", "ours; the objective of LAPS §4.1", page=page, cells=cells)
