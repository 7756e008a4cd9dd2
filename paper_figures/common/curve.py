"""Curves over the arrival rate: stored runs grouped by panel and system, and what is read off them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.errors import UserError
from paper_figures.common.style import SYSTEMS, system_look
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.metrics import Interval, mean_interval
from repro.runs.store import StoredRun
from repro.workloads import load_card

DATASETS = ("livebench", "burst", "osc")
"""Panels, in the paper's order."""

OURS = "dllm-serve"
BASELINES = ("fast-dllm", "dllm-cache", "sparse-dllm")
COMPARED = (OURS, *BASELINES)

FOLLOWS_LOAD = 0.9
"""A throughput of at least this share of the offered load is not saturated."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run."""

    column: str
    label: str
    of: Callable[[StoredRun], float | None]


THROUGHPUT = Measure(
    column="throughput_tok_s", label="throughput (tok/s)", of=lambda run: run.summary["throughput_tok_s"]
)
MEAN_LATENCY = Measure(column="mean_latency_s", label="mean latency (s)", of=lambda run: run.summary["e2el_s"]["mean"])


@dataclass(frozen=True, kw_only=True)
class Point:
    """The repeats of one system at one rate, by seed."""

    dataset: str
    system: str
    rate: float
    runs: tuple[StoredRun, ...]

    @property
    def valid_runs(self) -> tuple[StoredRun, ...]:
        return tuple(run for run in self.runs if run.validity.valid)

    @property
    def valid(self) -> bool:
        return len(self.valid_runs) == len(self.runs)

    def values(self, measure: Measure) -> list[float]:
        """Of the valid repeats that have one."""
        return [value for run in self.valid_runs if (value := measure.of(run)) is not None]

    def interval(self, measure: Measure) -> Interval:
        return mean_interval(self.values(measure))

    @property
    def gen_length(self) -> float:
        """Mean tokens asked for per request."""
        lengths = [length for run in self.runs for length in run.record.requests["gen_length"]]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def offered(self) -> float:
        """Tokens per second that arrive."""
        return self.rate * self.gen_length


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A system in one panel, by rate."""

    dataset: str
    system: str
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return system_look(self.system).title

    def usable(self, measure: Measure) -> list[tuple[float, Interval]]:
        """(rate, mean over valid repeats), where there is one."""
        pairs = [(point.rate, point.interval(measure)) for point in self.points]
        return [(rate, interval) for rate, interval in pairs if interval.mean is not None]

    def at(self, rate: float) -> Point | None:
        return next((point for point in self.points if point.rate == rate), None)

    @property
    def peak(self) -> tuple[float, float] | None:
        """(rate, throughput) of the highest point; the lowest such rate."""
        means = [(rate, interval.mean) for rate, interval in self.usable(THROUGHPUT) if interval.mean is not None]
        return max(means, key=lambda pair: (pair[1], -pair[0]), default=None)

    @property
    def is_saturated(self) -> bool:
        """Whether the highest rate asked for more than was delivered."""
        last = self.points[-1]
        mean = last.interval(THROUGHPUT).mean
        return mean is not None and mean < FOLLOWS_LOAD * last.offered

    @property
    def batch_sizes(self) -> list[int]:
        """Static batch sizes its runs used; none under continuous batching."""
        found = {run.record.manifest.get("facts", {}).get("batch_size") for point in self.points for run in point.runs}
        return sorted(found - {None})


def rate_cells(figure: str, view: View, rates: Sequence[float], systems: Sequence[str] = COMPARED) -> list[Cell]:
    """Every system on every data set at every rate, each with every seed."""
    where = view.platform
    return [
        Cell(
            figure=figure,
            system=system,
            dataset=dataset,
            platform=where.name,
            executor=where.executor,
            rate=rate,
            seed=seed,
            knobs=() if system == OURS else view.baseline_knobs(),
        )
        for dataset in DATASETS
        for system in systems
        for rate in rates
        for seed in view.seeds
    ]


def load_curves(runs: Sequence[StoredRun]) -> list[Curve]:
    """In the order of the panels, then of the systems in the style."""
    grouped: dict[tuple[str, str], dict[float, list[StoredRun]]] = {}
    for run in runs:
        cell = run.cell
        if cell.dataset not in DATASETS or cell.rate is None:
            raise UserError(
                f"run {cell.folder_name} has dataset={cell.dataset!r} and rate={cell.rate}: give runs of {', '.join(DATASETS)} at a rate"
            )
        system_look(cell.system)
        grouped.setdefault((cell.dataset, cell.system), {}).setdefault(cell.rate, []).append(run)
    systems = list(SYSTEMS)
    curves = []
    for dataset, system in sorted(grouped, key=lambda key: (DATASETS.index(key[0]), systems.index(key[1]))):
        points = [
            Point(dataset=dataset, system=system, rate=rate, runs=tuple(sorted(repeats, key=lambda run: run.cell.seed)))
            for rate, repeats in sorted(grouped[dataset, system].items())
        ]
        curves.append(Curve(dataset=dataset, system=system, points=tuple(points)))
    return curves


def curve_of(curves: Sequence[Curve], dataset: str, system: str) -> Curve | None:
    return next((curve for curve in curves if curve.dataset == dataset and curve.system == system), None)


def dataset_title(dataset: str) -> str:
    return load_card(dataset).title
