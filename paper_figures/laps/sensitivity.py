"""LAPS sensitivity: On-time beside SRPT and SGLang where beliefs are wrong, lengths are misjudged, or traffic is another.

Compares late turns at three loads in runs of 15,000 turns, without a search. SRPT and SGLang have the steps that their searches choose
most often (``laps/orders``). A load is relative to what SGLang serves in the same condition with 256 clients.
"""

from collections.abc import Mapping
from typing import NamedTuple

from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, is_below, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LARGE, LMSYS, MIDDLE, SMALL
from paper_figures.laps.layout import laps_figure
from paper_figures.laps.measures import LATE, LONGEST, MEAN, P99
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

LOADS = (0.8, 0.95, 1.05)
TURNS = 15_000
SEEDS = 5
OURS = "on-time"
STEPS: Mapping[str, Mapping[str, Scalar]] = {
    OURS: {},
    "srpt": {"min_step_s": 0.025, "max_step_s": 0.075, "backlog_share": 0.5},
    "sglang": {"max_num_batched_tokens": 2048},
}
FEWER, MORE, NONE = "fewer", "more", "no difference shown"


class Condition(NamedTuple):
    capacity: float
    """Turns/s that SGLang serves with 256 clients; a load of 1."""
    knobs: Mapping[str, Scalar] = {}
    policy: Mapping[str, Scalar] = {}
    """Further settings for policies that look at lengths."""
    model: str = MIDDLE


USUAL = CAPACITY[MIDDLE]
CONDITIONS = {
    "as believed": Condition(USUAL),
    "steps of short and long prompts 20 % slower": Condition(69.6, {"kappa": 0.2}),
    "the same 20 % faster": Condition(103.7, {"kappa": -0.2}),
    "lengths misjudged, sigma 0.5": Condition(USUAL, policy={"misjudged": 0.5}),
    "lengths hardly known, sigma 2": Condition(USUAL, policy={"misjudged": 2.0}),
    "prompts of 150 to 250 tokens": Condition(119.5, {"min_tokens": 150, "max_tokens": 250}),
    "bursts (gamma, 0.25)": Condition(USUAL, {"arrivals": "gamma", "burstiness": 0.25}),
    "7B": Condition(CAPACITY[SMALL], model=SMALL),
    "32B": Condition(CAPACITY[LARGE], model=LARGE),
}


def cell(view: View, name: str, condition: str, load: float) -> Cell:
    capacity, knobs, policy, model = CONDITIONS[condition]
    settings = {**knobs, **STEPS[name], **({} if name == "sglang" else policy)}
    defaults: dict[str, Scalar] = {"model": model, "transient": True, "num_prompts": TURNS}
    return CONTENDERS[name].cell(view, LMSYS, {**defaults, **settings}, rate=round(load * capacity, 3))


def cells(view: View) -> list[Cell]:
    return [cell(view, name, condition, load) for condition in CONDITIONS for load in LOADS for name in STEPS]


def rows(runs: Runs, condition: str, load: float) -> list[tuple[str | float, ...]]:
    lines: list[tuple[str | float, ...]] = []
    for measure in (LATE, MEAN, P99, LONGEST):
        row_cells = [cell(runs.view, name, condition, load) for name in STEPS]
        verdicts = [verdict(runs, row_cells[0], rival, measure) for rival in row_cells[1:]]
        lines.append((condition, load, measure.label, *(said(runs.at(each, measure)) for each in row_cells), *verdicts))
    return lines


def verdict(runs: Runs, ours: Cell, theirs: Cell, of: Measure) -> str:
    """Tell whether ours has fewer or more than theirs, outside noise."""
    gap = runs.versus(ours, theirs, of, "points")
    return FEWER if is_below(gap) else MORE if is_above(gap) else NONE


def page(runs: Runs) -> Page:
    all_rows = [row for condition in CONDITIONS for load in LOADS for row in rows(runs, condition, load)]
    late = [row for row in all_rows if row[2] == LATE.label]
    notes = [
        f"Late turns of On-time against {CONTENDERS[name].title}: fewer, outside noise, in {sum(row[i] == FEWER for row in late)} of "
        f"{len(late)} cells, more in {sum(row[i] == MORE for row in late)}."
        for i, name in enumerate(list(STEPS)[1:], start=3 + len(STEPS))
    ]
    titles = [CONTENDERS[name].title for name in STEPS]
    columns = ("condition", "load", "measure", *titles, *(f"On-time than {title}" for title in titles[1:]))
    return Page(table=Table(columns=columns, rows=all_rows), notes=notes)


FIGURE = laps_figure("sensitivity", "ours; the objective of LAPS §4.1", page=page, cells=cells, num_runs=SEEDS)
