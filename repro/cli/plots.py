"""A plot of what a command has shown as a table, and the CSV behind it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engines.errors import UserError
from repro.files import replace_all, writable_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.runs.store import StoredRun

_TITLES = {"throughput_tok_s": "throughput (tok/s)", "mean_latency_s": "mean latency (s)"}
"""Column -> its axis; a panel each."""


def titles_of(runs: Sequence[StoredRun], titles: Mapping[str, str] = _TITLES) -> Mapping[str, str]:
    """Axes of these runs' columns: where all end at their first token, turns/s and TTFT."""
    if not all(run.family.ends_at_first_token for run in runs):
        return titles
    return {name: said.replace("tok/s", "turns/s").replace("latency", "TTFT") for name, said in titles.items()}


def check_plot(path: Path, *read: str | Path) -> None:
    """Before any work: whether there can be such a file, and its CSV beside it. ``read`` are the paths of files that the
    command reads."""
    if path.suffix not in (".png", ".pdf"):
        raise UserError(f"plot={str(path)!r} is no file of a plot: give one that ends in .png or .pdf")
    for file in (path, path.with_suffix(".csv")):
        writable_file("plot", file, *map(Path, read))


def save_plot(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str] = _TITLES,
    guides: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Path, Path]:
    """``rows`` have a ``label``, how they were ``obtained``, the columns of ``titles`` (None where unknown), of repeats half the
    widths of their intervals as ``COLUMN_half``, or their ends as ``COLUMN_low`` and ``COLUMN_high``, and others; all go into the
    CSV. A column of ``guides`` gets a line there, and points instead of bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 3 * len(titles), 1.2 + 0.35 * len(rows)), layout="constrained")
    (panels,) = figure.subplots(1, len(titles), sharey=True, squeeze=False)
    labels = [f"{row['label']}{'' if row['valid'] else ' (INVALID)'}" for row in rows]
    for axes, (column, said) in zip(panels, titles.items(), strict=True):
        arms = [_arms(row, column) for row in rows]
        error = {"xerr": list(zip(*arms, strict=True)), "capsize": 3} if any(map(any, arms)) else {}
        if column in guides:
            axes.axvline(guides[column], color="#888888", linestyle="--", linewidth=1)
            values = [math.nan if row[column] is None else row[column] for row in rows]
            axes.errorbar(values, range(len(rows)), fmt="o", color="#4477aa", **error)
        else:
            axes.barh(range(len(rows)), [row[column] or 0 for row in rows], color="#4477aa", **error)
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlabel(said)
    panels[0].invert_yaxis()
    obtained = ", ".join(sorted({str(row["obtained"]) for row in rows}))
    figure.suptitle(f"{title} ({obtained})", fontsize="medium")
    return save_drawn(path, figure, rows)


def _arms(row: Mapping[str, Any], column: str) -> tuple[float, float]:
    """Distances from a value to its interval's ends."""
    value, low, high = (row.get(name) for name in (column, f"{column}_low", f"{column}_high"))
    if value is not None and low is not None and high is not None:
        return value - low, high - value
    half = row.get(f"{column}_half") or 0
    # Nothing that is plotted is below nothing.
    return min(half, value or 0), half


def save_drawn(path: Path, figure: Figure, rows: Sequence[Mapping[str, Any]]) -> tuple[Path, Path]:
    """The figure, and the rows behind it as a CSV of the same name."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    beside = path.with_suffix(".csv")
    replace_all({path: drawn.getvalue(), beside: text.getvalue().encode()})
    return path, beside
