"""LAPS Figure 6: throughput and P90 TTFT by concurrency.

We draw ratios to SGLang PD, which the paper's claims are about; values are in the CSV.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paper_figures.common.figure import Page
from paper_figures.common.panel import Axis, Guide, Layer, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import is_above, is_below, number, plural, said
from paper_figures.laps.contenders import CONCURRENCY, CONTENDERS, EIGHT, LARGE, MODELS, SHAREGPT, SINGLE
from paper_figures.laps.layout import doubling, laps_figure, laps_page
from paper_figures.laps.measures import MEAN, P90, RPS
from repro.families.platforms import PrefillPart
from repro.reports.claims import Finding, stated
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval

Place = tuple[str, int, int]
"""Model, instances, clients."""


@dataclass(frozen=True, kw_only=True)
class ClientGrid:
    models: tuple[str, ...]
    instances: Mapping[int, tuple[str, ...]]
    """Contenders by number of instances."""
    clients: Mapping[int, tuple[int, ...]]
    """Clients of all instances together."""
    knobs: Knobs = ()

    def of(self, instances: int) -> list[Place]:
        return [(model, instances, clients) for model in self.models for clients in self.clients[instances]]

    @property
    def places(self) -> list[Place]:
        return [place for instances in self.instances for place in self.of(instances)]


GRIDS: Mapping[str, ClientGrid] = {
    "roofline": ClientGrid(
        models=MODELS, instances={1: SINGLE, 8: EIGHT}, clients={1: CONCURRENCY, 8: (1, 8, 16, 32, 64)}
    ),
    "torch": ClientGrid(
        models=("tiny",), instances={1: SINGLE}, clients={1: (1, 4, 16)}, knobs=(("num_prompts", 300),)
    ),
}
SIMULATED = GRIDS["roofline"]
"""Settings that the claims are about."""
MEASURES: Mapping[str, Measure] = {"turns/s": RPS, "mean TTFT": MEAN, "P90 TTFT": P90}
DRAWN = ("turns/s", "P90 TTFT")
"""Measures to draw. Without think time, mean TTFT is the reciprocal of turns/s (Little's law), so its panel would add nothing."""
CLAIMS = {1: "laps-rps-single", 8: "laps-rps-8"}
"""Claims of the largest gains in turns/s, in percent, by number of instances."""


def cell(view: View, name: str, place: Place, kappa: float = 0.0) -> Cell:
    model, instances, clients = place
    knobs: dict[str, Scalar] = {"model": model, "num_instances": instances, "clients": clients}
    penalty = {"kappa": kappa} if kappa else {}
    return CONTENDERS[name].cell(
        view, SHAREGPT, {**dict(GRIDS[view.platform.executor].knobs), **knobs, **penalty}, together="laps-throughput"
    )


def cells(view: View) -> list[Cell]:
    grid = GRIDS[view.platform.executor]
    return [cell(view, name, place) for place in grid.places for name in grid.instances[place[1]]]


def versus(runs: Runs, name: str, place: Place, of: Measure, other: str = "sglang") -> Interval:
    """Return the percent above SGLang PD, or above another contender."""
    return runs.versus(cell(runs.view, name, place), cell(runs.view, other, place), of)


def best(runs: Runs, name: str, instances: int, of: Measure, *, least: bool = False) -> tuple[Interval, str]:
    """Return the best over models and concurrency, and its place."""
    results = [
        (versus(runs, name, place, of), f"{place[0]}, {place[2]} clients")
        for place in GRIDS[runs.view.platform.executor].of(instances)
    ]
    return (min if least else max)(results, key=lambda each: number(each[0]))


def page(runs: Runs) -> Page:
    grid = GRIDS[runs.view.platform.executor]
    columns = len(grid.models) if len(grid.models) > 1 else len(DRAWN)
    return laps_page(
        runs,
        panels=[
            panel(runs, instances, label, model)
            for instances in grid.instances
            for label in DRAWN
            for model in grid.models
        ],
        columns=columns,
        conclusions=[conclusion(runs, instances) for instances in grid.instances],
        about="Closed loop without think time, ShareGPT's turns: mean TTFT is the reciprocal of turns/s. LAPS mended: several long prompts a step, graphs only where predicted faster, "
        f"window of at most {5 * runs.view.platform.part(PrefillPart).time_scale:g} ms; its printed settings are worse (ablations). Dotted: what the paper prints as the most that LAPS gains, at no stated concurrency; it prints no value of P90. SGLang PD: instances in turn.",
    )


def panel(runs: Runs, instances: int, label: str, model: str) -> Panel:
    grid, measure = GRIDS[runs.view.platform.executor], MEASURES[label]
    clients = grid.clients[instances]
    layers: list[Layer] = [
        Guide(value=1, label="SGLang PD", linestyle="-", color=CONTENDERS["sglang"].look.color),
        *(
            Line(
                label=CONTENDERS[name].title,
                places=clients,
                at=[versus(runs, name, (model, instances, count), measure) for count in clients],
                look=CONTENDERS[name].look,
                base=1,
                scale=0.01,
            )
            for name in grid.instances[instances][1:]
        ),
    ]
    if measure is RPS and runs.view.is_simulated:
        printed = 1 + stated("laps", CLAIMS[instances]) / 100
        color = CONTENDERS["laps"].look.color
        layers.append(Guide(value=printed, label="printed: up to", is_printed=True, linestyle=":", color=color))
    return Panel(
        title=f"{model}, {plural(instances, 'instance')}",
        layers=layers,
        x=doubling(clients, "clients"),
        y=Axis(label=f"{label} / SGLang PD's", better=measure.better),
    )


def conclusion(runs: Runs, instances: int) -> str:
    top, top_at = best(runs, "laps", instances, RPS)
    low, low_at = best(runs, "laps", instances, RPS, least=True)
    own, own_at = best(runs, "reserve", instances, RPS)
    return (
        f"{plural(instances, 'instance')}: LAPS serves {said(top, '%')} turns/s more than SGLang PD at best ({top_at}; printed up to "
        f"{stated('laps', CLAIMS[instances]):.0f} %) and {said(low, '%')} at worst ({low_at}); Reserve {said(own, '%')} at best ({own_at})."
    )


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    def with_most(name: str, instances: int, model: str) -> str:
        return said(versus(runs, name, (model, instances, SIMULATED.clients[instances][-1]), RPS), "%")

    results = []
    for instances, claim in CLAIMS.items():
        top, place = best(runs, "laps", instances, RPS)
        ends, routed = (", ".join(with_most(name, instances, model) for model in MODELS) for name in ("laps", "router"))
        router = f"; SGLang's router alone {routed}" if instances > 1 else ""
        how = f"{said(top, '%')} at best ({place}); with {SIMULATED.clients[instances][-1]} clients {ends} (7B, 14B, 32B){router}; kappa 0"
        results.append(runs.finding(claim, number(top), how, readings=gain_readings(runs, instances, RPS)))
    low, place = best(runs, "laps", 8, MEAN, least=True)
    one, one_place = best(runs, "laps", 1, MEAN, least=True)
    largest = place if number(low) < number(one) else one_place
    falls = tuple(
        (label, -value) for instances in SIMULATED.instances for label, value in gain_readings(runs, instances, MEAN)
    )
    clients = SIMULATED.clients[8][-1]
    return [
        *results,
        runs.finding(
            "laps-avg-latency",
            -number(low),
            f"mean TTFT changes by {said(low, '%')} at best with 8 instances ({place}), {said(one, '%')} with one ({one_place}); kappa 0",
            readings=falls,
        ),
        runs.finding(
            "laps-abs-prefill-latency",
            -min(number(low), number(one)),
            f"largest fall of mean TTFT, {largest}; kappa 0",
            readings=falls,
        ),
        runs.finding(
            "laps-abs-rps",
            number(versus(runs, "laps", (LARGE, 8, clients), RPS)),
            f"{with_most('laps', 8, LARGE)} with {clients} clients of 8 instances, {with_most('laps', 1, LARGE)} of one; {LARGE}, kappa 0",
        ),
        consistent_best(runs),
        gain_grows(runs),
        graphs_alone(runs),
    ]


def gain_readings(runs: Runs, instances: int, of: Measure) -> tuple[tuple[str, float], ...]:
    """Readings of one number for which the paper names no setting: the best of each model, that with the most clients, the mean."""
    clients, readings = SIMULATED.clients[instances], []
    setting = plural(instances, "instance")
    gains = [[number(versus(runs, "laps", (model, instances, count), of)) for count in clients] for model in MODELS]
    for model, values in zip(MODELS, gains, strict=True):
        readings.append((f"{model} at best on {setting}", min(values) if of is MEAN else max(values)))
    readings.append((f"most clients of {setting}", sum(values[-1] for values in gains) / len(gains)))
    readings.append((f"mean over settings of {setting}", sum(map(sum, gains)) / (len(gains) * len(clients))))
    return tuple(readings)


def consistent_best(runs: Runs) -> Finding:
    places, count = SIMULATED.places, dict.fromkeys(MEASURES, 0)
    for label, measure in MEASURES.items():
        is_behind = is_below if measure.better == "higher" else is_above
        for place in places:
            others = ("sglang", "graphs", "apart")
            count[label] += not any(is_behind(versus(runs, "laps", place, measure, other)) for other in others)
    total = len(places) * len(MEASURES)
    text = ", ".join(f"{label} in {best_in} of {len(places)}" for label, best_in in count.items())
    return runs.finding(
        "laps-consistent-best",
        1 + (total - sum(count.values())) / total,
        f"not behind SGLang or a part of itself outside noise: {text} settings; kappa 0",
    )


def gain_grows(runs: Runs) -> Finding:
    """Whether the gain grows from few clients to many."""
    gains = {
        (instances, model): [
            number(versus(runs, "laps", (model, instances, clients), RPS)) for clients in SIMULATED.clients[instances]
        ]
        for model in MODELS
        for instances in SIMULATED.instances
    }
    grows = sum(values == sorted(values) for values in gains.values())
    one, eight = (
        sum(gains[instances, model][-1] - gains[instances, model][0] for model in MODELS) / len(MODELS)
        for instances in SIMULATED.instances
    )
    return runs.finding(
        "laps-gain-grows",
        one,
        f"gain of turns/s with the most clients minus that with one, mean of three models: {one:.1f} points on one instance, "
        f"{eight:.1f} on eight; it grows from step to step in {grows} of {len(gains)} panels; kappa 0",
        holds=2 * grows > len(gains),
    )


def graphs_alone(runs: Runs) -> Finding:
    changes = [versus(runs, "graphs", place, RPS) for place in SIMULATED.places]
    worst, most = min(changes, key=number), max(changes, key=number)
    return runs.finding(
        "laps-graph-only-weak",
        sum(map(number, changes)) / len(changes),
        f"mean over {len(changes)} settings of the change of turns/s; from {said(worst, '%')} to {said(most, '%')}; kappa 0",
        readings=(("least of the settings", number(worst)), ("largest of the settings", number(most))),
    )


FIGURE = laps_figure("fig6", "LAPS, Figure 6, §4.1", page=page, cells=cells, findings=findings)
