"""Gains of one contender over another, over all cells, and the cells in which it is behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paper_figures.ampd.attainment import Attainments, Means, cell_interval, floor_of, gains
from paper_figures.ampd.contenders import CONTENDERS, TUNED_BASELINES
from paper_figures.common.words import is_above, is_below, said
from repro.reports.figures import View
from repro.runs.statistics import Interval

CEILING = 0.97
"""Above it a system may be as far as it can get."""


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


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Cells by who is ahead outside noise: by more than the interval of the paired difference."""

    contested: int
    ahead: int
    """It is ahead of every other."""
    behind: int
    """It is behind one of them."""
    texts: tuple[str, ...]
    """Where it is behind, and whom."""

    def __str__(self) -> str:
        return (
            f"ahead of all outside noise in {self.ahead} and behind one in {self.behind} of the {self.contested} cells in which one of them "
            f"is below {100 * CEILING:.0f} %"
        )


def standing(table: Attainments, ours: str, others: Sequence[str]) -> Standing:
    """Over the cells that say something: where all are at the ceiling, nobody can be behind."""
    means, ahead, texts, places = table.means, 0, list[str](), set[tuple[int, int]]()
    contested = [at for at in table.cells if min(float(means[name][at]) for name in (ours, *others)) < CEILING]
    for row, column in contested:
        points = {other: table.at(ours, row, column, less=other) for other in others}
        ahead += all(is_above(each, 1e-7) for each in points.values())
        for other, each in points.items():
            if is_below(each, -1e-7):
                places.add((row, column))
                where = f"{table.panels[row].title} {table.rates[column]:g}/s"
                texts.append(f"{where}: {-(each.mean or 0.0):.2g} points behind {CONTENDERS[other].title}")
    return Standing(contested=len(contested), ahead=ahead, behind=len(places), texts=tuple(texts))


GAINS = (
    ("ampd", "dynamo"),
    ("ampd", "dynamo-tuned"),
    ("ampd-tuned", "dynamo-tuned"),
    ("ampd", "vllm-tuned"),
    ("ours", "ampd"),
    ("ours", "dynamo"),
    ("ours", "dynamo-tuned"),
    ("ampd-tuned", "vllm-tuned"),
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
    for ours in ("ampd", "ours", "ampd-tuned", "ours-tuned"):
        for others, kind in (((TUNED_BASELINES[0],), "tuned Dynamo"), (TUNED_BASELINES, "tuned baselines")):
            at = standing(table, ours, others)
            worse = f"; behind: {'; '.join(at.texts)}" if at.texts and ours.endswith("tuned") else ""
            found.append(f"{CONTENDERS[ours].title} beside {kind}: {at}{worse}.")
    return found
