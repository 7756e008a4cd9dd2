"""Plots of what a command has shown as a table, with the data as CSV."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engines.errors import UserError
from repro.files import csv_text, replace_all, writable_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from repro.workbench.accuracy import Curve, Point


def check_plot(path: Path, *inputs: str | Path) -> None:
    """Before any work, check that the plot and its CSV can be written. ``inputs`` are the files that the command reads."""
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"plot={str(path)!r} is no file of a plot: give one that ends in .png or .pdf")
    for file in (path, path.with_suffix(".csv")):
        writable_file("plot", file, *map(Path, inputs))


def save_plot(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    guides: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Path, Path]:
    """Draw a panel for each column of ``titles``, which maps columns to axis titles. Each row has a ``label``, how it was ``obtained``,
    and these columns (None if unknown). Repeats add half the width of an interval as ``COLUMN_half``, or its ends as ``COLUMN_low`` and
    ``COLUMN_high``. The CSV holds all columns of the rows. A column in ``guides`` gets a line at that value, and points instead of
    bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 3 * len(titles), 1.2 + 0.35 * len(rows)), layout="constrained")
    (panels,) = figure.subplots(1, len(titles), sharey=True, squeeze=False)
    labels = [f"{row['label']}{'' if row['valid'] else ' (INVALID)'}" for row in rows]
    for axes, (column, axis_title) in zip(panels, titles.items(), strict=True):
        arms = [_error_bar(row, column) for row in rows]
        error = {"xerr": list(zip(*arms, strict=True)), "capsize": 3} if any(map(any, arms)) else {}
        if column in guides:
            axes.axvline(guides[column], color="#888888", linestyle="--", linewidth=1)
            values = [math.nan if row[column] is None else row[column] for row in rows]
            axes.errorbar(values, range(len(rows)), fmt="o", color="#4477aa", **error)
        else:
            axes.barh(range(len(rows)), [row[column] or 0 for row in rows], color="#4477aa", **error)
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlabel(axis_title)
    panels[0].invert_yaxis()
    obtained = ", ".join(sorted({str(row["obtained"]) for row in rows}))
    figure.suptitle(f"{title} ({obtained})", fontsize="medium")
    return save_drawn(path, figure, rows)


def _error_bar(row: Mapping[str, Any], column: str) -> tuple[float, float]:
    """The distances from a value down and up to the ends of its interval."""
    value, low, high = (row.get(name) for name in (column, f"{column}_low", f"{column}_high"))
    if value is not None and low is not None and high is not None:
        return value - low, high - value
    half = row.get(f"{column}_half") or 0
    # No plotted value is below 0.
    return min(half, value or 0), half


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return csv_text(rows[0], ([row.get(name) for name in rows[0]] for row in rows))


def save_drawn(path: Path, figure: "Figure", rows: Sequence[Mapping[str, Any]]) -> tuple[Path, Path]:
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    csv_path = path.with_suffix(".csv")
    replace_all({path: picture.getvalue(), csv_path: csv_of(rows).encode()})
    return path, csv_path


COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""
MARKERS = "osD^vP"
GREY = "#777777"
AXES = {"retention_ratio": "retention ratio (share of context rows kept)"}
SPEED, PER_PROCESSOR, ROWS = "throughput_tok_s", "tokens_per_processor_s", "cache_rows"
COSTS = {PER_PROCESSOR: "tokens per\nprocessor second", SPEED: "tokens/s", ROWS: "cache rows\na request"}


def save_accuracy_plot(path: Path, curves: "Sequence[Curve]", rows: Sequence[Mapping[str, Any]]) -> tuple[Path, Path]:
    """Draw a column of panels for each task: accuracy with Wilson's 95 % intervals, and below it the cost of each point. Without an axis,
    draw bars."""
    flat = [_flat_row(row, list(curves[0].points[0].knobs)) for row in rows]
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
        of_task = [curve for curve in curves if curve.points[0].task == task]
        _accuracy(grid[0][column], of_task, task)
        for axes, cost in zip(grid[1:, column], costs, strict=True):
            _cost(axes, of_task, cost)
        grid[-1][column].set_xlabel(AXES.get(str(of_task[0].axis), str(of_task[0].axis)))
    grid[0][0].set_ylabel("problems solved (%)")
    for axes, cost in zip(grid[1:, 0], costs, strict=True):
        axes.set_ylabel(COSTS[cost])
    obtained = "; ".join(sorted({str(row["obtained"]) for row in rows}))
    models = ", ".join(dict.fromkeys(f"{row['model']}, {row['platform']}" for row in rows))
    figure.suptitle(f"{models} ({obtained})", fontsize="small")
    return save_drawn(path, figure, flat)


