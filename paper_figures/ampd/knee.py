"""AMPD knee: the rate at which attainment falls to 90 %, panel by panel.

At Figure 4's rates most systems attain 100 %, which tells nothing about them. Here a panel's rates are multiples of what the prefill
workers of Table 2's plan keep up with, up to where all systems fall. Panels in which tuned systems fall late get higher rates. Tuned
deployments are searched for some of the rates. Panels are three models by four traces. For other models and traces, what a mean over them
tells is an interval of crossed effects.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from engines.policies.views import Chunk
from paper_figures.ampd.attainment import ATTAINED, Ask, Attainments, Floats, Means, ends_of_logs, tabulate
from paper_figures.ampd.contenders import CONTENDERS, MODELS, PAIRS, TRACES, TracePanel, panel_of, panels
from paper_figures.ampd.layout import DEFAULT, SWITCHES, ampd_figure, over_rates, repeats_of
from paper_figures.common.figure import Page, Picture, Table, seed_by_seed
from paper_figures.common.panel import OF_SHARES, Axis, Guide, Layer, Line, Panel, Points
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.common.style import GUIDE_COLOR, Look
from repro.families.cluster.ampd import DYNAMO_SIM
from repro.families.cluster.ampd_settings import resolve
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.workloads.sessions import load_session_card

ON_PLAN = ("ampd", "ours", "dynamo", "dynamo-own", "vllm")
TUNED = ("ampd-tuned", "ours-tuned", "dynamo-tuned", "vllm-tuned")
SHOWN = (*ON_PLAN, *TUNED)
DRAWN = ("ampd", "ampd-tuned", "ours-tuned", "dynamo", "dynamo-tuned", "vllm-tuned")
LEVEL = 0.9
MULTIPLES = (0.2, 0.3, 0.45, 0.65, 0.85, 1.1, 1.4, 1.8, 2.3)
BEYOND = (3.2, 4.5, 6.4)
STEEP = (*((model, "gaia") for model in MODELS), ("Llama-3.1-70B", "dureader"))
"""Panels that have the ``BEYOND`` rates too."""
TUNED_FOR = (0.45, 0.85, 1.4, 2.3, 3.2, 6.4)
"""Multiples for which we search deployments; other rates use that of the next multiple. A search for a single high rate would sacrifice
one objective, as most systems' knees lie below it."""
SEEDS = 5
ABOVE = 1.12
"""The arrow for a value beyond the rates stands at this many times its height."""
P99 = Measure(path="ttft_rounds_s/p99")
LONGEST = Measure(path="ttft_longest_s")


@cache
def _keeps_up(platform: str, knobs: Knobs, model: str, trace: str) -> float:
    panel = panel_of(model, trace)
    plan = panel.plans[0]
    merged = (*knobs, ("model", panel.model))
    cell = Cell(
        system="dynamo-sim", dataset=panel.trace, platform=platform, executor="roofline", rate=1.0, seed=0, knobs=merged
    )
    ground = resolve(cell, DYNAMO_SIM).ground
    (pool,) = plan.prefill
    cost, sessions = ground.hardware.cost(pool.degree, is_remote=True), ground.sampled().sessions
    total_s = 0.0
    for session in sessions:
        history = 0
        for turn in session.rounds:
            total_s += cost.step_s([Chunk(history, turn.prefill_tokens)], 0, 0)
            history += turn.prefill_tokens + turn.decode_tokens
    return short_rate(pool.replicas * len(sessions) / total_s)


def short_rate(rate: float) -> float:
    """Round to two digits."""
    return float(f"{rate:.2g}")


def keeps_up(view: View, panel: TracePanel) -> float:
    """Sessions/s that fully occupy the prefill workers of Table 2's first plan."""
    return _keeps_up(view.platform.name, view.knobs, panel.model, panel.trace)


def multiples_of(view: View) -> tuple[float, ...]:
    """Multiples of ``keeps_up``; rates that a user asks for replace them in every panel."""
    return view.rates or (*MULTIPLES, *BEYOND)


def is_run(view: View, panel: TracePanel, multiple: float) -> bool:
    return bool(view.rates) or multiple in MULTIPLES or (panel.model, panel.trace) in STEEP


def rate_of(view: View, panel: TracePanel, multiple: float) -> float:
    return multiple if view.rates else short_rate(multiple * keeps_up(view, panel))


def cell_of(
    view: View, name: str, panel: TracePanel, multiple: float, *, tuned_for: Sequence[float] = TUNED_FOR
) -> Cell:
    contender = CONTENDERS[name]
    knobs: Knobs = ()
    if contender.is_tuned and not view.rates:
        searched = next(candidate for candidate in tuned_for if candidate >= multiple)
        knobs = (("planning_rate", rate_of(view, panel, searched)),)
    return contender.on(view, panel, rate_of(view, panel, multiple), knobs)


