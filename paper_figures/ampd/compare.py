"""Attainments of contenders in every cell, over paired seeds, and intervals of whatever is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paper_figures.ampd.contenders import CONTENDERS, Knobs
from paper_figures.ampd.panels import Panel
from paper_figures.common.repeats import Repeats
from repro.reports.figures import View
from repro.runs.statistics import Interval, student_t_two_sided
from repro.runs.store import StoredRun

Floats = npt.NDArray[np.float64]
Of = Callable[[StoredRun], float | None]
Means = Mapping[str, Floats]
"""Mean over seeds [panel, rate] of each contender."""

HALF_A_SESSION = 0.5
"""Over the number of sessions: what an attainment of 0 counts as in a ratio."""


def attained(run: StoredRun) -> float | None:
    """In the run's own reading."""
    share: float | None = run.summary["slo_attainment"]
    return share


def attained_in(reading: str) -> Of:
    return lambda run: run.summary["attainment_by_reading"][reading]


@dataclass(frozen=True, kw_only=True)
class Table:
    """``values[name][panel, rate, seed]``; NaN where a run is missing, invalid, or has no such value."""

    panels: tuple[Panel, ...]
    rates: tuple[float, ...]
    values: Mapping[str, Floats]

    @property
    def num_seeds(self) -> int:
        return int(next(iter(self.values.values())).shape[2])

    @cached_property
    def means(self) -> Means:
        return {name: _mean(values) for name, values in self.values.items()}

    @cached_property
    def _without(self) -> tuple[Means, ...]:
        """The means with one seed left out, for each."""
        return tuple(
            {name: _mean(np.delete(values, seed, axis=2)) for name, values in self.values.items()}
            for seed in range(self.num_seeds)
        )

    def interval(self, statistic: Callable[[Means], float]) -> Interval:
        """Of a number computed from the means of all seeds together: jackknife over the seeds, which all contenders and
        cells share, with Student's t."""
        n = self.num_seeds
        whole = statistic(self.means)
        if n < 2:
            return Interval(mean=_finite(whole), half_width=None, n=n, confidence=0.95)
        without = np.array([statistic(means) for means in self._without])
        spread = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
        half = student_t_two_sided(0.95, n - 1) * spread
        return Interval(mean=_finite(whole), half_width=_finite(half), n=n, confidence=0.95)

    def at(self, name: str, row: int, column: int, *, less: str | None = None) -> Interval:
        """Of one cell, in percent; the paired difference in points where another contender is taken off."""
        return self.interval(
            lambda means: 100 * float(means[name][row, column] - (0.0 if less is None else means[less][row, column]))
        )


def tabulate(
    runs: Sequence[StoredRun] | Repeats,
    view: View,
    names: Sequence[str],
    panels: Sequence[Panel],
    rates: Sequence[float],
    seeds: range,
    *,
    of: Of = attained,
    knobs: Knobs = (),
) -> Table:
    repeats = runs if isinstance(runs, Repeats) else Repeats(runs, view)
    values = {}
    for name in names:
        found = np.full((len(panels), len(rates), len(seeds)), np.nan)
        for row, panel in enumerate(panels):
            for column, rate in enumerate(rates):
                cell = CONTENDERS[name].cell(None, view, panel, rate, 0, knobs)
                for run in repeats.of(cell):
                    if run.cell.seed in seeds and run.validity.valid and (value := of(run)) is not None:
                        found[row, column, seeds.index(run.cell.seed)] = value
        values[name] = found
    return Table(panels=tuple(panels), rates=tuple(rates), values=values)


def gains(means: Means, ours: str, theirs: str, floor: float) -> Floats:
    """Ratio of mean attainments, cell by cell; an attainment below ``floor`` counts as that."""
    ratio: Floats = np.maximum(means[ours], floor) / np.maximum(means[theirs], floor)
    return ratio


def cell_interval(table: Table, ours: str, theirs: str, row: int, column: int, floor: float) -> Interval:
    """Of one cell's gain, in percent."""
    return table.interval(lambda means: 100 * (float(gains(means, ours, theirs, floor)[row, column]) - 1))


def said(interval: Interval, unit: str = "", digits: int = 1) -> str:
    """``12.3 ± 4.5 %``; without an interval the number alone."""
    if interval.mean is None:
        return "-"
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.{digits}f}"
    return f"{interval.mean:.{digits}f}{spread}{f' {unit}' if unit else ''}"


def printed(panels: Sequence[Panel], rates: Sequence[float], baseline: str) -> Floats:
    """The paper's gains as ratios [panel, rate]; NaN where there is no label."""
    return np.array([[panel.gains.get((rate, baseline), math.nan) for rate in rates] for panel in panels])


def _mean(values: Floats) -> Floats:
    known = ~np.isnan(values)
    count = known.sum(axis=2)
    total: Floats = np.where(known, values, 0.0).sum(axis=2)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
