"""The load at which attainment falls to 90 %."""

from collections.abc import Callable, Sequence

from paper_figures.common.runs import Runs
from paper_figures.laps.contenders import LATE
from repro.runs.cell import Cell
from repro.runs.statistics import mean_interval

MOST_LATE = 10.0
"""Percent."""


def crossing(loads: Sequence[float], late: Sequence[float]) -> float | None:
    """The first load at which so many are late, between two that were simulated; None where fewer are at all of them."""
    if late[0] >= MOST_LATE:
        return loads[0]
    for place in range(1, len(loads)):
        if late[place] >= MOST_LATE:
            before, share = late[place - 1], (MOST_LATE - late[place - 1]) / (late[place] - late[place - 1])
            assert before < MOST_LATE
            return loads[place - 1] + share * (loads[place] - loads[place - 1])
    return None


def knee(runs: Runs, cell_at: Callable[[float], Cell], loads: Sequence[float]) -> str:
    """In words, over the seeds that were run at every load."""
    by_load = [runs.values(cell_at(load), LATE) for load in loads]
    seeds = sorted(set.intersection(*(set(values) for values in by_load)))
    found = [crossing(loads, [values[seed] for values in by_load]) for seed in seeds]
    known = [each for each in found if each is not None]
    if not found:
        return "-"
    if len(known) < len(found):
        return f"above {loads[-1]:g}"
    interval = mean_interval(known)
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.2f}"
    return f"{'at most ' if max(known) == loads[0] else ''}{interval.mean:.2f}{spread}"
