"""LAPS Figure 1 (§1): P90 TTFT of long prompts among short ones, in one queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import Pairs, is_above, is_below, number, said, ttft
from paper_figures.laps.contenders import CONTENDERS, PAIRED_SEEDS
from paper_figures.laps.interference import KAPPAS, LONGS, SHORTS, cell, shades
from paper_figures.laps.interference import cells as interference_cells
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
    pairs = Pairs(runs, view)
    rows = [
        (
            f"{kappa:g}",
            f"{longs}",
            said(pairs.at(cell(view, "sglang", longs, 0, kappa), P90_LONG), digits=0),
            *(said(_rise(pairs, view, longs, shorts, kappa), "%") for shorts in SHORTS),
        )
        for kappa in KAPPAS
        for longs in LONGS
    ]
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.row_of_panels([f"kappa = {kappa:g}" for kappa in KAPPAS])
        for panel, kappa in zip(axes, KAPPAS, strict=True):
            for shorts, color in zip(SHORTS, shades(len(SHORTS)), strict=True):
                mixed = [cell(view, "sglang", longs, shorts, kappa) for longs in LONGS]
                draw_line(
                    panel,
                    pairs,
                    CONTENDERS["sglang"],
                    LONGS,
                    mixed,
                    P90_LONG,
                    color=color,
                    label=f"{shorts} clients with short prompts",
                )
            alone = [cell(view, "sglang", longs, 0, kappa) for longs in LONGS]
            draw_line(
                panel,
                pairs,
                CONTENDERS["sglang"],
                LONGS,
                alone,
                P90_LONG,
                color=style.GUIDE_COLOR,
                linestyle="--",
                label="long prompts only",
            )
            log_axis(panel, LONGS)
            panel.set_xlabel("clients with long prompts")
            style.log_scale(panel)
        axes[0].set_ylabel("P90 TTFT, long (ms)")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=title_of(TITLE, view),
            caption=[
                _conclusion(pairs, view),
                obtained_sentence(),
                "Qwen2.5-32B, SGLang PD on one instance; long: above 1,000 tokens, short: below 64, both of LMSYS-Chat-1M's first "
                "turns; closed loop without think time. kappa: how much longer a mixed step takes than its parts.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.6,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("kappa", "long clients", "alone, ms", *(f"+ {shorts} short" for shorts in SHORTS)),
        rows=tuple(rows),
        notes=(_conclusion(pairs, view), *invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    rise = {(longs, shorts): _rise(pairs, view, longs, shorts, 0.0) for longs in LONGS for shorts in SHORTS}
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
    mixed, alone = cell(view, "sglang", longs, shorts, kappa), cell(view, "sglang", longs, 0, kappa)
    return pairs.versus(mixed, alone, P90_LONG)


def _conclusion(pairs: Pairs, view: View) -> str:
    first, last = LONGS[0], LONGS[-1]
    texts = [
        f"by {said(_rise(pairs, view, first, SHORTS[-1], kappa), '%', 0)} beside {first} long client and "
        f"{said(_rise(pairs, view, last, SHORTS[-1], kappa), '%', 0)} beside {last} at kappa {kappa:g}"
        for kappa in KAPPAS
    ]
    return f"{SHORTS[-1]} clients with short prompts raise the P90 TTFT of long ones {'; '.join(texts)}."
