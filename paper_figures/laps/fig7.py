"""LAPS Figure 7 (§4.1): SLO violations (TTFT over 0.4 s), one and eight instances: by clients, and by load.

The paper has clients on its axis and calls the arrivals Poisson; both are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from engines.laps.controller import ControllerConfig, PressureController, Signals
from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import Pairs, late, late_of, number, said
from paper_figures.laps.contenders import CAPACITY, CONCURRENCY, CONTENDERS, LMSYS, MIDDLE, PAIRED_SEEDS, seeded
from paper_figures.laps.layout import (
    CSV_COLUMNS,
    csv_rows,
    draw_line,
    finding,
    log_axis,
    obtained_sentence,
    place_of,
    seeds_sentence,
    title_of,
)
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun
from repro.systems.laps.part import part_of

NAME = "fig7"
TITLE = "LAPS Figure 7: SLO violations by concurrency and by load"
SOURCE = "LAPS, Figure 7, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
NAMES: Mapping[int, tuple[str, ...]] = {
    1: ("sglang", "vllm", "laps", "reserve"),
    8: ("sglang", "router", "vllm", "laps", "reserve"),
}
"""With one instance there is nothing to route: the router is SGLang PD."""
CLIENTS: Mapping[int, tuple[int, ...]] = {1: CONCURRENCY, 8: (8, 16, 32, 64, 128)}
LOADS: Mapping[int, tuple[float, ...]] = {1: (0.5, 0.7, 0.8, 0.9, 1.0, 1.05), 8: (0.7, 0.8, 0.9, 1.0)}
"""Of what SGLang PD serves with 256 clients an instance."""
EIGHTS_TURNS = 8000
"""Of an open loop of eight instances: some fifteen seconds, in which a controller can act."""
PAPER_LOAD = 0.9
"""At which the printed numbers are looked at: the paper names none."""
NUM_DECISIONS = 2000


def by_clients(view: View, name: str, instances: int, clients: int, figure: str | None = None) -> Cell:
    knobs: dict[str, Scalar] = {"model": MIDDLE, "num_instances": instances, "clients": clients}
    return CONTENDERS[name].cell(figure, view, LMSYS, knobs)


def by_load(view: View, name: str, instances: int, load: float, figure: str | None = None, model: str = MIDDLE) -> Cell:
    """``transient``: near and past saturation a queue grows; the numbers are of this number of turns."""
    knobs: dict[str, Scalar] = {"model": model, "num_instances": instances, "transient": True}
    if instances > 1:
        knobs["num_prompts"] = EIGHTS_TURNS
    rate = round(load * instances * CAPACITY[model], 3)
    return CONTENDERS[name].cell(figure, view, LMSYS, knobs, rate=rate)


def cells(view: View) -> list[Cell]:
    asked = []
    for instances, names in NAMES.items():
        asked += [by_clients(view, name, instances, clients, NAME) for clients in CLIENTS[instances] for name in names]
        asked += [by_load(view, name, instances, load, NAME) for load in LOADS[instances] for name in names]
    return seeded(asked, view)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.grid_of_panels(
            [f"{_instances(instances)}, {kind}" for instances in NAMES for kind in ("closed loop", "Poisson")],
            columns=2,
        )
        for row, (instances, names) in enumerate(NAMES.items()):
            closed, opened = axes[2 * row : 2 * row + 2]
            for name in names:
                places = CLIENTS[instances]
                asked = [by_clients(view, name, instances, clients) for clients in places]
                draw_line(closed, pairs, CONTENDERS[name], places, asked, late)
                asked = [by_load(view, name, instances, load) for load in LOADS[instances]]
                draw_line(opened, pairs, CONTENDERS[name], LOADS[instances], asked, late)
            log_axis(closed, CLIENTS[instances])
            closed.set_xlabel("clients")
            opened.set_xlabel("load")
            closed.set_ylabel("TTFT over 0.4 s (%)")
            for panel in (closed, opened):
                panel.set_ylim(-3, 103)
            if instances == 8:
                for value, name, title in ((4.7, "router", "printed: router"), (0.0, "laps", "printed: LAPS")):
                    look = CONTENDERS[name]
                    style.paper_marker(opened, PAPER_LOAD, value, color=look.color, marker=look.marker, label=title)
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=2,
            title=title_of(TITLE, view),
            caption=[
                *conclusions(pairs, view),
                obtained_sentence(),
                f"Qwen2.5-14B, LMSYS-Chat-1M's shares. Load 1 is {CAPACITY[MIDDLE]:g} turns/s an instance. The paper names neither load nor model: its values for eight "
                f"instances stand at a load of {PAPER_LOAD:g}.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.6,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("instances", "at", *(CONTENDERS[name].title for name in NAMES[8])),
        rows=tuple(_rows(pairs, view)),
        notes=(*conclusions(pairs, view), *invalid_notes(runs)),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    router, laps, own = (pairs.at(by_load(view, name, 8, PAPER_LOAD), late) for name in ("router", "laps", "reserve"))
    plain = pairs.at(by_load(view, "sglang", 8, PAPER_LOAD), late)
    saved = points(pairs, view, "laps", "sglang", 1, 1.0)
    lost = points(pairs, view, "laps", "sglang", 1, 0.7)
    return [
        f"Eight instances at a load of {PAPER_LOAD:g} violate {said(plain, '%')} round robin, {said(router, '%')} behind SGLang's router, {said(laps, '%')} with LAPS, "
        f"{said(own, '%')} with Reserve.",
        f"On one instance LAPS has {said(saved, 'points')} against SGLang PD at a load of 1, and {said(lost, 'points')} at 0.7: any difference can be had by "
        "choosing the load.",
    ]


def points(pairs: Pairs, view: View, name: str, other: str, instances: int, load: float) -> Interval:
    return pairs.versus(by_load(view, name, instances, load), by_load(view, other, instances, load), late, "points")


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)

    def fall(claim: str, other: str, instances: int) -> Finding:
        """At one load for all, and what other loads give."""
        loads = {load: points(pairs, view, "laps", other, instances, load) for load in LOADS[instances]}
        cell, base = (by_load(view, name, instances, PAPER_LOAD) for name in ("laps", other))
        return finding(
            claim,
            -number(loads[PAPER_LOAD]),
            f"LAPS minus {CONTENDERS[other].title}: {said(loads[PAPER_LOAD], 'points')} ({said(pairs.versus(cell, base, late), '%')}) at a load of {PAPER_LOAD:g}; "
            f"by load {', '.join(f'{each:g}: {number(value):.1f}' for each, value in loads.items())}; Qwen2.5-14B, {_instances(instances)}, Poisson, kappa 0",
        )

    found = [
        fall("laps-slo-single-dp", "sglang", 1),
        fall("laps-slo-single-router", "sglang", 1),
        fall("laps-abs-slo-dp", "sglang", 8),
        fall("laps-abs-slo-router", "router", 8),
    ]
    at = f"Qwen2.5-14B, eight instances, Poisson at {PAPER_LOAD:g} of capacity, kappa 0"
    for claim, name in (("laps-slo-8-zero", "laps"), ("laps-slo-8-router", "router")):
        value = pairs.at(by_load(view, name, 8, PAPER_LOAD), late)
        others = ", ".join(
            f"{load:g}: {number(pairs.at(by_load(view, name, 8, load), late)):.1f} %" for load in LOADS[8]
        )
        found.append(finding(claim, number(value), f"{said(value, '%')}; by load {others}; {at}"))
    found.append(
        finding("laps-slo-threshold", part_of(view.platform).slo_s, "the objective of every run", obtained="computed")
    )
    moves, gap_s = controller_moves()
    found.append(
        finding(
            "laps-controller-single-step",
            float(moves),
            f"most instances moved by one of {NUM_DECISIONS:,} decisions on random signals, {gap_s:g} s apart at least",
            obtained="computed",
        )
    )
    return found


@lru_cache(maxsize=1)
def controller_moves() -> tuple[int, float]:
    """Most instances that one decision of the controller moved, and the least time between two that moved any."""
    draw, controller = random.Random(0), PressureController(ControllerConfig())
    num_short, most, moved_s = 4, 0, [-math.inf]
    for second in range(NUM_DECISIONS):
        # Each pool in turn is the pressed one for a minute: what is random alone averages out, and moves nothing.
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


def _rows(pairs: Pairs, view: View) -> list[tuple[str, ...]]:
    """Violations of all, and of the long ones behind the stroke."""
    found = []
    for instances, names in NAMES.items():
        places = [
            *((f"{clients} clients", by_clients, clients) for clients in CLIENTS[instances]),
            *((f"load {load:g}", by_load, load) for load in LOADS[instances]),
        ]
        for text, ask, place in places:
            shown = []
            for name in NAMES[8]:
                asked = ask(view, name if name in names else "sglang", instances, place)  # type: ignore[operator]
                shown.append(f"{said(pairs.at(asked, late))} / {number(pairs.at(asked, late_of('long'))):.0f}")
            found.append((f"{instances}", text, *shown))
    return found


def _instances(count: int) -> str:
    return f"{count} instance{'s' if count > 1 else ''}"
