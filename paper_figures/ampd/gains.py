"""Gains of one contender over another, over all cells, and the cells in which it is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paper_figures.ampd.attainment import Attainments, Means, cell_interval, floor_of, gains
from paper_figures.ampd.contenders import CONTENDERS, TUNED_BASELINES
from paper_figures.common.words import is_below, said
from repro.reports.figures import View
from repro.runs.statistics import Interval


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one contender gains over another, over all cells, in percent."""

    mean: Interval
    median: Interval
    largest: Interval
    where: str
    """The cell of the largest."""


def gain_over(table: Attainments, ours: str, theirs: str, floor: float) -> Gain:
    def percent(means: Means) -> np.ndarray:
        return 100 * (gains(means, ours, theirs, floor) - 1)

    row, column = np.unravel_index(np.nanargmax(percent(table.means)), (len(table.panels), len(table.rates)))
    return Gain(
        mean=table.interval(lambda means: float(np.nanmean(percent(means)))),
        median=table.interval(lambda means: float(np.nanmedian(percent(means)))),
        largest=cell_interval(table, ours, theirs, int(row), int(column), floor),
        where=table.place(int(row), int(column)),
    )


def behind(table: Attainments, ours: str, others: Sequence[str]) -> list[str]:
    """Cells in which a baseline is ahead of ``ours`` by more than the interval of their paired difference."""
    found = []
    for row, column in table.cells:
        for other in others:
            points = table.at(ours, row, column, less=other)
            if is_below(points, -1e-7):
                where = f"{table.panels[row].title} {table.rates[column]:g}/s"
                found.append(f"{where}: {points.mean:.0f} points behind {CONTENDERS[other].title}")
    return found


def count_ahead(table: Attainments, ours: str, others: Sequence[str]) -> int:
    """Cells in which ``ours`` has at least the mean attainment of each of the others."""
    means = table.means
    best = np.max([means[other] for other in others], axis=0)
    return int((means[ours] >= best - 1e-9).sum())


def count_not_behind(table: Attainments, texts: Sequence[str]) -> int:
    """Cells that none of the texts of ``behind`` names."""
    return table.num_cells - len({text.partition(":")[0] for text in texts})


GAINS = (
    ("ampd", "dynamo"),
    ("ampd", "dynamo-tuned"),
    ("ampd", "vllm-tuned"),
    ("ours", "ampd"),
    ("ours", "dynamo"),
    ("ours", "dynamo-tuned"),
    ("ours-tuned", "dynamo-tuned"),
    ("ours-tuned", "vllm-tuned"),
)


def summary_notes(table: Attainments, view: View) -> list[str]:
    found = []
    for ours, theirs in GAINS:
        gain = gain_over(table, ours, theirs, floor_of(view))
        found.append(
            f"{CONTENDERS[ours].title} over {CONTENDERS[theirs].title}: mean {said(gain.mean, '%')}, median "
            f"{said(gain.median, '%')}, largest {said(gain.largest, '%')} ({gain.where})."
        )
    for ours in ("ampd", "ours", "ours-tuned"):
        worse = behind(table, ours, TUNED_BASELINES)
        text = (
            f"{CONTENDERS[ours].title} is ahead of or equal to every tuned baseline, outside noise, in "
            f"{count_not_behind(table, worse)} of {table.num_cells} cells"
        )
        found.append(f"{text}; not in: {'; '.join(worse)}." if worse and ours == "ours-tuned" else f"{text}.")
    return found
