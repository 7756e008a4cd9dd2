"""LAPS Figure 3 (§2.2): P90 TTFT of short prompts among long ones, in one queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import Pairs, is_above, number, said, ttft
from paper_figures.laps.contenders import PAIRED_SEEDS
from paper_figures.laps.interference import cell, draw, mixtures, model_sentence, panels
from paper_figures.laps.interference import cells as interference_cells
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, finding, how_obtained, place_of, seeds_sentence, title_of
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "fig3"
TITLE = "LAPS Figure 3: P90 TTFT of short prompts mixed with long ones"
SOURCE = "LAPS, Figure 3, §2.2"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
P90_SHORT, P90_LONG = ttft("p90", "short"), ttft("p90", "long")


def cells(view: View) -> list[Cell]:
    return interference_cells(NAME, view)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs, asked = Pairs(runs, view), mixtures(view)
    rows = [
        (
            title,
            f"{shorts}",
            said(pairs.at(cell(view, 0, shorts, kappa), P90_SHORT), digits=0),
            *(said(pairs.at(cell(view, longs, shorts, kappa), P90_SHORT), digits=0) for longs in asked.longs),
        )
        for title, kappa in zip(panels(view), asked.kappas, strict=True)
        for shorts in asked.shorts
    ]
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.row_of_panels(panels(view))
        draw(
            axes,
            pairs,
            view,
            P90_SHORT,
            along=asked.shorts,
            each=asked.longs,
            pair_of=lambda shorts, longs: (longs, shorts),
            words=("clients with short prompts", "long prompts", "short prompts only"),
        )
        axes[0].set_ylabel("P90 TTFT, short (ms)")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=title_of(TITLE, view),
            caption=[
                _conclusion(pairs, view),
                *how_obtained(runs, view),
                f"{model_sentence(view)} Runs of Figure 1. Logarithmic.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.6,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("panel", "short clients", "alone, ms", *(f"+ {longs} long, ms" for longs in asked.longs)),
        rows=tuple(rows),
        notes=(_conclusion(pairs, view), *invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    mixed = mixtures(view).mixed
    rises = {pair: _rise(pairs, view, *pair) for pair in mixed}
    more = [
        number(rises[pair]) > number(pairs.versus(*_mixed_and_alone(view, *pair, of_long=True), P90_LONG))
        for pair in mixed
    ]
    up = sum(map(is_above, rises.values()))
    low, high = (pick(rises.values(), key=number) for pick in (min, max))
    slower = f"{1 + number(low) / 100:.1f} to {1 + number(high) / 100:.0f} times as long"
    return [
        finding(
            "laps-fig3-interference",
            number(high),
            f"{slower}; rises outside noise in {up} of {len(mixed)} mixtures, relatively more than for long ones in {sum(more)}; kappa 0",
            holds=up == len(mixed) and all(more),
        ),
        finding(
            "laps-convoy",
            float(sum(more)),
            f"P90 TTFT over that alone is larger for short prompts in {sum(more)} of {len(mixed)} mixtures; kappa 0",
            holds=all(more),
        ),
    ]


def _mixed_and_alone(view: View, longs: int, shorts: int, *, of_long: bool = False) -> tuple[Cell, Cell]:
    alone = (longs, 0) if of_long else (0, shorts)
    return cell(view, longs, shorts, 0.0), cell(view, *alone, 0.0)


def _rise(pairs: Pairs, view: View, longs: int, shorts: int) -> Interval:
    return pairs.versus(*_mixed_and_alone(view, longs, shorts), P90_SHORT)


def _conclusion(pairs: Pairs, view: View) -> str:
    asked = mixtures(view)
    shorts, first, last = asked.shorts[0], asked.longs[0], asked.longs[-1]
    alone = pairs.at(cell(view, 0, shorts, 0.0), P90_SHORT)
    one, many = (pairs.at(cell(view, longs, shorts, 0.0), P90_SHORT) for longs in (first, last))
    where = "P90" if asked.model is None else "P90, kappa 0"
    return (
        f"Short prompts of {shorts} clients wait {said(alone, 'ms', 0)} alone, {said(one, 'ms', 0)} beside {first} client with long prompts "
        f"and {said(many, 'ms', 0)} beside {last} ({where})."
    )
