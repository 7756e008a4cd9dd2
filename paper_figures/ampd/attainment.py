"""Attainments of contenders in every cell, over paired seeds, and intervals of numbers computed from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paper_figures.ampd.contenders import CONTENDERS, TracePanel
from paper_figures.common.runs import Measure, Of, Runs
from repro.families.platforms import ArPart
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, as_percent, from_logarithms, student_t_two_sided

Floats = npt.NDArray[np.float64]
Means = Mapping[str, Floats]
"""Mean over seeds [panel, rate] for each contender."""

Ask = Callable[[str, TracePanel, float], Cell]

HALF_A_SESSION = 0.5
"""In ratios, an attainment of 0 counts as this over the number of sessions."""


ATTAINED = Measure(path="slo_attainment")
"""In the run's own reading of attainment."""


@dataclass(frozen=True, kw_only=True)
class Attainments:
    """``values[name][panel, rate, seed]``; NaN if a run is missing, invalid, or has no such value."""

    panels: tuple[TracePanel, ...]
    rates: tuple[float, ...]
    values: Mapping[str, Floats]

    @property
    def num_seeds(self) -> int:
        return int(next(iter(self.values.values())).shape[2])

    @property
    def cells(self) -> Iterator[tuple[int, int]]:
        """Row and column of each cell."""
        return ((row, column) for row in range(len(self.panels)) for column in range(len(self.rates)))

    @property
    def num_cells(self) -> int:
        return len(self.panels) * len(self.rates)

    def place(self, row: int, column: int) -> str:
        return f"{self.panels[row].title} at {self.rates[column]:g}/s"

    @cached_property
    def means(self) -> Means:
        return {name: _mean(values) for name, values in self.values.items()}

    @cached_property
    def _without(self) -> tuple[Means, ...]:
        """For each seed, the means without it."""
        return tuple(
            {name: _mean(np.delete(values, seed, axis=2)) for name, values in self.values.items()}
            for seed in range(self.num_seeds)
        )

    def interval(self, statistic: Callable[[Means], float]) -> Interval:
        """Return the interval of a number computed from the means over all seeds: a jackknife over the seeds, with Student's t. All
        contenders and cells share the seeds."""
        n = self.num_seeds
        estimate = statistic(self.means)
        if n < 2:
            return Interval(mean=_finite(estimate), half_width=None, n=n, confidence=0.95)
        estimates = np.array([statistic(means) for means in self._without])
        spread = math.sqrt((n - 1) / n * float(((estimates - estimates.mean()) ** 2).sum()))
        half = student_t_two_sided(0.95, n - 1) * spread
        return Interval(mean=_finite(estimate), half_width=_finite(half), n=n, confidence=0.95)

    def at(self, name: str, row: int, column: int, *, less: str | None = None) -> Interval:
        """Return the attainment in one cell, in percent; with ``less``, the paired difference to that contender, in points."""
        return self.interval(
            lambda means: 100 * float(means[name][row, column] - (0.0 if less is None else means[less][row, column]))
        )


def tabulate(
    runs: Runs,
    names: Sequence[str],
    panels: Sequence[TracePanel],
    rates: Sequence[float],
    *,
    of: Of = ATTAINED,
    knobs: Knobs = (),
    ask: Ask | None = None,
) -> Attainments:
    """``ask`` makes the cell for a contender, a panel and a rate, if the rate alone is not enough."""
    seeds, values = runs.view.seeds, {}
    for name in names:
        array = np.full((len(panels), len(rates), len(seeds)), np.nan)
        for row, panel in enumerate(panels):
            for column, rate in enumerate(rates):
                cell = CONTENDERS[name].on(runs.view, panel, rate, knobs) if ask is None else ask(name, panel, rate)
                for seed, value in runs.values(cell, of).items():
                    if seed in seeds:
                        array[row, column, seeds.index(seed)] = value
        values[name] = array
    return Attainments(panels=tuple(panels), rates=tuple(rates), values=values)


def rates_of(view: View) -> tuple[float, ...]:
    return view.rates or tuple(view.platform.part(ArPart).rates)


def floor_of(view: View) -> float:
    num = dict(view.knobs).get("num_prompts", view.platform.part(ArPart).num_sessions)
    assert isinstance(num, int)
    return HALF_A_SESSION / num


def gains(means: Means, ours: str, theirs: str, floor: float) -> Floats:
    """Return ratios of mean attainments, cell by cell; an attainment below ``floor`` counts as ``floor``."""
    ratio: Floats = np.maximum(means[ours], floor) / np.maximum(means[theirs], floor)
    return ratio


def cell_interval(table: Attainments, ours: str, theirs: str, row: int, column: int, floor: float) -> Interval:
    """Return the interval of one cell's gain, in percent."""
    logs = table.interval(lambda means: math.log(float(gains(means, ours, theirs, floor)[row, column])))
    return as_percent(from_logarithms(logs))


def ends_of_logs(logs: Interval) -> tuple[float, float, float]:
    """Return low end, value and high end of the number whose logarithm is ``logs``."""
    mean, half = logs.mean or 0.0, logs.half_width or 0.0
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def printed(panels: Sequence[TracePanel], rates: Sequence[float], baseline: str) -> Floats:
    """The paper's gains as ratios [panel, rate]; NaN if there is no label."""
    return np.array([[panel.gains.get((rate, baseline), math.nan) for rate in rates] for panel in panels])


def _mean(values: Floats) -> Floats:
    known = ~np.isnan(values)
    count = known.sum(axis=2)
    total: Floats = np.where(known, values, 0.0).sum(axis=2)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
