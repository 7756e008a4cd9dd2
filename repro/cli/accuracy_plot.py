"""Accuracy over a knob, and speed beside it, as a figure with the rows behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli.plots import save_drawn, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from repro.workbench.accuracy import Curve, Point

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's bright scheme, which a colour-blind reader tells apart."""
MARKERS = "osD^vP"
GREY = "#777777"
TITLES = {"retention_ratio": "retention ratio (share of context rows kept)"}
SPEED, PER_PROCESSOR, ROWS = "throughput_tok_s", "tokens_per_processor_s", "cache_rows"
COSTS = {PER_PROCESSOR: "tokens per\nprocessor second", SPEED: "tokens/s", ROWS: "cache rows\na request"}


def draw(path: Path, curves: Sequence[Curve], rows: Sequence[Mapping[str, Any]]) -> tuple[Path, Path]:
    """A column of panels for each task: its accuracy with Wilson's 95 % intervals, and below it what each point costs. Without an
    axis, bars."""
    flat = [_flat(row, list(curves[0].points[0].knobs)) for row in rows]
    if any(curve.axis is None for curve in curves):
        labelled = [{"label": f"{row['task']}: {row['system']}{row['setting']}", **row} for row in flat]
        return save_plot(path, "Accuracy", labelled, {"accuracy_percent": "solved (%)", SPEED: "throughput (tok/s)"})
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(curve.points[0].task for curve in curves))
    costs = [PER_PROCESSOR if any(row[PER_PROCESSOR] for row in rows) else SPEED, ROWS]
    costs = [cost for cost in costs if any(row[cost] for row in rows)]
    figure = Figure(figsize=(1.4 + 3.6 * len(tasks), 3.4 + 1.5 * len(costs)), layout="constrained")
    grid = figure.subplots(
        1 + len(costs), len(tasks), sharex="col", squeeze=False, height_ratios=[2.2, *(1 for _ in costs)]
    )
    for column, task in enumerate(tasks):
        own = [curve for curve in curves if curve.points[0].task == task]
        _accuracy(grid[0][column], own, task)
        for axes, cost in zip(grid[1:, column], costs, strict=True):
            _cost(axes, own, cost)
        grid[-1][column].set_xlabel(TITLES.get(str(own[0].axis), str(own[0].axis)))
    grid[0][0].set_ylabel("problems solved (%)")
    for axes, cost in zip(grid[1:, 0], costs, strict=True):
        axes.set_ylabel(COSTS[cost])
    obtained = "; ".join(sorted({str(row["obtained"]) for row in rows}))
    models = ", ".join(dict.fromkeys(f"{row['model']}, {row['platform']}" for row in rows))
    figure.suptitle(f"{models} ({obtained})", fontsize="small")
    return save_drawn(path, figure, flat)


def _accuracy(axes: Axes, curves: Sequence[Curve], task: str) -> None:
    for place, curve in enumerate(curves):
        known = [(x, point.share()) for x, point in zip(curve.places, curve.points, strict=True)]
        solved = [(x, each) for x, each in known if each is not None]
        values = [100 * each["value"] for _, each in solved]
        arms = [
            [100 * (each["value"] - each["low"]) for _, each in solved],
            [100 * (each["high"] - each["value"]) for _, each in solved],
        ]
        # Intervals at one ratio stand beside each other.
        aside = (place - (len(curves) - 1) / 2) * 0.012 * (max(curve.places) - min(curve.places))
        axes.errorbar([x + aside for x, _ in solved], values, yerr=arms, label=curve.label, capsize=3, **_look(place))
    num = {each["n"] for curve in curves for point in curve.points if (each := point.share()) is not None}
    for curve, shown in _references(curves):
        if (dense := curve.reference.share()) is not None:
            axes.axhline(100 * dense["value"], color=GREY, linestyle="--", linewidth=1, label=shown)
            axes.axhspan(100 * dense["low"], 100 * dense["high"], color=GREY, alpha=0.12, linewidth=0)
    axes.set_title(f"{task} (n = {', '.join(map(str, sorted(num)))})", fontsize="medium")
    axes.legend(fontsize="x-small", loc="best")
    axes.grid(alpha=0.25)


def _cost(axes: Axes, curves: Sequence[Curve], cost: str) -> None:
    for place, curve in enumerate(curves):
        known = [(x, point.mean(cost)) for x, point in zip(curve.places, curve.points, strict=True)]
        axes.plot([x for x, y in known if y is not None], [y for _, y in known if y is not None], **_look(place))
    for curve, _ in _references(curves):
        if (dense := curve.reference.mean(cost)) is not None:
            axes.axhline(dense, color=GREY, linestyle="--", linewidth=1)
    axes.margins(y=0.1)
    axes.update_datalim([(curves[0].places[0], 0.0)])
    axes.autoscale_view(scalex=False)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _references(curves: Sequence[Curve]) -> list[tuple[Curve, str | None]]:
    """Caches that keep every row; settings that differ in what they would leave out have the same."""
    from repro.workbench.accuracy import RETENTION

    found: list[tuple[Curve, str | None]] = []
    seen: set[tuple[bool, ...]] = set()
    for curve in curves:
        point: Point = curve.reference
        verdicts = tuple(point.verdicts())
        if curve.axis == RETENTION and point.runs[0].cell.knob_values.get(RETENTION) == 1 and verdicts not in seen:
            seen.add(verdicts)
            found.append((curve, "every row kept" if len(seen) == 1 else None))
    return found


def _look(place: int) -> dict[str, Any]:
    return {
        "color": COLORS[place % len(COLORS)],
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.2,
    }


def _flat(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """As a CSV has it: a number a column. ``names`` are the knobs that tell rows apart."""
    found = dict(row)
    for name in ("accuracy", "accuracy_strict"):
        share = found.pop(name) or {}
        found |= {name: share.get("value"), **{f"{name}_{end}": share.get(end) for end in ("low", "high", "n")}}
    for end in ("", "_low", "_high"):
        value = found[f"accuracy{end}"]
        found[f"accuracy_percent{end}"] = None if value is None else 100 * value
    found["setting"] = "".join(f", {name}={row[name]}" for name in names)
    return found
