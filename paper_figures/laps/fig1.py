"""LAPS Figure 1 (§1): P90 TTFT of long prompts among short ones, in one queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import Pairs, is_above, is_below, number, said, ttft
from paper_figures.laps.contenders import PAIRED_SEEDS
from paper_figures.laps.interference import cell, draw, mixtures, model_sentence, panels
from paper_figures.laps.interference import cells as interference_cells
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, finding, how_obtained, place_of, seeds_sentence, title_of
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "fig1"
TITLE = "LAPS Figure 1: P90 TTFT of long prompts mixed with short ones"
SOURCE = "LAPS, Figure 1, §1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
P90_LONG = ttft("p90", "long")


def cells(view: View) -> list[Cell]:
    return interference_cells(NAME, view)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs, asked = Pairs(runs, view), mixtures(view)
    rows = [
        (
            title,
            f"{longs}",
            said(pairs.at(cell(view, longs, 0, kappa), P90_LONG), digits=0),
            *(said(_rise(pairs, view, longs, shorts, kappa), "%") for shorts in asked.shorts),
        )
        for title, kappa in zip(panels(view), asked.kappas, strict=True)
        for longs in asked.longs
    ]
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.row_of_panels(panels(view))
        draw(
            axes,
            pairs,
            view,
            P90_LONG,
            along=asked.longs,
            each=asked.shorts,
            pair_of=lambda longs, shorts: (longs, shorts),
            words=("clients with long prompts", "short prompts", "long prompts only"),
        )
        axes[0].set_ylabel("P90 TTFT, long (ms)")
        about = "" if asked.model is None else " kappa: how much longer a mixed step takes than its parts."
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=title_of(TITLE, view),
            caption=[
                _conclusion(pairs, view),
                *how_obtained(runs, view),
                f"{model_sentence(view)}{about}",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.6,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("panel", "long clients", "alone, ms", *(f"+ {shorts} short" for shorts in asked.shorts)),
        rows=tuple(rows),
        notes=(_conclusion(pairs, view), *invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    rise = {pair: _rise(pairs, view, *pair, 0.0) for pair in mixtures(view).mixed}
    rises = sum(is_above(each) for each in rise.values())
    falls = sum(is_below(each) for each in rise.values())
    return [
        finding(
            "laps-fig1-interference",
            max(map(number, rise.values())),
            f"P90 TTFT rises outside noise in {rises} of {len(rise)} mixtures and falls in {falls}, by up to "
            f"{said(max(rise.values(), key=number), '%')}, more with more short prompts and less with more long ones; kappa 0",
            holds=rises > len(rise) / 2 and falls == 0,
        )
    ]


def _rise(pairs: Pairs, view: View, longs: int, shorts: int, kappa: float) -> Interval:
    return pairs.versus(cell(view, longs, shorts, kappa), cell(view, longs, 0, kappa), P90_LONG)


def _conclusion(pairs: Pairs, view: View) -> str:
    asked = mixtures(view)
    first, last, shorts = asked.longs[0], asked.longs[-1], asked.shorts[-1]
    texts = [
        f"by {said(_rise(pairs, view, first, shorts, kappa), '%', 0)} beside {first} long client and "
        f"{said(_rise(pairs, view, last, shorts, kappa), '%', 0)} beside {last}{'' if asked.model is None else f' at kappa {kappa:g}'}"
        for kappa in asked.kappas
    ]
    return f"{shorts} clients with short prompts change the P90 TTFT of long ones {'; '.join(texts)}."
