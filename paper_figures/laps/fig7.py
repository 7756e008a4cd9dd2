"""LAPS Figure 7: SLO violations by concurrency and by load.

The paper has clients on its axis, but calls the arrivals Poisson; we draw both.
"""

import math
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise

from engines.laps.system import ControllerConfig, PressureController, Signals
from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Guide, Layer, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, plural, said
from paper_figures.laps.contenders import CAPACITY, CONCURRENCY, CONTENDERS, LMSYS, MIDDLE, rate_of
from paper_figures.laps.layout import doubling, laps_figure, laps_page, line
from paper_figures.laps.measures import CUT, LATE, LATE_1K, LONGEST
from repro.families.platforms import PrefillPart
from repro.reports.claims import Finding, stated
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval

NAMES: Mapping[int, tuple[str, ...]] = {
    1: ("sglang", "vllm", "laps", "reserve"),
    8: ("sglang", "router", "vllm", "laps", "reserve"),
}
"""Contenders by number of instances. With one there is nothing to route, so the router is SGLang PD."""
CLIENTS: Mapping[int, tuple[int, ...]] = {1: CONCURRENCY, 8: (8, 16, 32, 64, 128)}
LOADS: Mapping[int, tuple[float, ...]] = {1: (0.5, 0.7, 0.8, 0.9, 1.0, 1.05), 8: (0.7, 0.8, 0.9, 1.0)}
"""Shares of the rate that SGLang PD serves with 256 clients an instance."""
EIGHTS_TURNS = 8000
"""Turns of an open loop on eight instances: about fifteen seconds, in which a controller can act."""
PAPER_LOAD = 0.9
"""The load at which we look at the printed numbers; the paper names none."""
PRINTED = {"router": "laps-slo-8-router", "laps": "laps-slo-8-zero"}
"""Claims that state violations on eight instances."""
NUM_DECISIONS = 2000


def by_clients(view: View, name: str, instances: int, clients: float) -> Cell:
    knobs: dict[str, Scalar] = {"model": MIDDLE, "num_instances": instances, "clients": clients}
    return CONTENDERS[name].cell(view, LMSYS, knobs)


def by_load(view: View, name: str, instances: int, load: float, model: str = MIDDLE) -> Cell:
    """``transient`` is set because near and past saturation a queue grows; the numbers depend on this number of turns."""
    knobs: dict[str, Scalar] = {"model": model, "num_instances": instances, "transient": True}
    if instances > 1:
        knobs["num_prompts"] = EIGHTS_TURNS
    return CONTENDERS[name].cell(view, LMSYS, knobs, rate=rate_of(load, model, instances))


LOOPS: Mapping[str, tuple[Callable[[View, str, int, float], Cell], Mapping[int, tuple[float, ...]]]] = {
    "clients": (by_clients, CLIENTS),
    "load": (by_load, LOADS),
}
"""A closed loop, and Poisson arrivals: how to make a cell, and places by number of instances."""


def cells(view: View) -> list[Cell]:
    return [
        ask(view, name, instances, place)
        for instances, names in NAMES.items()
        for ask, places in LOOPS.values()
        for place in places[instances]
        for name in names
    ]


def late(runs: Runs, name: str, instances: int, load: float) -> Interval:
    return runs.at(by_load(runs.view, name, instances, load), LATE)


def points(runs: Runs, name: str, other: str, instances: int, load: float) -> Interval:
    ours, theirs = (by_load(runs.view, each, instances, load) for each in (name, other))
    return runs.versus(ours, theirs, LATE, "points")


def page(runs: Runs) -> Page:
    router, laps, ours, plain = (
        said(late(runs, name, 8, PAPER_LOAD), "%") for name in ("router", "laps", "reserve", "sglang")
    )
    saved, lost = (said(points(runs, "laps", "sglang", 1, load), "points") for load in (1.0, 0.7))
    return laps_page(
        runs,
        panels=[panel(runs, instances, loop) for instances in NAMES for loop in LOOPS],
        columns=2,
        conclusions=[
            f"Eight instances at a load of {PAPER_LOAD:g} violate {plain} round robin, {router} behind SGLang's router, {laps} with LAPS, {ours} with Reserve.",
            f"On one instance LAPS has {saved} against SGLang PD at a load of 1, and {lost} at 0.7: any difference can be had by choosing the load.",
            reserves_price(runs),
        ],
        about=f"Qwen2.5-14B, LMSYS-Chat-1M's shares. Load 1 is {CAPACITY[MIDDLE]:g} turns/s an instance. The paper names neither load nor model: its values for "
        f"eight instances are dotted lines; of one instance it prints differences alone. {CUT}",
    )


def reserves_price(runs: Runs) -> str:
    clients = CLIENTS[8][-1]
    router, own = (by_clients(runs.view, name, 8, clients) for name in ("router", "reserve"))
    waits = [number(runs.at(cell, LONGEST)) / 1e3 for cell in (own, router)]
    return (
        f"Above 1,000 tokens, eight instances with {clients} clients: Reserve has {said(runs.at(own, LATE_1K), '%')} late, SGLang's router "
        f"{said(runs.at(router, LATE_1K), '%')}, of all turns {said(runs.at(own, LATE), '%', 2)} and {said(runs.at(router, LATE), '%', 2)}; "
        f"the longest TTFT is {waits[0]:.1f} and {waits[1]:.1f} s."
    )


