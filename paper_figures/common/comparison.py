"""Systems beside each other on several data sets, at several arrival rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.errors import UserError
from paper_figures.common.curve import Curve, Point
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A panel per data set, a curve per system; both in the order of the paper."""

    name: str = "rates"
    """Figures of one comparison share their runs, measured ones too."""
    datasets: tuple[str, ...]
    own: str
    """The paper's system, which the others are the baselines of."""
    baselines: tuple[str, ...]
    size: Callable[[View, float], Knobs] = lambda view, rate: ()
    """Knobs of every cell at a rate: how many requests, where that follows the rate."""

    @property
    def systems(self) -> tuple[str, ...]:
        return (self.own, *self.baselines)

    def cells(self, figure: str, view: View, rates: Sequence[float]) -> list[Cell]:
        """Every system on every data set at every rate, each with every seed."""
        return [
            view.cell(
                figure,
                system,
                dataset,
                rate=rate,
                seed=seed,
                knobs=(
                    *self.size(view, rate),
                    *(() if system == self.own else view.baseline_knobs()),
                    *view.together(self.name),
                ),
            )
            for dataset in self.datasets
            for system in self.systems
            for rate in rates
            for seed in view.seeds
        ]

    def curves(self, runs: Sequence[StoredRun]) -> list[Curve]:
        """Runs of other data sets and systems than these are an error."""
        grouped: dict[tuple[str, str], dict[float, list[StoredRun]]] = {}
        for run in runs:
            cell = run.cell
            if cell.dataset not in self.datasets or cell.system not in self.systems or cell.rate is None:
                raise UserError(
                    f"run {cell.folder_name} has system={cell.system!r}, dataset={cell.dataset!r} and rate={cell.rate}: "
                    f"give runs of {', '.join(self.systems)} on {', '.join(self.datasets)} at a rate"
                )
            grouped.setdefault((cell.dataset, cell.system), {}).setdefault(cell.rate, []).append(run)
        return [
            Curve(
                dataset=dataset,
                system=system,
                points=tuple(
                    Point(
                        dataset=dataset,
                        system=system,
                        rate=rate,
                        runs=tuple(sorted(repeats, key=lambda run: run.cell.seed)),
                    )
                    for rate, repeats in sorted(grouped[dataset, system].items())
                ),
            )
            for dataset in self.datasets
            for system in self.systems
            if (dataset, system) in grouped
        ]
