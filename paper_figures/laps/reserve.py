"""Reserve (ours) against LAPS, SGLang and vLLM from half load to overload, three models: violations, mean, longest TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import LONGEST, MEAN, Of, Pairs, is_above, is_below, late, number, said, ttft
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MODELS, PAIRED_SEEDS, seeded
from paper_figures.laps.fig7 import by_load
from paper_figures.laps.layout import (
    CSV_COLUMNS,
    csv_rows,
    draw_line,
    obtained_sentence,
    place_of,
    seeds_sentence,
    title_of,
)
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "reserve"
TITLE = "LAPS Reserve: violations from half load to overload"
SOURCE = "ours; the objective of LAPS §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
NAMES = ("sglang", "sglang-graphs", "vllm", "laps", "reserve")
"""SGLang with the prefill graphs it has by now, too: a baseline gets every advantage ours gets."""
OTHERS = NAMES[:-1]
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.05)
SATURATED = 64
"""Clients of the runs that say what the order costs in throughput."""
P90_LONG = ttft("p90", "long")
MEASURES: tuple[tuple[str, Of, bool], ...] = (
    ("TTFT over 0.4 s (%)", late, False),
    ("mean TTFT (ms)", MEAN, True),
    ("longest TTFT (ms)", LONGEST, True),
)
"""With whether the axis is logarithmic."""


def tokens_s(run: StoredRun) -> float | None:
    value: float | None = run.summary["tokens_s"]
    return value


def full(view: View, name: str, model: str, figure: str | None = None) -> Cell:
    return CONTENDERS[name].cell(figure, view, LMSYS, {"model": model, "num_instances": 1, "clients": SATURATED})


def cells(view: View) -> list[Cell]:
    asked = [by_load(view, name, 1, load, NAME, model) for model in MODELS for load in LOADS for name in NAMES]
    return seeded([*asked, *(full(view, name, model, NAME) for model in MODELS for name in NAMES)], view)


def versus(pairs: Pairs, view: View, model: str, load: float, other: str) -> Interval:
    """Violations of Reserve minus another's, points."""
    return pairs.versus(
        by_load(view, "reserve", 1, load, model=model), by_load(view, other, 1, load, model=model), late, "points"
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.grid_of_panels([model for _ in MEASURES for model in MODELS], columns=len(MODELS))
        for row, (label, of, is_log) in enumerate(MEASURES):
            for column, model in enumerate(MODELS):
                panel = axes[row * len(MODELS) + column]
                for name in NAMES:
                    asked = [by_load(view, name, 1, load, model=model) for load in LOADS]
                    draw_line(panel, pairs, CONTENDERS[name], LOADS, asked, of)
                panel.set_xticks(LOADS, [f"{load:g}" for load in LOADS], fontsize=7)
                if is_log:
                    style.log_scale(panel)
            axes[row * len(MODELS)].set_ylabel(label)
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=len(MEASURES),
            title=f"{title_of(TITLE, view)}; x: load",
            caption=[
                *conclusions(pairs, view),
                obtained_sentence(),
                "One instance, Poisson turns with LMSYS-Chat-1M's shares. Load 1 is what SGLang PD serves with 256 clients "
                f"({', '.join(f'{CAPACITY[model]:g}' for model in MODELS)} turns/s).",
                seeds_sentence(view),
            ],
        )
    rows = [
        (
            model,
            f"{load:g}",
            *(
                f"{said(pairs.at(asked, late))} / {number(pairs.at(asked, MEAN)):.0f} / {number(pairs.at(asked, P90_LONG)):.0f} / "
                f"{number(pairs.at(asked, LONGEST)) / 1e3:.1f}"
                for asked in (by_load(view, name, 1, load, model=model) for name in NAMES)
            ),
        )
        for model in MODELS
        for load in LOADS
    ]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=(
            "model",
            "load",
            *(f"{CONTENDERS[name].title}: late % / mean / P90 long ms / longest s" for name in NAMES),
        ),
        rows=tuple(rows),
        notes=(*conclusions(pairs, view), *invalid_notes(runs)),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    places = [(model, load) for model in MODELS for load in LOADS]
    fewer = [place for place in places if all(is_below(versus(pairs, view, *place, other)) for other in OTHERS)]
    more = [place for place in places if any(is_above(versus(pairs, view, *place, other)) for other in OTHERS)]
    rest = [place for place in places if place not in fewer and place not in more]
    text = f"Reserve violates fewer objectives than every other policy, outside noise, in {len(fewer)} of {len(places)} cells"
    if rest:
        text += f"; within noise of one of them in {', '.join(f'{model} at {load:g}' for model, load in rest)}"
    text += f"; more in {', '.join(f'{model} at {load:g}' for model, load in more)}." if more else "; more in none."
    costs = []
    for model in MODELS:
        change = pairs.versus(full(view, "reserve", model), full(view, "sglang", model), tokens_s)
        costs.append(said(change, "%"))
    waits = [
        f"{number(pairs.at(by_load(view, name, 1, LOADS[-1], model=MODELS[1]), LONGEST)) / 1e3:.1f} s ({CONTENDERS[name].title})"
        for name in NAMES
    ]
    return [
        text,
        f"The price: the longest TTFT at a load of {LOADS[-1]:g} is {', '.join(waits)} with {MODELS[1]}; with {SATURATED} clients Reserve prefills "
        f"{', '.join(costs)} tokens/s against SGLang PD (7B, 14B, 32B).",
    ]


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """Reserve is ours: the paper claims nothing of it."""
    return []
