"""LAPS Figure 5 (§3.1): throughput and mean TTFT over the waiting window, short prompts of 64 clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import MEAN, Of, Pairs, is_above, number, rps, said
from paper_figures.laps.contenders import CONTENDERS, LMSYS, MIDDLE, PAIRED_SEEDS, seeded
from paper_figures.laps.graphs import GRAPHS, draw_choices
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, finding, how_obtained, place_of, seeds_sentence, title_of
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "fig5"
TITLE = "LAPS Figure 5: throughput and latency over the waiting window"
SOURCE = "LAPS, Figure 5, §3.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS


@dataclass(frozen=True, kw_only=True)
class Windows:
    """``knobs`` are those of every cell."""

    windows_ms: tuple[float, ...]
    think_s: tuple[float, ...]
    clients: int
    knobs: tuple[tuple[str, Scalar], ...]

    def best(self, pairs: Pairs, view: View, think_s: float, graphs: str) -> float:
        """The window above 0 with the most turns/s."""
        return max(self.windows_ms[1:], key=lambda window: number(pairs.at(cell(view, window, think_s, graphs), rps)))


SIMULATED = Windows(windows_ms=(0, 2, 5, 10, 20, 50), think_s=(0.0, 0.05, 0.5), clients=64, knobs=(("model", MIDDLE),))
MEASURED = Windows(windows_ms=(0, 1, 2, 4, 10), think_s=(0.0, 0.02), clients=16, knobs=(("num_prompts", 800),))


def grid(view: View) -> Windows:
    return SIMULATED if view.obtained == "simulated" else MEASURED


def cell(view: View, window_ms: float, think_s: float, graphs: str, figure: str | None = None) -> Cell:
    asked = grid(view)
    return CONTENDERS["laps"].cell(
        figure,
        view,
        LMSYS,
        {
            **dict(asked.knobs),
            "clients": asked.clients,
            "max_tokens": 255,
            "think_s": think_s,
            "graphs": graphs,
            "min_window_s": window_ms / 1e3,
            "max_window_s": window_ms / 1e3,
        },
        together="laps-window",
    )


def cells(view: View) -> list[Cell]:
    asked = grid(view)
    return seeded(
        [
            cell(view, window, think_s, graphs, NAME)
            for think_s in asked.think_s
            for graphs in GRAPHS
            for window in asked.windows_ms
        ],
        view,
    )


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs, asked = Pairs(runs, view), grid(view)
    stem = f"{NAME}-{view.stem}"
    measures: tuple[tuple[str, Of], ...] = (("turns/s", rps), ("mean TTFT (ms)", MEAN))
    model = MIDDLE if view.obtained == "simulated" else "the tiny decoder"
    with style.drawing():
        figure, axes = style.grid_of_panels(
            [f"think time {1e3 * think_s:g} ms" for _ in measures for think_s in asked.think_s],
            columns=len(asked.think_s),
        )
        draw_choices(
            axes,
            pairs,
            measures,
            asked.think_s,
            lambda think_s, graphs: [cell(view, window, think_s, graphs) for window in asked.windows_ms],
            [f"{window:g}" for window in asked.windows_ms],
            x_label="window (ms)",
        )
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=len(measures),
            title=title_of(TITLE, view),
            caption=[
                *conclusions(pairs, view),
                *how_obtained(runs, view),
                f"LAPS with {model}, {asked.clients} clients, prompts below 256 tokens. A window of fixed length; the depth adapts. nearest: the smallest captured "
                "graph that covers the batch, as printed; cheapest: only where it is predicted to be faster.",
                seeds_sentence(view),
            ],
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("think ms", "graphs", *(f"{window:g} ms" for window in asked.windows_ms), "batch at 0 ms"),
        rows=tuple(
            (
                f"{1e3 * think_s:g}",
                graphs,
                *(
                    f"{number(pairs.at(place, rps)):.0f}/s {number(pairs.at(place, MEAN)):.0f} ms"
                    for place in (cell(view, window, think_s, graphs) for window in asked.windows_ms)
                ),
                said(pairs.at(cell(view, 0, think_s, graphs), lambda run: run.summary["requests_per_step"])),
            )
            for think_s in asked.think_s
            for graphs in GRAPHS
        ),
        notes=(*conclusions(pairs, view), *invalid_notes(runs)),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    asked, found = grid(view), []
    for think_s in asked.think_s:
        texts = [
            f"{said(_gain(pairs, view, asked.best(pairs, view, think_s, graphs), think_s, graphs), '%')} ({graphs})"
            for graphs in GRAPHS
        ]
        found.append(
            f"Against no window, the best one changes throughput by {' and '.join(texts)} at a think time of {1e3 * think_s:g} ms."
        )
    return found


def _gain(pairs: Pairs, view: View, window: float, think_s: float, graphs: str, of: Of = rps) -> Interval:
    return pairs.versus(cell(view, window, think_s, graphs), cell(view, 0, think_s, graphs), of)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs, asked = Pairs(runs, view), grid(view)
    gains = {
        (think_s, graphs): _gain(pairs, view, asked.best(pairs, view, think_s, graphs), think_s, graphs)
        for think_s in asked.think_s
        for graphs in GRAPHS
    }
    up = [key for key, gain in gains.items() if is_above(gain)]
    top = max(gains.values(), key=number)
    latency = _gain(pairs, view, asked.windows_ms[-1], asked.think_s[1], "cheapest", MEAN)
    return [
        finding(
            "laps-fig5-window",
            number(top),
            f"change of turns/s by the best window: {said(top, '%')} at most; above 0 outside noise in {len(up)} of {len(gains)} settings of think time and "
            f"graph choice; {asked.windows_ms[-1]:g} ms change mean TTFT by {said(latency, '%')} at {1e3 * asked.think_s[1]:g} ms",
            holds=2 * len(up) > len(gains),
        )
    ]
