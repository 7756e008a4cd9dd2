"""Which mixing penalty the paper's throughput needs: LAPS over SGLang PD by kappa (ours)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paper_figures.common import style
from paper_figures.common.caption import invalid_notes
from paper_figures.laps.compare import MEAN, P90, Pairs, number, rps, said
from paper_figures.laps.contenders import CONTENDERS, LARGE, MIDDLE, PAIRED_SEEDS, seeded
from paper_figures.laps.fig6 import PRINTED
from paper_figures.laps.fig6 import cell as of_figure_6
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, obtained_sentence, place_of, seeds_sentence, title_of
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "kappa"
TITLE = "LAPS kappa: the mixing penalty that the printed throughput needs"
SOURCE = "ours; LAPS §2.2, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
KAPPAS = (0.0, 0.15, 0.3, 0.45, 0.6)
PLACES = ((MIDDLE, 1, 64), (LARGE, 1, 64), (MIDDLE, 8, 64), (LARGE, 8, 64))
"""Model, instances, clients: the paper's gains are those of many clients."""
NAMES = ("sglang", "laps", "reserve")


def cell(view: View, name: str, place: tuple[str, int, int], kappa: float, figure: str | None = None) -> Cell:
    return of_figure_6(view, name, *place, figure, kappa)


def cells(view: View) -> list[Cell]:
    return seeded(
        [cell(view, name, place, kappa, NAME) for place in PLACES for kappa in KAPPAS for name in NAMES], view
    )


def gain(pairs: Pairs, view: View, name: str, place: tuple[str, int, int], kappa: float) -> Interval:
    return pairs.versus(cell(view, name, place, kappa), cell(view, "sglang", place, kappa), rps)


def needed(pairs: Pairs, view: View, place: tuple[str, int, int]) -> float | None:
    """The kappa at which LAPS's gain is the printed one, between two that were simulated; None above them all."""
    gains = [number(gain(pairs, view, "laps", place, kappa)) for kappa in KAPPAS]
    wanted = PRINTED[place[1]] - 0.5  # printed to a whole percent
    if not max(gains) >= wanted:
        return None
    index = next(index for index, value in enumerate(gains) if value >= wanted)
    if index == 0:
        return 0.0
    return float(np.interp(wanted, gains[index - 1 : index + 1], KAPPAS[index - 1 : index + 1]))


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    stem = f"{NAME}-{view.stem}"
    with style.drawing():
        figure, axes = style.grid_of_panels([_title(place) for place in PLACES], columns=2)
        for panel, place in zip(axes, PLACES, strict=True):
            panel.axhline(
                PRINTED[place[1]], linestyle="--", linewidth=1, color=style.GUIDE_COLOR, label="printed: up to"
            )
            for name in NAMES[1:]:
                at = [gain(pairs, view, name, place, kappa) for kappa in KAPPAS]
                panel.errorbar(
                    KAPPAS,
                    list(map(number, at)),
                    yerr=[each.half_width or 0.0 for each in at],
                    capsize=2,
                    **CONTENDERS[name].line,
                    label=CONTENDERS[name].title,
                )
            panel.set_xlabel("kappa")
            panel.set_xticks(KAPPAS)
        for row in (0, 1):
            axes[2 * row].set_ylabel("turns/s over SGLang PD (%)")
        files = style.publish(
            figure,
            axes,
            out,
            stem,
            num_rows=2,
            title=title_of(TITLE, view),
            caption=[
                conclusion(pairs, view),
                obtained_sentence(),
                "kappa: how much longer a step takes that holds short and long prompts than by its matrices and attention. A roofline gives 0. Policies do not know it; the short end of a long prompt counts as short. Closed "
                "loop of 64 clients.",
                seeds_sentence(view),
            ],
            width_inches=style.WIDE_INCHES + 1.2,
        )
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows(runs))),
        columns=("setting", *(f"kappa {kappa:g}" for kappa in KAPPAS), "printed", "needs kappa"),
        rows=tuple(
            (
                _title(place),
                *(
                    f"{said(gain(pairs, view, 'laps', place, kappa))} % ({_other(pairs, view, place, kappa)})"
                    for kappa in KAPPAS
                ),
                f"{PRINTED[place[1]]:.0f} %",
                _needed(pairs, view, place),
            )
            for place in PLACES
        ),
        notes=(conclusion(pairs, view), "In brackets: change of mean and P90 TTFT.", *invalid_notes(runs)),
    )


def conclusion(pairs: Pairs, view: View) -> str:
    texts = [f"{_needed(pairs, view, place)} for {_title(place)}" for place in PLACES]
    return f"The printed gains of 20 % (one instance) and 33 % (eight) need kappa = {', '.join(texts)}; nothing measured says that it is not 0."


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """The paper has no such constant."""
    return []


def _needed(pairs: Pairs, view: View, place: tuple[str, int, int]) -> str:
    found = needed(pairs, view, place)
    return f"above {KAPPAS[-1]:g}" if found is None else f"{found:.2f}"


def _other(pairs: Pairs, view: View, place: tuple[str, int, int], kappa: float) -> str:
    ours, theirs = cell(view, "laps", place, kappa), cell(view, "sglang", place, kappa)
    return ", ".join(f"{number(pairs.versus(ours, theirs, of)):+.0f}" for of in (MEAN, P90))


def _title(place: tuple[str, int, int]) -> str:
    model, instances, _ = place
    return f"{model}, {instances} instance{'s' if instances > 1 else ''}"
