"""Stored runs by the cell that asked for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun


class Repeats:
    """The runs of a cell that differ in nothing but their seed."""

    def __init__(self, runs: Sequence[StoredRun], view: View) -> None:
        self._view = view
        self._by_question: dict[Hashable, list[StoredRun]] = {}
        for run in sorted(runs, key=lambda run: run.cell.seed):
            self._by_question.setdefault(_question(run.cell), []).append(run)

    def of(self, cell: Cell) -> tuple[StoredRun, ...]:
        """The stored repeats of a cell in the order of their seeds; its own seed does not matter."""
        return tuple(self._by_question.get(_question(self._view.applied(cell)), ()))


def _question(cell: Cell) -> Hashable:
    """The cell's question without its seed, and without the basis that only a stored cell knows."""
    knobs = frozenset(knob for knob in cell.knobs if knob[0] != "basis")
    return (cell.system, cell.dataset, cell.rate, knobs)
