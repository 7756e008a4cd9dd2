"""LAPS tuned: every system by our defaults, and with its free knobs searched."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import number, plural, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, MODELS, rate_of, tuned
from paper_figures.laps.fig7 import EIGHTS_TURNS
from paper_figures.laps.layout import knee, laps_figure, laps_page, line
from paper_figures.laps.measures import CUT, LATE, LATE_1K, LONGEST
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.tuning import CANDIDATES, TRIALS


class Place(NamedTuple):
    model: str
    instances: int

    @property
    def title(self) -> str:
        return f"{self.model}, {plural(self.instances, 'instance')}"


PLACES = (*(Place(model, 1) for model in MODELS), Place(MIDDLE, 8))
NAMES: Mapping[int, tuple[str, ...]] = {
    1: ("sglang", "vllm", "laps", "srpt", "reserve"),
    8: ("router", "laps", "srpt", "reserve"),
}
UNDRAWN = ("vllm",)
"""Shown only in the table: with it a panel would have ten lines, and it lies next to SGLang PD."""
TICKS = (0.5, 0.7, 0.9, 1.05, 1.2)
LOADS: Mapping[int, tuple[float, ...]] = {1: (0.5, 0.7, 0.8, 0.9, 1.0, 1.05, 1.2), 8: (0.7, 0.8, 0.9, 1.0, 1.1)}
NEAR = 0.9


def cell(view: View, name: str, is_tuned: bool, place: Place, load: float) -> Cell:
    knobs: dict[str, Scalar] = {"model": place.model, "num_instances": place.instances, "transient": True}
    if place.instances > 1:
        knobs["num_prompts"] = EIGHTS_TURNS
    contender = tuned(name) if is_tuned else CONTENDERS[name]
    return contender.cell(view, LMSYS, knobs, rate=rate_of(load, place.model, place.instances))


def cells(view: View) -> list[Cell]:
    return [
        cell(view, name, is_tuned, place, load)
        for place in PLACES
        for load in LOADS[place.instances]
        for name in NAMES[place.instances]
        for is_tuned in (False, True)
    ]


def panel(runs: Runs, of: Measure, place: Place) -> Panel:
    loads = LOADS[place.instances]
    return Panel(
        title=place.title,
        layers=[
            replace(
                line(
                    runs,
                    name,
                    loads,
                    [cell(runs.view, name, is_tuned, place, load) for load in loads],
                    of,
                    tuned(name).title if is_tuned else "",
                    linestyle="-" if is_tuned else "--",
                ),
                is_drawn=name not in UNDRAWN,
            )
            for name in NAMES[place.instances]
            for is_tuned in (False, True)
        ],
        x=Axis(label="load", ticks=TICKS),
        y=Axis(label=of.label, better=of.better, scale="plain log" if of is LONGEST else "linear"),
    )


def page(runs: Runs) -> Page:
    capacities = ", ".join(f"{CAPACITY[model]:g}" for model in MODELS)
    return laps_page(
        runs,
        panels=[panel(runs, of, place) for place in PLACES for of in (LATE, LATE_1K, LONGEST)],
        columns=3,
        after_title="; dashed: not tuned",
        conclusions=[*(near(runs, place) for place in PLACES), *(knees(runs, place) for place in PLACES)],
        about=f"Dashed: not tuned, which is as printed, and our defaults where nothing is printed; nothing of SRPT and Reserve is. Through: the free knobs (docs/tuning.md) of every system set by one search of up to {CANDIDATES} "
        f"candidates and {TRIALS} simulated trials on other seeds, for the fewest late turns. Poisson turns with LMSYS-Chat-1M's shares; load 1 is "
        f"{capacities} turns/s an instance. vLLM PD is in the table and the CSV, and not drawn. {CUT}",
    )


def near(runs: Runs, place: Place) -> str:
    texts = []
    for name in NAMES[place.instances]:
        plain, best = (cell(runs.view, name, is_tuned, place, NEAR) for is_tuned in (False, True))
        texts.append(
            f"{CONTENDERS[name].title} {said(runs.at(plain, LATE))} -> {said(runs.at(best, LATE))} % "
            f"(longest {number(runs.at(plain, LONGEST)) / 1e3:.1f} -> {number(runs.at(best, LONGEST)) / 1e3:.1f} s)"
        )
    return f"{place.title} at a load of {NEAR:g}, late, not tuned -> tuned: {'; '.join(texts)}."


def knees(runs: Runs, place: Place) -> str:
    loads = LOADS[place.instances]
    texts = [
        f"{CONTENDERS[name].title} "
        + " -> ".join(knee(runs, partial(cell, runs.view, name, is_tuned, place), loads) for is_tuned in (False, True))
        for name in NAMES[place.instances]
    ]
    return f"{place.title}, load at which one turn in ten is late: {'; '.join(texts)}."


FIGURE = laps_figure("tuned", "ours; what LAPS §3 and §4.1 leave open", page=page, cells=cells)