def _accuracy(axes: "Axes", curves: "Sequence[Curve]", task: str) -> None:
    for index, curve in enumerate(curves):
        shares = [(x, point.share()) for x, point in zip(curve.places, curve.points, strict=True)]
        solved = [(x, share) for x, share in shares if share is not None]
        values = [100 * share["value"] for _, share in solved]
        arms = [
            [100 * (share["value"] - share["low"]) for _, share in solved],
            [100 * (share["high"] - share["value"]) for _, share in solved],
        ]
        # Shift intervals at one ratio apart, so that they do not overlap.
        shift = (index - (len(curves) - 1) / 2) * 0.012 * (max(curve.places) - min(curve.places))
        axes.errorbar([x + shift for x, _ in solved], values, yerr=arms, label=curve.label, capsize=3, **_style(index))
    nums = {share["n"] for curve in curves for point in curve.points if (share := point.share()) is not None}
    for curve, label in _references(curves):
        if (dense := curve.reference.share()) is not None:
            axes.axhline(100 * dense["value"], color=GREY, linestyle="--", linewidth=1, label=label)
            axes.axhspan(100 * dense["low"], 100 * dense["high"], color=GREY, alpha=0.12, linewidth=0)
    axes.set_title(f"{task} (n = {', '.join(map(str, sorted(nums)))})", fontsize="medium")
    axes.legend(fontsize="x-small", loc="best")
    axes.grid(alpha=0.25)


def _cost(axes: "Axes", curves: "Sequence[Curve]", cost: str) -> None:
    for index, curve in enumerate(curves):
        means = [(x, point.mean(cost)) for x, point in zip(curve.places, curve.points, strict=True)]
        axes.plot([x for x, y in means if y is not None], [y for _, y in means if y is not None], **_style(index))
    for curve, _ in _references(curves):
        if (dense := curve.reference.mean(cost)) is not None:
            axes.axhline(dense, color=GREY, linestyle="--", linewidth=1)
    axes.margins(y=0.1)
    axes.update_datalim([(curves[0].places[0], 0.0)])
    axes.autoscale_view(scalex=False)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _references(curves: "Sequence[Curve]") -> "list[tuple[Curve, str | None]]":
    """Curves whose reference keeps every cache row, with its label. References with equal verdicts are drawn once."""
    from repro.workbench.accuracy import RETENTION

    references: list[tuple[Curve, str | None]] = []
    seen: set[tuple[bool, ...]] = set()
    for curve in curves:
        point: Point = curve.reference
        verdicts = tuple(point.verdicts())
        if curve.axis == RETENTION and point.runs[0].cell.knob_values.get(RETENTION) == 1 and verdicts not in seen:
            seen.add(verdicts)
            references.append((curve, "every row kept" if len(seen) == 1 else None))
    return references


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.2,
    }


def _flat_row(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Flatten a row for the CSV, with one number per column. ``names`` are the knobs that tell rows apart."""
    flat = dict(row)
    for name in ("accuracy", "accuracy_strict"):
        share = flat.pop(name) or {}
        flat |= {name: share.get("value"), **{f"{name}_{end}": share.get(end) for end in ("low", "high", "n")}}
    for end in ("", "_low", "_high"):
        value = flat[f"accuracy{end}"]
        flat[f"accuracy_percent{end}"] = None if value is None else 100 * value
    flat["setting"] = "".join(f", {name}={row[name]}" for name in names)
    return flat


def save_capacity_plot(
    path: Path, title: str, rows: Sequence[Mapping[str, Any]], unit: str, is_of_rate: bool
) -> tuple[Path, Path]:
    """Draw a line for each system and card, and the Pareto front: answers that serve more than any with as few GPUs. With a single number
    of GPUs, or for GPUs at a given rate, draw bars."""
    from matplotlib.figure import Figure

    if is_of_rate or len({row["gpus"] for row in rows}) == 1:
        titles = {"gpus": "GPUs"} if is_of_rate else {"rate": unit, "longest_ttft_s": "longest wait (s)"}
        if any(row["dollars_per_1000_good"] for row in rows):
            titles["dollars_per_1000_good"] = "$ for 1,000"
        bars = [{"label": f"{row['system']}, {row['platform']}, {row['plan']}", **row, "valid": True} for row in rows]
        return save_plot(path, title, bars, titles)
    front = pareto(rows)
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys((row["system"], row["platform"]) for row in rows):
        points = sorted(
            (row["gpus"], row["rate"]) for row in rows if (row["system"], row["platform"]) == name and row["plan"]
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linewidth=1, label=f"{name[0]}, {name[1]}")
    if front:
        corners = [(row["gpus"], row["rate"]) for row in front]
        axes.plot(*zip(*corners, strict=True), color="#999999", linewidth=4, alpha=0.4, zorder=0, label="Pareto front")
        axes.legend(fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["gpus"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("GPUs")
    axes.set_ylabel(unit)
    obtained = ", ".join(sorted({str(row["obtained"]) for row in rows}))
    figure.suptitle(f"{title} ({obtained})", fontsize="medium", wrap=True)
    csv_rows = [
        {name: value for name, value in row.items() if name != "cell"} | {"is_pareto": row in front} for row in rows
    ]
    return save_drawn(path, figure, csv_rows)


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that serve more than all rows with as few GPUs, sorted by GPUs."""
    best: list[Mapping[str, Any]] = []
    for row in sorted((row for row in rows if row["plan"]), key=lambda each: (each["gpus"], -each["rate"])):
        if not best or row["rate"] > best[-1]["rate"]:
            best.append(row)
    return best
