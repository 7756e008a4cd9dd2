"""LAPS Figure 5 (§3.1): throughput and mean TTFT over the waiting window, short prompts of 64 clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import MEAN, Of, Pairs, is_above, number, rps, said
from paper_figures.laps.contenders import CONTENDERS, LMSYS, MIDDLE, PAIRED_SEEDS, seeded
from paper_figures.laps.layout import (
    CSV_COLUMNS,
    csv_rows,
    draw_line,
    finding,
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

NAME = "fig5"
TITLE = "LAPS Figure 5: throughput and latency over the waiting window"
SOURCE = "LAPS, Figure 5, §3.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
WINDOWS_MS = (0, 2, 5, 10, 20, 50)
THINK_S = (0.0, 0.05, 0.5)
GRAPHS = ("nearest", "cheapest")
"""As printed, and only where a graph is predicted to be faster."""
CLIENTS = 64
_COLORS = {"nearest": "#D55E00", "cheapest": "#0072B2"}


def cell(view: View, window_ms: int, think_s: float, graphs: str, figure: str | None = None) -> Cell:
    return CONTENDERS["laps"].cell(
        figure,
        view,
        LMSYS,
        {
            "model": MIDDLE,
            "clients": CLIENTS,
            "max_tokens": 255,
            "think_s": think_s,
            "graphs": graphs,
            "min_window_s": window_ms / 1e3,
            "max_window_s": window_ms / 1e3,
        },
    )


def cells(view: View) -> list[Cell]:
    return seeded(
        [
            cell(view, window, think_s, graphs, NAME)
            for think_s in THINK_S
            for graphs in GRAPHS
            for window in WINDOWS_MS
        ],
        view,
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    measures: tuple[tuple[str, Of], ...] = (("turns/s", rps), ("mean TTFT (ms)", MEAN))
    with style.drawing():
        figure, axes = style.grid_of_panels(
            [f"think time {1e3 * think_s:g} ms" for _ in measures for think_s in THINK_S], columns=len(THINK_S)
        )
        for row, (label, of) in enumerate(measures):
            for column, think_s in enumerate(THINK_S):
                panel = axes[row * len(THINK_S) + column]
                for graphs in GRAPHS:
                    asked = [cell(view, window, think_s, graphs) for window in WINDOWS_MS]
                    draw_line(
                        panel,
                        pairs,
                        CONTENDERS["laps"],
                        range(len(WINDOWS_MS)),
                        asked,
                        of,
                        color=_COLORS[graphs],
                        label=f"graphs: {graphs}",
                    )
                panel.set_xticks(range(len(WINDOWS_MS)), [f"{window}" for window in WINDOWS_MS])
                panel.set_ylim(bottom=0)
                panel.set_xlabel("window (ms)")
            axes[row * len(THINK_S)].set_ylabel(label)
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=len(measures),
            title=title_of(TITLE, view),
            caption=[
                *conclusions(pairs, view),
                obtained_sentence(),
                f"LAPS with Qwen2.5-14B, {CLIENTS} clients, prompts below 256 tokens. A window of fixed length; the depth adapts. nearest: the smallest captured "
                "graph that covers the batch, as printed; cheapest: only where it is predicted to be faster.",
                seeds_sentence(view),
            ],
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("think ms", "graphs", *(f"{window} ms" for window in WINDOWS_MS), "batch at 0 ms"),
        rows=tuple(
            (
                f"{1e3 * think_s:g}",
                graphs,
                *(
                    f"{number(pairs.at(asked, rps)):.0f}/s {number(pairs.at(asked, MEAN)):.0f} ms"
                    for asked in (cell(view, window, think_s, graphs) for window in WINDOWS_MS)
                ),
                said(pairs.at(cell(view, 0, think_s, graphs), lambda run: run.summary["requests_per_step"])),
            )
            for think_s in THINK_S
            for graphs in GRAPHS
        ),
        notes=(*conclusions(pairs, view), *invalid_notes(runs)),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    found = []
    for think_s in THINK_S:
        texts = [
            f"{said(_gain(pairs, view, best(pairs, view, think_s, graphs), think_s, graphs), '%')} ({graphs})"
            for graphs in GRAPHS
        ]
        found.append(
            f"Against no window, the best one changes throughput by {' and '.join(texts)} at a think time of {1e3 * think_s:g} ms."
        )
    return found


def best(pairs: Pairs, view: View, think_s: float, graphs: str) -> int:
    """The window above 0 with the most turns/s."""
    return max(WINDOWS_MS[1:], key=lambda window: number(pairs.at(cell(view, window, think_s, graphs), rps)))


def _gain(pairs: Pairs, view: View, window: int, think_s: float, graphs: str, of: Of = rps) -> Interval:
    return pairs.versus(cell(view, window, think_s, graphs), cell(view, 0, think_s, graphs), of)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    gains = {
        (think_s, graphs): _gain(pairs, view, best(pairs, view, think_s, graphs), think_s, graphs)
        for think_s in THINK_S
        for graphs in GRAPHS
    }
    up = [key for key, gain in gains.items() if is_above(gain)]
    top = max(gains.values(), key=number)
    latency = _gain(pairs, view, WINDOWS_MS[-1], THINK_S[1], "cheapest", MEAN)
    return [
        finding(
            "laps-fig5-window",
            number(top),
            f"change of turns/s by the best window: {said(top, '%')} at most; above 0 outside noise in {len(up)} of {len(gains)} settings of think time and "
            f"graph choice; {WINDOWS_MS[-1]} ms change mean TTFT by {said(latency, '%')} at {1e3 * THINK_S[1]:g} ms",
            holds=2 * len(up) > len(gains),
        )
    ]