def panel(runs: Runs, instances: int, loop: str) -> Panel:
    ask, by_instances = LOOPS[loop]
    places, is_closed = by_instances[instances], loop == "clients"
    layers: list[Layer] = [
        line(runs, name, places, [ask(runs.view, name, instances, place) for place in places], LATE)
        for name in NAMES[instances]
    ]
    if instances == 8:
        for name, title in (("router", "printed: router"), ("laps", "printed: LAPS")):
            color, value = CONTENDERS[name].look.color, stated("laps", PRINTED[name])
            layers.append(Guide(value=value, label=title, is_printed=True, linestyle=":", color=color, width=1.4))
    return Panel(
        title=f"{plural(instances, 'instance')}, {'closed loop' if is_closed else 'Poisson'}",
        layers=layers,
        x=doubling(places, loop) if is_closed else Axis(label=loop, ticks=places),
        y=Axis(label=LATE.label, better="lower", limits=(-3, 105) if instances == 1 else (-2, None)),
    )


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    def by_loads(instances: int, value: Callable[[float], Interval], unit: str = "") -> str:
        return ", ".join(f"{load:g}: {number(value(load)):.1f}{unit}" for load in LOADS[instances])

    def fall(claim: str, other: str, instances: int) -> Finding:
        """Judge a claim at one load for all, and tell what other loads give."""
        gap = points(runs, "laps", other, instances, PAPER_LOAD)
        ours, theirs = (by_load(runs.view, name, instances, PAPER_LOAD) for name in ("laps", other))
        texts = by_loads(instances, lambda load: points(runs, "laps", other, instances, load))
        how = (
            f"LAPS minus {CONTENDERS[other].title}: {said(gap, 'points')} ({said(runs.versus(ours, theirs, LATE), '%')}) at a load of {PAPER_LOAD:g}; "
            f"by load {texts}; Qwen2.5-14B, {plural(instances, 'instance')}, Poisson, kappa 0"
        )
        percent = number(runs.versus(ours, theirs, LATE))
        readings = [
            (f"points at {load:g}", -number(points(runs, "laps", other, instances, load))) for load in LOADS[instances]
        ]
        readings.append((f"percent at {PAPER_LOAD:g}", -percent))
        return runs.finding(claim, -number(gap), how, readings=tuple(readings), is_between=True)

    def eight(name: str) -> Finding:
        value, others = late(runs, name, 8, PAPER_LOAD), by_loads(8, lambda load: late(runs, name, 8, load), " %")
        loads = tuple((f"load {load:g}", number(late(runs, name, 8, load))) for load in LOADS[8])
        at = f"Qwen2.5-14B, eight instances, Poisson at {PAPER_LOAD:g} of capacity, kappa 0"
        return runs.finding(
            PRINTED[name], number(value), f"{said(value, '%')}; by load {others}; {at}", readings=loads, is_between=True
        )

    moves, gap_s = controller_moves()
    decisions = (
        f"most instances moved by one of {NUM_DECISIONS:,} decisions on random signals, {gap_s:g} s apart at least"
    )
    slo_s = runs.view.platform.part(PrefillPart).slo_s
    return [
        fall("laps-slo-single-dp", "sglang", 1),
        fall("laps-slo-single-router", "sglang", 1),
        fall("laps-abs-slo-dp", "sglang", 8),
        fall("laps-abs-slo-router", "router", 8),
        eight("laps"),
        eight("router"),
        runs.finding("laps-slo-threshold", slo_s, "the objective of every run", obtained="computed"),
        runs.finding("laps-controller-single-step", float(moves), decisions, obtained="computed"),
    ]


@lru_cache(maxsize=1)
def controller_moves() -> tuple[int, float]:
    """Return the most instances that one decision of the controller moved, and the shortest time between two moves."""
    draw, controller = random.Random(0), PressureController(ControllerConfig())
    num_short, most, moved_s = 4, 0, [-math.inf]
    for second in range(NUM_DECISIONS):
        # Each pool in turn is under pressure for a minute; purely random signals average out, and move nothing.
        backlogs_s = (4.0, 0.2) if second // 60 % 2 else (0.2, 4.0)
        pools = [
            [Signals(draw.expovariate(1 / mean_s), draw.random(), draw.random()) for _ in range(count)]
            for count, mean_s in zip((num_short, 8 - num_short), backlogs_s, strict=True)
        ]
        grows = controller.decide(pools[0], pools[1], float(second)).grows
        change = 0 if grows is None else 1 if grows == "short" else -1
        num_short += change
        most = max(most, abs(change))
        if change:
            moved_s.append(float(second))
    return most, min(later - before for before, later in pairwise(moved_s))


FIGURE = laps_figure("fig7", "LAPS, Figure 7, §4.1", page=page, cells=cells, findings=findings)
