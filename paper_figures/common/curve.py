"""Curves over the arrival rate, and what is read off them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paper_figures.common.style import system_look
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun
from repro.workloads.card import load_card

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
        """Values of the valid repeats that have one."""
        return [value for run in self.valid_runs if (value := measure.of(run)) is not None]

    def interval(self, measure: Measure) -> Interval:
        return mean_interval(self.values(measure))

    @property
    def gen_length(self) -> float:
        """Mean tokens asked for per request."""
        nums, sums = zip(*(run.sum_of("gen_length") for run in self.runs), strict=True)
        return sum(sums) / sum(nums) if sum(nums) else 0.0

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
        found = {run.facts.get("batch_size") for point in self.points for run in point.runs}
        return sorted(size for size in found if size is not None)


def curve_of(curves: Sequence[Curve], dataset: str, system: str) -> Curve | None:
    return next((curve for curve in curves if curve.dataset == dataset and curve.system == system), None)


def dataset_title(dataset: str) -> str:
    return load_card(dataset).title
