"""Gains of one contender over another, over all cells, and the cells in which it is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paper_figures.ampd.compare import HALF_A_SESSION, Means, Table, gains, said
from paper_figures.ampd.contenders import CONTENDERS
from repro.reports.figures import View
from repro.runs.statistics import Interval
from repro.systems.ar.part import ArPart

TUNED_BASELINES = ("dynamo-tuned", "vllm-tuned", "continuum-tuned")
SAME_BASELINES = ("dynamo", "vllm", "continuum")


def floor_of(view: View) -> float:
    num = dict(view.knobs).get("num_prompts", view.platform.part(ArPart).num_sessions)
    assert isinstance(num, int)
    return HALF_A_SESSION / num


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of one contender over another, over all cells, in percent."""

    mean: Interval
    median: Interval
    largest: Interval
    where: str
    """Of the largest."""


def gain_over(table: Table, ours: str, theirs: str, floor: float) -> Gain:
    def percent(means: Means) -> np.ndarray:
        return 100 * (gains(means, ours, theirs, floor) - 1)

    row, column = np.unravel_index(np.nanargmax(percent(table.means)), (len(table.panels), len(table.rates)))
    return Gain(
        mean=table.interval(lambda means: float(np.nanmean(percent(means)))),
        median=table.interval(lambda means: float(np.nanmedian(percent(means)))),
        largest=table.interval(lambda means: float(percent(means)[row, column])),
        where=f"{table.panels[row].title} at {table.rates[column]:g}/s",
    )


def behind(table: Table, ours: str, others: Sequence[str]) -> list[str]:
    """Cells in which a baseline is ahead of ``ours`` by more than the interval of their paired difference."""
    found = []
    for row, panel in enumerate(table.panels):
        for column, rate in enumerate(table.rates):
            for other in others:
                points = table.at(ours, row, column, less=other)
                if points.mean is not None and points.mean < -(points.half_width or 0.0) - 1e-7:
                    found.append(f"{panel.title} {rate:g}/s: {points.mean:.0f} points behind {CONTENDERS[other].title}")
    return found


def count_ahead(table: Table, ours: str, others: Sequence[str]) -> int:
    """Cells in which ``ours`` has at least the mean attainment of each of the others."""
    means = table.means
    best = np.max([means[other] for other in others], axis=0)
    return int((means[ours] >= best - 1e-9).sum())


def summary_notes(table: Table, view: View) -> list[str]:
    floor = floor_of(view)
    found = []
    for ours, theirs in (
        ("ampd", "dynamo"),
        ("ampd", "dynamo-tuned"),
        ("ampd", "vllm-tuned"),
        ("ours", "ampd"),
        ("ours", "dynamo"),
        ("ours", "dynamo-tuned"),
        ("ours-tuned", "dynamo-tuned"),
        ("ours-tuned", "vllm-tuned"),
    ):
        gain = gain_over(table, ours, theirs, floor)
        found.append(
            f"{CONTENDERS[ours].title} over {CONTENDERS[theirs].title}: mean {said(gain.mean, '%')}, median "
            f"{said(gain.median, '%')}, largest {said(gain.largest, '%')} ({gain.where})."
        )
    cells = len(table.panels) * len(table.rates)
    for ours, others in (("ampd", TUNED_BASELINES), ("ours", TUNED_BASELINES), ("ours-tuned", TUNED_BASELINES)):
        worse = behind(table, ours, others)
        cut = len({text.partition(":")[0] for text in worse})
        text = f"{CONTENDERS[ours].title} is ahead of or equal to every tuned baseline, outside noise, in {cells - cut} of "
        text += f"{cells} cells"
        found.append(f"{text}; not in: {'; '.join(worse)}." if worse and ours == "ours-tuned" else f"{text}.")
    return found
