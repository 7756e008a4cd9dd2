"""Accuracy of settings on tasks, each compared with a reference on the same problems, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Discordance, discordance, mean_interval, wilson_interval
from repro.runs.store import StoredRun

RETENTION = "retention_ratio"
DENSE = 1.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """A setting on a task. The problems of its repeats are pooled."""

    task: str
    system: str
    knobs: Mapping[str, Scalar]
    """The knobs that tell points apart; all points have the same names."""
    runs: tuple[StoredRun, ...]
    is_reference: bool = False
    """Whether it was added only as the reference for other points."""

    @property
    def valid_runs(self) -> list[StoredRun]:
        return [run for run in self.runs if run.validity.valid]

    def verdicts(self, column: str = "correct") -> list[bool]:
        """Verdicts by seed and problem; empty if an answer was not graded."""
        verdicts = [verdict for run in self.valid_runs for verdict in run.record.requests[column]]
        return [] if None in verdicts else verdicts

    def share(self, column: str = "correct") -> Mapping[str, Any] | None:
        """The share solved, with Wilson's 95 % interval; None if nothing was graded."""
        verdicts = self.verdicts(column)
        if not verdicts:
            return None
        low, high = wilson_interval(sum(verdicts), len(verdicts))
        return {"value": sum(verdicts) / len(verdicts), "low": low, "high": high, "n": len(verdicts)}

    @property
    def _problems(self) -> list[str]:
        return [run.manifest["facts"]["dataset"]["checksum"] for run in self.valid_runs]

    def against(self, other: "Point") -> Discordance | None:
        """Compare two points problem by problem; None if they did not have the same problems."""
        if not self.verdicts() or self._problems != other._problems or not other.verdicts():
            return None
        return discordance(self.verdicts(), other.verdicts())

    def mean(self, of: str) -> float | None:
        """Mean over the valid runs that have ``of``: ``throughput_tok_s``, ``tokens_per_processor_s`` or ``cache_rows``."""
        getters = {
            "throughput_tok_s": lambda run: run.summary["throughput_tok_s"],
            "tokens_per_processor_s": lambda run: run.tokens_per_processor_s,
            "cache_rows": cache_rows,
        }
        values = [getters[of](run) for run in self.valid_runs]
        return mean_interval([value for value in values if value is not None]).mean


def cache_rows(run: StoredRun) -> float | None:
    """KV-cache rows that a running request holds, as the mean over steps. Each of its Reuse steps reads them. None without a cache."""
    steps = run.record.tables.get("steps", {})
    if "kv_rows_used" not in steps or not any(steps["kv_rows_used"]):
        return None
    used, running = (np.asarray(steps[name], dtype=np.float64) for name in ("kv_rows_used", "num_running"))
    return float((used[running > 0] / running[running > 0]).mean())


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points over one knob, all else equal. Without an axis, all points of a task."""

    axis: str | None
    points: tuple[Point, ...]
    reference: Point
    """The point that others are compared with: for retention ratios the cache that keeps every row, else the first point."""

    @cached_property
    def places(self) -> list[float]:
        return [] if self.axis is None else [float(point.knobs[self.axis]) for point in self.points]  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        first = self.points[0]
        settings = [f"{name}={value}" for name, value in first.knobs.items() if name != self.axis]
        return ", ".join([first.runs[0].title, *settings])


def axis_of(varied: Mapping[str, Sequence[Scalar]]) -> str | None:
    """The knob on the axis: the retention ratio, or else the first knob with only numbers."""
    numeric = [
        name
        for name, values in varied.items()
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    ]
    return RETENTION if RETENTION in numeric else next(iter(numeric), None)


def references_of(cells: Sequence[Cell], axis: str | None) -> list[Cell]:
    """Cells that keep every row, if the axis is the retention ratio and no given cell is one."""
    if axis != RETENTION:
        return []
    dense = (
        replace(cell, knobs=tuple({**cell.knob_values, RETENTION: DENSE}.items()))
        for cell in cells
        if cell.knob_values.get(RETENTION) is not None
    )
    return [cell for cell in dict.fromkeys(dense) if cell not in cells]


def curves_of(runs: Sequence[StoredRun], num_asked: int, names: Sequence[str], axis: str | None) -> list[Curve]:
    """Group runs into curves. Runs after the first ``num_asked`` are references. ``names`` are the knobs with several values."""
    groups: dict[tuple[Any, ...], list[StoredRun]] = {}
    keys = {run.cell.key for run in runs[:num_asked]}
    for run in {run.cell.key: run for run in runs}.values():
        knobs = run.cell.knob_values
        setting = tuple((name, knobs.get(name)) for name in names)
        groups.setdefault((run.cell.dataset, run.cell.system, setting), []).append(run)
    points = [
        Point(
            task=task,
            system=system,
            knobs=dict(setting),
            runs=tuple(sorted(group, key=lambda run: run.cell.seed)),
            is_reference=not any(run.cell.key in keys for run in group),
        )
        for (task, system, setting), group in groups.items()
    ]
    lines: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        is_placed = axis is not None and point.knobs.get(axis) is not None
        rest = tuple(pair for pair in point.knobs.items() if pair[0] != axis)
        line = (point.task, point.system, rest) if is_placed else (point.task,)
        lines.setdefault(line, []).append(point)
    curves = []
    for key, members in lines.items():
        own_axis = axis if len(key) > 1 else None
        if own_axis is not None:
            members.sort(key=lambda point: float(point.knobs[own_axis]))  # type: ignore[arg-type]
        reference = members[-1] if own_axis == RETENTION else members[0]
        kept = tuple(point for point in members if not point.is_reference)
        curves.append(Curve(axis=own_axis, points=kept, reference=reference))
    return curves
