"""LAPS Figure 6 (§4.1): turns/s, mean and P90 TTFT against client concurrency, one and eight instances, three models.

Drawn as ratios to SGLang PD, which the paper's claims are about; values are in the CSV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import MEAN, P90, Of, Pairs, is_above, is_below, number, rps, said
from paper_figures.laps.contenders import (
    CONCURRENCY,
    CONTENDERS,
    EIGHT,
    LARGE,
    MODELS,
    PAIRED_SEEDS,
    SHAREGPT,
    SINGLE,
    seeded,
)
from paper_figures.laps.layout import (
    CSV_COLUMNS,
    csv_rows,
    finding,
    how_obtained,
    log_axis,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig6"
TITLE = "LAPS Figure 6: throughput, mean and P90 TTFT by concurrency"
SOURCE = "LAPS, Figure 6, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS


@dataclass(frozen=True, kw_only=True)
class Grid:
    models: tuple[str, ...]
    instances: Mapping[int, tuple[str, ...]]
    """Contenders by number of instances."""
    clients: Mapping[int, tuple[int, ...]]
    """Of all instances together."""
    knobs: tuple[tuple[str, Scalar], ...] = ()

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """Model, instances, clients."""
        return [
            (model, instances, clients)
            for instances in self.instances
            for model in self.models
            for clients in self.clients[instances]
        ]


SIMULATED = Grid(models=MODELS, instances={1: SINGLE, 8: EIGHT}, clients={1: CONCURRENCY, 8: (1, 8, 16, 32, 64)})
MEASURED = Grid(models=("tiny",), instances={1: SINGLE}, clients={1: (1, 4, 16)}, knobs=(("num_prompts", 300),))


def grid(view: View) -> Grid:
    return SIMULATED if view.obtained == "simulated" else MEASURED


MEASURES: tuple[tuple[str, Of, bool], ...] = (
    ("turns/s", rps, True),
    ("mean TTFT", MEAN, False),
    ("P90 TTFT", P90, False),
)
"""With whether more is better."""
PRINTED = {1: 20.0, 8: 33.0}
"""Largest gains of turns/s, percent."""


def cell(
    view: View, name: str, model: str, instances: int, clients: int, figure: str | None = None, kappa: float = 0.0
) -> Cell:
    knobs: dict[str, Scalar] = {
        **dict(grid(view).knobs),
        "model": model,
        "num_instances": instances,
        "clients": clients,
    }
    if kappa:
        knobs["kappa"] = kappa
    return CONTENDERS[name].cell(figure, view, SHAREGPT, knobs, together="laps-throughput")


def cells(view: View) -> list[Cell]:
    asked = grid(view)
    return seeded(
        [cell(view, name, *place, NAME) for place in asked.places for name in asked.instances[place[1]]], view
    )


def versus(pairs: Pairs, view: View, name: str, model: str, instances: int, clients: int, of: Of) -> Interval:
    """Percent above SGLang PD."""
    return pairs.versus(
        cell(view, name, model, instances, clients), cell(view, "sglang", model, instances, clients), of
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    files = _draw(runs, pairs, view, out, stem)
    rows = [
        (
            f"{instances}",
            model,
            f"{clients}",
            said(pairs.at(cell(view, "sglang", model, instances, clients), rps)),
            *(said(versus(pairs, view, "laps", model, instances, clients, of), "%") for _, of, _ in MEASURES),
            *(said(versus(pairs, view, "reserve", model, instances, clients, of), "%") for _, of, _ in MEASURES),
        )
        for model, instances, clients in grid(view).places
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=(
            "instances",
            "model",
            "clients",
            "SGLang PD turns/s",
            *(f"{title} {label}" for title in ("LAPS", "Reserve") for label, _, _ in MEASURES),
        ),
        rows=tuple(rows),
        notes=(*conclusions(pairs, view), *invalid_notes(runs)),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    found = []
    for instances in grid(view).instances:
        top, where = best(pairs, view, "laps", instances, rps)
        low, there = best(pairs, view, "laps", instances, rps, least=True)
        own, here = best(pairs, view, "reserve", instances, rps)
        found.append(
            f"{instances} instance{'s' if instances > 1 else ''}: LAPS serves {said(top, '%')} turns/s more than SGLang PD at best ({where}; printed up to "
            f"{PRINTED[instances]:.0f} %) and {said(low, '%')} at worst ({there}); Reserve {said(own, '%')} at best ({here})."
        )
    return found


def best(pairs: Pairs, view: View, name: str, instances: int, of: Of, *, least: bool = False) -> tuple[Interval, str]:
    """Over models and concurrency; where."""
    found = [
        (versus(pairs, view, name, model, instances, clients, of), f"{model}, {clients} clients")
        for model in grid(view).models
        for clients in grid(view).clients[instances]
    ]
    pick = min if least else max
    return pick(found, key=lambda each: number(each[0]))


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    found = []
    for claim, instances in (("laps-rps-single", 1), ("laps-rps-8", 8)):
        top, where = best(pairs, view, "laps", instances, rps)
        most = SIMULATED.clients[instances][-1]
        ends = [said(versus(pairs, view, "laps", model, instances, most, rps), "%") for model in MODELS]
        router = ""
        if instances > 1:
            own = [said(versus(pairs, view, "router", model, instances, most, rps), "%") for model in MODELS]
            router = f"; SGLang's router alone {', '.join(own)}"
        found.append(
            finding(
                claim,
                number(top),
                f"{said(top, '%')} at best ({where}); with {most} clients {', '.join(ends)} (7B, 14B, 32B){router}; kappa 0",
            )
        )
    low, where = best(pairs, view, "laps", 8, MEAN, least=True)
    one, there = best(pairs, view, "laps", 1, MEAN, least=True)
    found.append(
        finding(
            "laps-avg-latency",
            -number(low),
            f"mean TTFT changes by {said(low, '%')} at best with 8 instances ({where}), {said(one, '%')} with one ({there}); kappa 0",
        )
    )
    found.append(
        finding(
            "laps-abs-prefill-latency",
            -min(number(low), number(one)),
            f"largest fall of mean TTFT, {where if number(low) < number(one) else there}; kappa 0",
        )
    )
    most = SIMULATED.clients[8][-1]
    high = versus(pairs, view, "laps", LARGE, 8, most, rps)
    one = versus(pairs, view, "laps", LARGE, 1, most, rps)
    found.append(
        finding(
            "laps-abs-rps",
            number(high),
            f"{said(high, '%')} with {most} clients of 8 instances, {said(one, '%')} of one; {LARGE}, kappa 0",
        )
    )
    return [*found, *_rankings(pairs, view)]


def _rankings(pairs: Pairs, view: View) -> list[Finding]:
    places = SIMULATED.places
    best_in = {label: 0 for label, _, _ in MEASURES}
    for label, of, is_more_better in MEASURES:
        for place in places:
            behind = [
                (is_below if is_more_better else is_above)(
                    pairs.versus(cell(view, "laps", *place), cell(view, name, *place), of)
                )
                for name in ("sglang", "graphs", "apart")
            ]
            best_in[label] += not any(behind)
    total = len(places) * len(MEASURES)
    text = ", ".join(f"{label} in {count} of {len(places)}" for label, count in best_in.items())
    rank = 1 + (total - sum(best_in.values())) / total
    gains = {
        (model, instances): [
            number(versus(pairs, view, "laps", model, instances, clients, rps))
            for clients in SIMULATED.clients[instances]
        ]
        for model in MODELS
        for instances in SIMULATED.instances
    }
    grows = sum(values == sorted(values) for values in gains.values())
    ends = {
        instances: [
            number(versus(pairs, view, "laps", model, instances, SIMULATED.clients[instances][-1], rps))
            - number(versus(pairs, view, "laps", model, instances, SIMULATED.clients[instances][0], rps))
            for model in MODELS
        ]
        for instances in SIMULATED.instances
    }
    graphs = [versus(pairs, view, "graphs", model, instances, clients, rps) for model, instances, clients in places]
    mean = sum(map(number, graphs)) / len(graphs)
    worst, most = min(graphs, key=number), max(graphs, key=number)
    return [
        finding(
            "laps-consistent-best",
            rank,
            f"not behind SGLang or a part of itself outside noise: {text} settings; kappa 0",
        ),
        finding(
            "laps-gain-grows",
            sum(ends[1]) / len(ends[1]),
            f"gain of turns/s with the most clients minus that with one, mean of three models: {sum(ends[1]) / len(MODELS):.1f} points on one instance, "
            f"{sum(ends[8]) / len(MODELS):.1f} on eight; it grows from step to step in {grows} of {len(gains)} panels; kappa 0",
            holds=2 * grows > len(gains),
        ),
        finding(
            "laps-graph-only-weak",
            mean,
            f"mean over {len(graphs)} settings of the change of turns/s; from {said(worst, '%')} to {said(most, '%')}; kappa 0",
        ),
    ]


def _draw(runs: Sequence[StoredRun], pairs: Pairs, view: View, out: Path, stem: str) -> tuple[Path, ...]:
    asked = grid(view)
    columns = len(asked.models) if len(asked.models) > 1 else len(MEASURES)
    titles = [
        f"{model}, {instances} instance{'s' if instances > 1 else ''}"
        for instances in asked.instances
        for _ in MEASURES
        for model in asked.models
    ]
    with style.drawing():
        figure, axes = style.grid_of_panels(titles, columns=columns)
        panels = iter(axes)
        for instances, names in asked.instances.items():
            for label, of, _ in MEASURES:
                for column, model in enumerate(asked.models):
                    panel = next(panels)
                    _panel(panel, pairs, view, names[1:], model, instances, of)
                    if of is rps and view.obtained == "simulated":
                        style.paper_marker(
                            panel,
                            asked.clients[instances][-1],
                            1 + PRINTED[instances] / 100,
                            color="#0072B2",
                            marker="o",
                            label="printed: up to",
                        )
                    if column == 0:
                        panel.set_ylabel(f"{label} / SGLang PD's")
        return style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=len(titles) // columns,
            title=f"{title_of(TITLE, view)}; x: clients",
            caption=[
                *conclusions(pairs, view),
                *how_obtained(runs, view),
                "Closed loop without think time, ShareGPT's turns. LAPS mended: several long prompts a step, graphs only where predicted faster, "
                f"window of at most {5 * part_of(view.platform).time_scale:g} ms; its printed settings are worse (ablations). SGLang PD: instances in turn.",
                seeds_sentence(view),
            ],
        )


def _panel(panel: Axes, pairs: Pairs, view: View, names: Sequence[str], model: str, instances: int, of: Of) -> None:
    places = grid(view).clients[instances]
    panel.axhline(1, linestyle="-", linewidth=1, color=CONTENDERS["sglang"].color, label="SGLang PD")
    for name in names:
        at = [versus(pairs, view, name, model, instances, clients, of) for clients in places]
        contender = CONTENDERS[name]
        panel.errorbar(
            places,
            [1 + number(each) / 100 for each in at],
            yerr=[(each.half_width or 0.0) / 100 for each in at],
            capsize=2,
            **contender.line,
            label=contender.title,
        )
    log_axis(panel, places)