def cells(view: View) -> list[Cell]:
    return cells_at(multiples_of(view), panels(), SHOWN, partial(cell_of, view), view, partial(is_run, view))


def cells_at(
    multiples: Sequence[float],
    among: Sequence[TracePanel],
    names: Sequence[str],
    ask: Ask,
    view: View,
    has: Callable[[TracePanel, float], bool] = lambda panel, multiple: True,
) -> list[Cell]:
    """Return the cells of every contender in every panel, at the multiples of a rate that the panel ``has``."""
    all_cells = (
        ask(name, panel, multiple)
        for panel in among
        for multiple in multiples
        if has(panel, multiple)
        for name in names
    )
    return seed_by_seed(all_cells, view)


RateOf = Callable[[Means, str, int], float]
"""Returns a rate for a contender in a panel, from the means."""


@dataclass(frozen=True, kw_only=True)
class Knees:
    """Attainments at multiples of a rate, and the rates where they fall below ``LEVEL``."""

    table: Attainments
    rates: tuple[tuple[float, ...], ...]
    """Sessions/s [panel][multiple]."""

    def rate(self, means: Means, name: str, row: int) -> float:
        return crossing(self.rates[row], means[name][row])

    def at(self, name: str, row: int) -> Interval:
        """Return the interval of the rate's logarithm."""
        return self.table.interval(lambda means: math.log(self.rate(means, name, row)))

    def ratio(self, ours: str, theirs: str, rows: Sequence[int], rate_of: RateOf | None = None) -> Interval:
        """Logarithm of our rate (or what ``rate_of`` returns) over theirs: the geometric mean over panels, paired."""
        our_rate = self.rate if rate_of is None else rate_of

        def log_ratio(means: Means) -> float:
            logs = [math.log(our_rate(means, ours, row)) - math.log(self.rate(means, theirs, row)) for row in rows]
            return sum(logs) / len(logs)

        return self.table.interval(log_ratio)

    def said(self, name: str, row: int) -> str:
        """Format the rate with its interval; if it lies beyond the rates that were run, tell on which side."""
        rates = self.rates[row]
        low, rate, high = ends_of_logs(self.at(name, row))
        if rate <= rates[0] * (1 + 1e-9):
            return f"< {rates[0]:g}"
        if rate >= rates[-1] * (1 - 1e-9):
            return f"> {rates[-1]:g}"
        return f"{rate:.3g} [{low:.3g}, {high:.3g}]"


def crossing(rates: Sequence[float], shares: Sequence[float] | Floats, level: float = LEVEL) -> float:
    """Return the first rate at which the share falls to ``level``, interpolated linearly in the rate's logarithm. If it falls outside the
    rates that were run, return the lowest or the highest."""
    if math.isnan(shares[0]) or shares[0] < level:
        return rates[0]
    for index in range(1, len(rates)):
        if shares[index] < level:
            fraction = (shares[index - 1] - level) / (shares[index - 1] - shares[index])
            return float(rates[index - 1] * (rates[index] / rates[index - 1]) ** fraction)
    return rates[-1]


def knees_of(runs: Runs, of: Of = ATTAINED) -> Knees:
    view, multiples = runs.view, multiples_of(runs.view)
    table = tabulate(runs, SHOWN, panels(), multiples, of=of, ask=partial(cell_of, view))
    return Knees(table=table, rates=rates_in(view, panels(), multiples, partial(is_run, view)))


def rates_in(
    view: View,
    among: Sequence[TracePanel],
    multiples: Sequence[float],
    has: Callable[[TracePanel, float], bool] = lambda panel, multiple: True,
) -> tuple[tuple[float, ...], ...]:
    """Sessions/s [panel][multiple]; multiples that only some panels have come last."""
    return tuple(tuple(rate_of(view, panel, each) for each in multiples if has(panel, each)) for panel in among)


def page(runs: Runs) -> Page:
    knees, view = knees_of(runs), runs.view
    table = knees.table
    notes = conclusions(knees)
    p99, longest = (knees_of(runs, of).table.means for of in (P99, LONGEST))
    return Page(
        picture=Picture(
            panels=[*curves(knees.table, DRAWN, knees.rates), *(summary(knees, trace) for trace in TRACES)],
            columns=3,
            caption=[
                *notes[:5],
                f"SLO attainment in {DEFAULT}. Below: the rate at which it falls to {100 * LEVEL:.0f} %, interpolated between the rates that were "
                "run; with an arrow where it lies beyond the highest.",
                "Tuned systems are on the best deployment of searches of one size, four a panel, each for the rates up to its own. Continuum is "
                f"within a point of vLLM and left out. {SWITCHES} Dynamo with its own cache is not drawn.",
                repeats_of(view, by="jackknife over seeds, of the ratios above too"),
            ],
        ),
        csv=Table(
            columns=(
                *(
                    "panel",
                    "model",
                    "trace",
                    "contender",
                    "rate_sessions_s",
                    "attainment_percent",
                    "half_width",
                    "ttft_p99_s",
                ),
                *("ttft_longest_s", "knee_sessions_s", "knee_low", "knee_high", "obtained"),
            ),
            rows=[
                line
                for row, panel in enumerate(table.panels)
                for name in SHOWN
                for line in _lines(knees, panel, name, row, p99, longest, str(view.obtained))
            ],
        ),
        notes=notes,
    )


