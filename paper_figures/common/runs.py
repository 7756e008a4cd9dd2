"""Stored runs of a figure in one view, looked up by cell. Values of two cells are paired by seed."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from repro.reports.claims import Finding
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval, paired_ratio
from repro.runs.store import StoredRun, by_seed

Of = Callable[[StoredRun], float | None]
Against = Literal["points", "percent", "ratio"]
"""Compare by a difference, by the percent that a value exceeds the other, or by their ratio."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run, found by its path in the run's summary."""

    path: str
    label: str = ""
    scale: float | None = None
    column: str = ""
    """Name in a CSV."""
    better: Literal["higher", "lower"] | None = None

    def __call__(self, run: StoredRun) -> float | None:
        value: Any = run.summary
        for name in self.path.split("/"):
            value = value[name]
        scaled: float | None = value if value is None or self.scale is None else self.scale * value
        return scaled


class Runs:
    """A figure's stored runs, grouped by cell; the runs of a cell differ only in their seed."""

    def __init__(self, stored: Sequence[StoredRun], view: View) -> None:
        self.all, self.view = tuple(stored), view
        self._by_question: dict[Hashable, list[StoredRun]] = {}
        for run in sorted(stored, key=lambda run: run.cell.seed):
            self._by_question.setdefault(_question(run.cell), []).append(run)

    def of(self, cell: Cell) -> tuple[StoredRun, ...]:
        """Return the stored repeats of a cell, ordered by seed; the cell's own seed does not matter."""
        return tuple(self._by_question.get(_question(self.view.applied(cell)), ()))

    def values(self, cell: Cell, of: Of) -> dict[int, float]:
        return by_seed(self.of(cell), of)

    def at(self, cell: Cell, of: Of) -> Interval:
        return mean_interval(list(self.values(cell, of).values()))

    def versus(self, cell: Cell, base: Cell, of: Of, how: Against = "percent") -> Interval:
        return paired(self.values(cell, of), self.values(base, of), how)

    def finding(self, claim: str, value: float | tuple[float, ...], how: str, **more: Any) -> Finding:
        """``more`` sets other fields of a finding; ``obtained`` is the view's unless given."""
        return Finding(**{"claim": claim, "value": value, "how": how, "obtained": self.view.obtained, **more})


def paired(ours: dict[int, float], theirs: dict[int, float], how: Against) -> Interval:
    if how == "points":
        return mean_interval([value - theirs[seed] for seed, value in ours.items() if seed in theirs])
    return paired_ratio(ours, theirs, percent=how == "percent")


def _question(cell: Cell) -> Hashable:
    """Identify a cell without its seed, and without the basis that only a stored cell knows."""
    knobs = frozenset(knob for knob in cell.knobs if knob[0] != "basis")
    return (cell.system, cell.dataset, cell.rate, knobs)
