"""Values of cells over paired seeds, and intervals of their differences and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from paper_figures.common.repeats import Repeats
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun

Of = Callable[[StoredRun], float | None]
How = Literal["points", "percent"]


def rps(run: StoredRun) -> float | None:
    value: float | None = run.summary["rps"]
    return value


def late(run: StoredRun) -> float | None:
    """SLO violations, percent."""
    return _percent(run.summary["slo_violations"])


def ttft(part: str, of: str = "all") -> Of:
    """A statistic of TTFT in ms, over all turns that count, the short or the long ones."""

    def read(run: StoredRun) -> float | None:
        value = run.summary[f"ttft_{of}_s"][part]
        return None if value is None else 1e3 * value

    return read


MEAN, P90, LONGEST = ttft("mean"), ttft("p90"), ttft("max")


def late_of(length: str) -> Of:
    return lambda run: _percent(run.summary[f"slo_violations_{length}"])


def in_bucket(name: str, part: str) -> Of:
    def read(run: StoredRun) -> float | None:
        value = run.summary["by_length"][name][part]
        return None if value is None else (100 if part == "violations" else 1e3) * value

    return read


class Pairs:
    """Stored runs of a figure, asked by cell."""

    def __init__(self, runs: Sequence[StoredRun], view: View) -> None:
        self._repeats = Repeats(runs, view)

    def runs(self, cell: Cell) -> tuple[StoredRun, ...]:
        return self._repeats.of(cell)

    def values(self, cell: Cell, of: Of) -> dict[int, float]:
        """By seed, of valid runs that have one."""
        return {
            run.cell.seed: value
            for run in self._repeats.of(cell)
            if run.validity.valid and (value := of(run)) is not None
        }

    def at(self, cell: Cell, of: Of) -> Interval:
        return mean_interval(list(self.values(cell, of).values()))

    def versus(self, cell: Cell, other: Cell, of: Of, how: How = "percent") -> Interval:
        """Paired by seed: the difference, or by how many percent the cell's value exceeds the other's."""
        ours, theirs = self.values(cell, of), self.values(other, of)
        both = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        if how == "points":
            return mean_interval([a - b for a, b in both])
        return mean_interval([100 * (a / b - 1) for a, b in both if b])


def said(interval: Interval, unit: str = "", digits: int = 1) -> str:
    """``12.3 ± 4.5 %``; without an interval the number alone."""
    if interval.mean is None:
        return "-"
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.{digits}f}"
    return f"{interval.mean:.{digits}f}{spread}{f' {unit}' if unit else ''}"


def number(interval: Interval) -> float:
    return float("nan") if interval.mean is None else interval.mean


def is_above(interval: Interval, least: float = 0.0) -> bool:
    """Outside noise."""
    return interval.mean is not None and interval.mean - (interval.half_width or 0.0) > least


def is_below(interval: Interval, most: float = 0.0) -> bool:
    return interval.mean is not None and interval.mean + (interval.half_width or 0.0) < most


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