def _lines(
    found: Knees, panel: TracePanel, name: str, row: int, p99: Means, longest: Means, obtained: str
) -> list[tuple[Any, ...]]:
    low, knee, high = ends_of_logs(found.at(name, row))
    lines = []
    for column, rate in enumerate(found.rates[row]):
        share = found.table.at(name, row, column)
        waits = (float(means[name][row, column]) for means in (p99, longest))
        labels = panel.title, panel.model, panel.trace
        lines.append((*labels, name, rate, share.mean, share.half_width, *waits, knee, low, high, obtained))
    return lines


def curves(table: Attainments, names: Sequence[str], rates: Sequence[Sequence[float]]) -> list[Panel]:
    """Draw attainments, with the level that defines the knee."""
    return over_rates(
        table,
        names,
        table.at,
        Axis(label="SLO attainment (%)", better="higher", limits=(0, 105)),
        more=[Guide(value=100 * LEVEL, linestyle=":", label=f"{100 * LEVEL:.0f} %")],
        rates=rates,
        within=OF_SHARES,
    )


def summary(found: Knees, trace: str) -> Panel:
    """Draw the knees by model; bars are intervals of the logarithm."""
    rows = [found.table.panels.index(panel_of(model, trace)) for model in MODELS]
    layers, beyond = list[Layer](), list[tuple[float, float]]()
    for index, name in enumerate(DRAWN):
        places = [model + 0.12 * (index - (len(DRAWN) - 1) / 2) for model in range(len(MODELS))]
        logs = [found.at(name, row) for row in rows]
        means = [math.exp(log.mean or 0.0) for log in logs]
        factors = [math.exp(log.half_width or 0.0) for log in logs]
        layers.append(
            Line(
                label=CONTENDERS[name].title,
                places=places,
                at=[Interval(mean=mean, half_width=None, n=SEEDS, confidence=0.95) for mean in means],
                look=replace(CONTENDERS[name].look, linestyle="none"),
                spread=[(mean - mean / by, mean * by - mean) for mean, by in zip(means, factors, strict=True)],
                texts=[found.said(name, row) for row in rows],
            )
        )
        ends = zip(places, means, rows, strict=True)
        beyond += [(x, ABOVE * mean) for x, mean, row in ends if mean >= found.rates[row][-1] * (1 - 1e-9)]
    arrows = Look(color=GUIDE_COLOR, marker=r"$\uparrow$", linestyle="none")
    if beyond:
        xs, ys = zip(*beyond, strict=True)
        mark = Points(label="lies beyond the highest rate", places=xs, values=ys, look=arrows, size=7, has_values=False)
        layers.append(mark)
    return Panel(
        title=f"{load_session_card(trace).title}: {100 * LEVEL:.0f} % at",
        layers=layers,
        x=Axis(
            ticks=range(len(MODELS)),
            names=[model.partition("-")[0] for model in MODELS],
            limits=(-0.5, len(MODELS) - 0.5),
        ),
        y=Axis(label="sessions/s", better="higher", scale="plain log"),
    )


def conclusions(found: Knees) -> list[str]:
    rows = range(len(found.table.panels))
    notes = []
    for ours, theirs in PAIRS["knee"]:
        ratios = [found.ratio(ours, theirs, [row]) for row in rows]
        ahead, behind = (
            sum(sign * (ratio.mean or 0.0) > (ratio.half_width or 0.0) + 1e-9 for ratio in ratios) for sign in (1, -1)
        )
        low, mean, high = ends_of_logs(found.ratio(ours, theirs, rows))
        notes.append(
            f"{CONTENDERS[ours].title} attains {100 * LEVEL:.0f} % at {mean:.2f} [{low:.2f}, {high:.2f}] times the rate of "
            f"{CONTENDERS[theirs].title}, the geometric mean of {len(rows)} panels: ahead outside noise in {ahead}, behind in {behind}."
        )
    beyond = {
        name: int(
            np.sum([crossing(found.rates[row], found.table.means[name][row]) >= found.rates[row][-1] for row in rows])
        )
        for name in SHOWN
    }
    texts = [f"{CONTENDERS[name].title} in {count}" for name, count in beyond.items() if count]
    if texts:
        notes.append(
            f"Above {100 * LEVEL:.0f} % at the highest rate, which stands for the unknown: {', '.join(texts)} panels."
        )
    return notes


FIGURE = ampd_figure("knee", "AMPD, Figure 4, §7.2", page=page, cells=cells, num_runs=SEEDS)
