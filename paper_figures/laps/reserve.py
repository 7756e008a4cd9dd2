"""LAPS Reserve: violations from half load to overload."""

from collections.abc import Sequence
from functools import partial

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, is_below, number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MODELS
from paper_figures.laps.fig7 import by_load
from paper_figures.laps.layout import knee, laps_figure, laps_page, line
from paper_figures.laps.measures import CUT, LATE, LATE_1K, LONGEST, MEAN, P90_1K, TOKENS_S
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

PUBLISHED = ("sglang", "sglang-graphs", "vllm", "laps")
"""SGLang also runs with the prefill graphs that it has by now: a baseline gets every advantage that ours gets."""
NAMES = (*PUBLISHED, "srpt", "reserve")
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.05, 1.2)
"""Loads up to where every system has one turn in ten late, or some system never has."""
TICKS = (0.5, 0.7, 0.9, 1.05, 1.2)
PLACES = [(model, load) for model in MODELS for load in LOADS]
FEW = 4
SATURATED = 64
"""Clients of the runs that tell what the order costs in throughput."""


def at_load(view: View, name: str, model: str, load: float) -> Cell:
    return by_load(view, name, 1, load, model)


def full(view: View, name: str, model: str) -> Cell:
    return CONTENDERS[name].cell(view, LMSYS, {"model": model, "num_instances": 1, "clients": SATURATED})


def cells(view: View) -> list[Cell]:
    at_loads = [at_load(view, name, *place) for place in PLACES for name in NAMES]
    return [*at_loads, *(full(view, name, model) for model in MODELS for name in NAMES)]


def panel(runs: Runs, of: Measure, model: str) -> Panel:
    return Panel(
        title=model,
        layers=[
            line(runs, name, LOADS, [at_load(runs.view, name, model, load) for load in LOADS], of) for name in NAMES
        ],
        x=Axis(label="load", ticks=TICKS),
        y=Axis(label=of.label, better=of.better, scale="linear" if of in (LATE, LATE_1K) else "plain log"),
    )


def page(runs: Runs) -> Page:
    capacities = ", ".join(f"{CAPACITY[model]:g}" for model in MODELS)
    return laps_page(
        runs,
        panels=[panel(runs, of, model) for of in (LATE, LATE_1K, MEAN, LONGEST) for model in MODELS],
        columns=len(MODELS),
        conclusions=[in_how_many(runs, PUBLISHED), in_how_many(runs, ("srpt",)), price(runs), knees(runs)],
        about=f"One instance, Poisson turns with LMSYS-Chat-1M's shares. SGLang PD with and without prefill graphs is nearly one line. Load 1 is what SGLang PD serves with 256 clients ({capacities} turns/s). {CUT}",
    )


def in_how_many(runs: Runs, others: Sequence[str]) -> str:
    """Tell in how many settings Reserve violates fewer objectives than each of the others."""

    def versus(model: str, load: float) -> list[Interval]:
        """Return Reserve's violations minus each other's, in points."""
        ours, *theirs = (at_load(runs.view, name, model, load) for name in ("reserve", *others))
        return [runs.versus(ours, other, LATE, "points") for other in theirs]

    by_place = {place: versus(*place) for place in PLACES}
    fewer = [place for place, differences in by_place.items() if all(map(is_below, differences))]
    more = [place for place, differences in by_place.items() if any(map(is_above, differences))]
    rest = [place for place in PLACES if place not in fewer and place not in more]
    names = [_told(places) for places in (rest, more)]
    rivals = " and ".join(dict.fromkeys(CONTENDERS[name].title.partition(",")[0] for name in others))
    text = f"Reserve violates fewer objectives than {rivals}, outside noise, in {len(fewer)} of {len(PLACES)} cells"
    within = f"; within noise{' of one of them' if len(others) > 1 else ''} in {names[0]}" if rest else ""
    return f"{text}{within}; more in {names[1] or 'none'}."


def _told(places: Sequence[tuple[str, float]]) -> str:
    """Name the places if they are few, else count them."""
    return ", ".join(f"{model} at {load:g}" for model, load in places) if len(places) <= FEW else str(len(places))


def knees(runs: Runs) -> str:
    texts = [
        f"{CONTENDERS[name].title} {', '.join(knee(runs, partial(at_load, runs.view, name, model), LOADS) for model in MODELS)}"
        for name in NAMES
    ]
    return f"Load at which one turn in ten is late (7B, 14B, 32B): {'; '.join(texts)}."


def price(runs: Runs) -> str:
    changes = (
        runs.versus(full(runs.view, "reserve", model), full(runs.view, "sglang", model), TOKENS_S) for model in MODELS
    )
    who = ("sglang", "laps", "srpt", "reserve")

    def of_each(of: Measure, load: float, scale: float = 1.0) -> str:
        values = [number(runs.at(at_load(runs.view, name, MODELS[1], load), of)) for name in who]
        return " / ".join(f"{scale * value:.1f}" for value in values)

    above = "; ".join(
        f"at {load:g} {of_each(LATE_1K, load)} % late, P90 {of_each(P90_1K, load, 1e-3)} s, longest TTFT {of_each(LONGEST, load, 1e-3)} s"
        for load in (0.7, 0.9, 1.05)
    )
    return (
        f"The price is paid by prompts above 1,000 tokens ({MODELS[1]}; {' / '.join(CONTENDERS[name].title for name in who)}): {above}. With {SATURATED} "
        f"clients Reserve prefills {', '.join(said(change, '%') for change in changes)} tokens/s against SGLang PD (7B, 14B, 32B)."
    )


FIGURE = laps_figure("reserve", "ours; the objective of LAPS §4.1", page=page, cells=cells)
