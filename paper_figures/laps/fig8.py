"""LAPS Figure 8 (§4.1): turns/s with decoding on other GPUs and on the same ones, one and two instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import P90, Pairs, is_below, number, rps, said
from paper_figures.laps.contenders import CONTENDERS, MIDDLE, PAIRED_SEEDS, SHAREGPT, seeded
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

NAME = "fig8"
TITLE = "LAPS Figure 8: throughput with decoding apart and mixed in"
SOURCE = "LAPS, Figure 8, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
INSTANCES = (1, 2)
CLIENTS = (4, 16, 64, 128)
NAMES = ("sglang", "laps")
MODES: Mapping[str, str] = {"apart": "-", "mixed": ":"}
TURNS = 1200


def cell(view: View, name: str, instances: int, clients: int, decode: str, figure: str | None = None) -> Cell:
    return CONTENDERS[name].cell(
        figure,
        view,
        SHAREGPT,
        {"model": MIDDLE, "num_instances": instances, "clients": clients, "decode": decode, "num_prompts": TURNS},
    )


def cells(view: View) -> list[Cell]:
    return seeded(
        [
            cell(view, name, instances, clients, decode, NAME)
            for instances in INSTANCES
            for clients in CLIENTS
            for decode in MODES
            for name in NAMES
        ],
        view,
    )


def change(pairs: Pairs, view: View, name: str, instances: int, clients: int) -> Interval:
    """Turns/s with decoding mixed in over those with it apart, percent."""
    return pairs.versus(
        cell(view, name, instances, clients, "mixed"), cell(view, name, instances, clients, "apart"), rps
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.row_of_panels([f"{count} instance{'s' if count > 1 else ''}" for count in INSTANCES])
        for panel, instances in zip(axes, INSTANCES, strict=True):
            for name in NAMES:
                for decode, linestyle in MODES.items():
                    asked = [cell(view, name, instances, clients, decode) for clients in CLIENTS]
                    label = f"{CONTENDERS[name].title}, decoding {'apart' if decode == 'apart' else 'mixed in'}"
                    draw_line(panel, pairs, CONTENDERS[name], CLIENTS, asked, rps, linestyle=linestyle, label=label)
            log_axis(panel, CLIENTS)
            panel.set_xlabel("clients")
        axes[0].set_ylabel("turns/s")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            title=title_of(TITLE, view),
            caption=[
                conclusion(pairs, view),
                obtained_sentence(),
                "Qwen2.5-14B, ShareGPT's turns; the next turn comes after the whole answer. Apart: as many other GPUs decode, at the pace of a batch of all clients. "
                "Mixed in: prefills go first and decode steps run between them.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.6,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=(
            "instances",
            "clients",
            "system",
            "apart, turns/s",
            "mixed in",
            "change",
            "P90 TTFT apart / mixed, ms",
        ),
        rows=tuple(
            (
                f"{instances}",
                f"{clients}",
                CONTENDERS[name].title,
                said(pairs.at(cell(view, name, instances, clients, "apart"), rps)),
                said(pairs.at(cell(view, name, instances, clients, "mixed"), rps)),
                said(change(pairs, view, name, instances, clients), "%"),
                " / ".join(
                    f"{number(pairs.at(cell(view, name, instances, clients, decode), P90)):.0f}" for decode in MODES
                ),
            )
            for instances in INSTANCES
            for clients in CLIENTS
            for name in NAMES
        ),
        notes=(conclusion(pairs, view), *invalid_notes(runs)),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    falls = {place: change(pairs, view, "laps", *place) for place in _places()}
    down = sum(map(is_below, falls.values()))
    most = min(falls.values(), key=number)
    return [
        finding(
            "laps-fig8-mix",
            number(most),
            f"LAPS's turns/s with decoding mixed in are lower outside noise in {down} of {len(falls)} settings, by up to {said(most, '%')}",
            holds=2 * down > len(falls),
        )
    ]


def conclusion(pairs: Pairs, view: View) -> str:
    texts = []
    for name in NAMES:
        falls = [change(pairs, view, name, *place) for place in _places()]
        low, high = min(falls, key=number), max(falls, key=number)
        texts.append(f"{said(low, '%')} to {said(high, '%')} ({CONTENDERS[name].title})")
    return f"Mixing decoding in changes turns/s by {' and '.join(texts)}: it costs either system alike."


def _places() -> list[tuple[int, int]]:
    return [(instances, clients) for instances in INSTANCES for clients in CLIENTS]
