"""LAPS Figure 6 (§4.1): turns/s, mean and P90 TTFT against client concurrency, one and eight instances, three models.

Drawn as ratios to SGLang PD, which the paper's claims are about; values are in the CSV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig6"
TITLE = "LAPS Figure 6: throughput, mean and P90 TTFT by concurrency"
SOURCE = "LAPS, Figure 6, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
INSTANCES: Mapping[int, tuple[str, ...]] = {1: SINGLE, 8: EIGHT}
CLIENTS: Mapping[int, tuple[int, ...]] = {1: CONCURRENCY, 8: (1, 8, 16, 32, 64)}
"""Of all instances together."""
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
    knobs: dict[str, Scalar] = {"model": model, "num_instances": instances, "clients": clients}
    if kappa:
        knobs["kappa"] = kappa
    return CONTENDERS[name].cell(figure, view, SHAREGPT, knobs)


def cells(view: View) -> list[Cell]:
    return seeded(
        [
            cell(view, name, model, instances, clients, NAME)
            for instances, names in INSTANCES.items()
            for model in MODELS
            for clients in CLIENTS[instances]
            for name in names
        ],
        view,
    )


def versus(pairs: Pairs, view: View, name: str, model: str, instances: int, clients: int, of: Of) -> Interval:
    """Percent above SGLang PD."""
    return pairs.versus(
        cell(view, name, model, instances, clients), cell(view, "sglang", model, instances, clients), of
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    files = _draw(pairs, view, out, stem)
    rows = [
        (
            f"{instances}",
            model,
            f"{clients}",
            said(pairs.at(cell(view, "sglang", model, instances, clients), rps)),
            *(said(versus(pairs, view, "laps", model, instances, clients, of), "%") for _, of, _ in MEASURES),
            *(said(versus(pairs, view, "reserve", model, instances, clients, of), "%") for _, of, _ in MEASURES),
        )
        for instances in INSTANCES
        for model in MODELS
        for clients in CLIENTS[instances]
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
    for instances in INSTANCES:
        top, where = best(pairs, view, "laps", instances, rps)
        low, there = best(pairs, view, "laps", instances, rps, least=True)
        own, here = best(pairs, view, "reserve", instances, rps)
        found.append(
            f"{instances} instance{'s' if instances > 1 else ''}: LAPS serves {said(top, '%')} turns/s more than SGLang PD at best ({where}; printed up to "
            f"{PRINTED[instances]:.0f} %) and {said(low, '%')} at worst ({there}); Reserve {said(own, '%')} at best ({here})."
        )
    return found


def best(
    pairs: Pairs, view: View, name: str, instances: int, of: Of, *, least: bool = False, models: Sequence[str] = MODELS
) -> tuple[Interval, str]:
    """Over models and concurrency; where."""
    found = [
        (versus(pairs, view, name, model, instances, clients, of), f"{model}, {clients} clients")
        for model in models
        for clients in CLIENTS[instances]
    ]
    pick = min if least else max
    return pick(found, key=lambda each: number(each[0]))


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    found = []
    for claim, instances in (("laps-rps-single", 1), ("laps-rps-8", 8)):
        top, where = best(pairs, view, "laps", instances, rps)
        most = CLIENTS[instances][-1]
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
    most = CLIENTS[8][-1]
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
    places = [
        (model, instances, clients) for instances in INSTANCES for model in MODELS for clients in CLIENTS[instances]
    ]
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
            number(versus(pairs, view, "laps", model, instances, clients, rps)) for clients in CLIENTS[instances]
        ]
        for model in MODELS
        for instances in INSTANCES
    }
    grows = sum(values == sorted(values) for values in gains.values())
    ends = {
        instances: [
            number(versus(pairs, view, "laps", model, instances, CLIENTS[instances][-1], rps))
            - number(versus(pairs, view, "laps", model, instances, CLIENTS[instances][0], rps))
            for model in MODELS
        ]
        for instances in INSTANCES
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


def _draw(pairs: Pairs, view: View, out: Path, stem: str) -> tuple[Path, ...]:
    titles = [
        f"{model}, {instances} instance{'s' if instances > 1 else ''}"
        for instances in INSTANCES
        for _ in MEASURES
        for model in MODELS
    ]
    with style.drawing():
        figure, axes = style.grid_of_panels(titles, columns=len(MODELS))
        panels = iter(axes)
        for instances, names in INSTANCES.items():
            for label, of, _ in MEASURES:
                for column, model in enumerate(MODELS):
                    panel = next(panels)
                    _panel(panel, pairs, view, names[1:], model, instances, of)
                    if of is rps:
                        style.paper_marker(
                            panel,
                            CLIENTS[instances][-1],
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
            num_rows=len(INSTANCES) * len(MEASURES),
            title=f"{title_of(TITLE, view)}; x: clients",
            caption=[
                *conclusions(pairs, view),
                obtained_sentence(),
                "Closed loop without think time, ShareGPT's turns. LAPS mended: several long prompts a step, graphs only where predicted faster, "
                "window of at most 5 ms; its printed settings are worse (ablations). SGLang PD: instances in turn.",
                seeds_sentence(view),
            ],
        )


def _panel(panel: Axes, pairs: Pairs, view: View, names: Sequence[str], model: str, instances: int, of: Of) -> None:
    places = CLIENTS[instances]
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
