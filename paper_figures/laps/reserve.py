"""Reserve (ours) against LAPS, SGLang and vLLM from half load to overload, three models: violations, mean, longest TTFT."""

from __future__ import annotations

from paper_figures.common.figure import Page, Table
from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, is_below, number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LATE, LMSYS, LONGEST, MEAN, MODELS, P90_LONG, TOKENS_S
from paper_figures.laps.fig7 import by_load
from paper_figures.laps.layout import laps_figure, laps_page, line
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

NAMES = ("sglang", "sglang-graphs", "vllm", "laps", "reserve")
"""SGLang with the prefill graphs it has by now, too: a baseline gets every advantage ours gets."""
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.05)
PLACES = [(model, load) for model in MODELS for load in LOADS]
SATURATED = 64
"""Clients of the runs that say what the order costs in throughput."""


def at_load(view: View, name: str, model: str, load: float) -> Cell:
    return by_load(view, name, 1, load, model)


def full(view: View, name: str, model: str) -> Cell:
    return CONTENDERS[name].cell(view, LMSYS, {"model": model, "num_instances": 1, "clients": SATURATED})


def cells(view: View) -> list[Cell]:
    asked = [at_load(view, name, *place) for place in PLACES for name in NAMES]
    return [*asked, *(full(view, name, model) for model in MODELS for name in NAMES)]


def panel(runs: Runs, of: Measure, model: str) -> Panel:
    return Panel(
        title=model,
        layers=[
            line(runs, name, LOADS, [at_load(runs.view, name, model, load) for load in LOADS], of) for name in NAMES
        ],
        x=Axis(ticks=LOADS, size=7),
        y=Axis(label=of.label if model == MODELS[0] else None, scale="linear" if of is LATE else "plain log"),
    )


def page(runs: Runs) -> Page:
    capacities = ", ".join(f"{CAPACITY[model]:g}" for model in MODELS)
    return laps_page(
        runs,
        panels=[panel(runs, of, model) for of in (LATE, MEAN, LONGEST) for model in MODELS],
        columns=len(MODELS),
        after_title="; x: load",
        conclusions=[in_how_many(runs), price(runs)],
        about=f"One instance, Poisson turns with LMSYS-Chat-1M's shares. Load 1 is what SGLang PD serves with 256 clients ({capacities} turns/s).",
        table=Table(
            columns=(
                *("model", "load"),
                *(f"{CONTENDERS[name].title}: late % / mean / P90 long ms / longest s" for name in NAMES),
            ),
            rows=[
                (model, f"{load:g}", *(entry(runs, at_load(runs.view, name, model, load)) for name in NAMES))
                for model, load in PLACES
            ],
        ),
    )


def entry(runs: Runs, cell: Cell) -> str:
    mean, long, longest = (number(runs.at(cell, of)) for of in (MEAN, P90_LONG, LONGEST))
    return f"{said(runs.at(cell, LATE))} / {mean:.0f} / {long:.0f} / {longest / 1e3:.1f}"


def in_how_many(runs: Runs) -> str:
    """Settings in which Reserve violates fewer objectives than every other policy."""

    def versus(model: str, load: float) -> list[Interval]:
        """Violations of Reserve minus each other's, points."""
        ours, *others = (at_load(runs.view, name, model, load) for name in reversed(NAMES))
        return [runs.versus(ours, other, LATE, "points") for other in others]

    found = {place: versus(*place) for place in PLACES}
    fewer = [place for place, differences in found.items() if all(map(is_below, differences))]
    more = [place for place, differences in found.items() if any(map(is_above, differences))]
    rest = [place for place in PLACES if place not in fewer and place not in more]
    names = [", ".join(f"{model} at {load:g}" for model, load in places) for places in (rest, more)]
    text = f"Reserve violates fewer objectives than every other policy, outside noise, in {len(fewer)} of {len(PLACES)} cells"
    within = f"; within noise of one of them in {names[0]}" if rest else ""
    return f"{text}{within}; more in {names[1] or 'none'}."


def price(runs: Runs) -> str:
    changes = (
        runs.versus(full(runs.view, "reserve", model), full(runs.view, "sglang", model), TOKENS_S) for model in MODELS
    )
    longest = (number(runs.at(at_load(runs.view, name, MODELS[1], LOADS[-1]), LONGEST)) for name in NAMES)
    waits = [f"{each / 1e3:.1f} s ({CONTENDERS[name].title})" for name, each in zip(NAMES, longest, strict=True)]
    return (
        f"The price: the longest TTFT at a load of {LOADS[-1]:g} is {', '.join(waits)} with {MODELS[1]}; with {SATURATED} clients Reserve prefills "
        f"{', '.join(said(each, '%') for each in changes)} tokens/s against SGLang PD (7B, 14B, 32B)."
    )


FIGURE = laps_figure("reserve", "ours; the objective of LAPS §4.1", page=page, cells=cells)
