"""Throughput curves: stored runs grouped by panel and series, and the peaks the paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.errors import UserError
from paper_figures.style import SYSTEMS, system_look
from repro.cell import Scalar
from repro.paper import load_figures
from repro.store import StoredRun
from repro.workloads import load_card

DATASETS = ("livebench", "burst", "osc")
"""Panels, in the paper's order."""

FOLLOWS_LOAD = 0.9
"""A throughput of at least this share of the offered load is not saturated."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """``batch_size`` is the one asked for; None is the system's own choice."""

    system: str
    batch_size: int | None = None

    @property
    def label(self) -> str:
        title = system_look(self.system).title
        if self.batch_size == 1 and self.system == "sparse-dllm":
            return f"{title} (batch 1, as its published code)"
        if self.batch_size is not None:
            return f"{title} (batch {self.batch_size})"
        return title if self.system == "dllm-serve" else f"{title} (largest static batch)"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run as the figure sees it."""

    dataset: str
    series: Series
    rate: float
    throughput: float | None
    gen_length: float
    """Mean tokens asked for per request."""
    run: StoredRun

    @property
    def valid(self) -> bool:
        return self.run.validity.valid

    @property
    def used_batch_size(self) -> int | None:
        """What the run used, whoever chose it; None for continuous batching."""
        size: int | None = self.run.record.manifest.get("facts", {}).get("batch_size")
        return size

    @property
    def offered(self) -> float:
        """Tokens per second that arrive."""
        return self.rate * self.gen_length


@dataclass(frozen=True, kw_only=True)
class PaperValue:
    dataset: str
    system: str
    throughput: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A series in one panel, by rate."""

    dataset: str
    series: Series
    points: tuple[Point, ...]

    @property
    def usable(self) -> tuple[tuple[float, float], ...]:
        """(rate, throughput) of valid runs."""
        return tuple((p.rate, p.throughput) for p in self.points if p.valid and p.throughput is not None)

    @property
    def peak(self) -> tuple[float, float] | None:
        """(rate, throughput) of the highest valid run; the lowest such rate."""
        return max(self.usable, key=lambda pair: (pair[1], -pair[0]), default=None)

    @property
    def is_saturated(self) -> bool:
        """Whether the highest rate asked for more than was delivered."""
        last = self.points[-1]
        return last.throughput is not None and last.throughput < FOLLOWS_LOAD * last.offered


def load_curves(runs: Sequence[StoredRun]) -> list[Curve]:
    """In the order of the panels, then of the series in the style."""
    grouped: dict[tuple[str, Series], list[Point]] = {}
    for run in runs:
        point = _point(run)
        grouped.setdefault((point.dataset, point.series), []).append(point)
    systems = list(SYSTEMS)

    def order(key: tuple[str, Series]) -> tuple[int, int, int]:
        dataset, series = key
        return DATASETS.index(dataset), systems.index(series.system), series.batch_size or 0

    return [
        Curve(dataset=key[0], series=key[1], points=tuple(sorted(grouped[key], key=lambda point: point.rate)))
        for key in sorted(grouped, key=order)
    ]


def _point(run: StoredRun) -> Point:
    cell = run.cell
    if cell.dataset not in DATASETS or cell.rate is None:
        raise UserError(
            f"run {cell.folder_name} has dataset={cell.dataset!r} and rate={cell.rate}: give runs of {', '.join(DATASETS)} at a rate"
        )
    system_look(cell.system)
    lengths = run.record.requests["gen_length"]
    return Point(
        dataset=cell.dataset,
        series=Series(system=cell.system, batch_size=_whole(cell.knob_values.get("batch_size"))),
        rate=cell.rate,
        throughput=run.summary["throughput_tok_s"],
        gen_length=sum(lengths) / len(lengths) if lengths else 0.0,
        run=run,
    )


def _whole(value: Scalar) -> int | None:
    return None if value is None else int(value)


def paper_peaks(figure_id: str) -> tuple[PaperValue, ...]:
    """Peaks that the paper's text prints; the figure's other points are not in the text."""
    figure = next(entry for entry in load_figures("dllm-serve") if entry.id == figure_id)
    return tuple(
        PaperValue(dataset=dataset, system=system.lower(), throughput=float(value))
        for dataset in DATASETS
        for system, value in figure.values.get(f"{dataset_title(dataset)}_peak", {}).items()
    )


def dataset_title(dataset: str) -> str:
    return load_card(dataset).title
