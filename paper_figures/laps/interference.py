"""The runs behind Figures 1 and 3: a few clients with long prompts, a few with short ones, one instance."""

from __future__ import annotations

from collections.abc import Sequence

from paper_figures.laps.contenders import CONTENDERS, LARGE, LMSYS, seeded
from repro.reports.figures import View
from repro.runs.cell import Cell

LONGS = (1, 4, 16)
SHORTS = (4, 16, 64)
KAPPAS = (0.0, 0.2)
TURNS_A_CLIENT = 25
LEAST_TURNS = 250
SYSTEMS = ("sglang", "laps", "reserve")
"""The paper shows SGLang alone."""


def cell(view: View, name: str, longs: int, shorts: int, kappa: float, figure: str | None = None) -> Cell:
    """``num_prompts`` gives each client as many turns."""
    clients = longs + shorts
    return CONTENDERS[name].cell(
        figure,
        view,
        LMSYS,
        {
            "model": LARGE,
            "long_clients": longs,
            "short_clients": shorts,
            "num_prompts": max(LEAST_TURNS, TURNS_A_CLIENT * clients),
            "kappa": kappa,
        },
    )


def cells(figure: str, view: View) -> list[Cell]:
    """Long prompts alone, short ones alone, and every mixture."""
    alone = [(longs, 0) for longs in LONGS] + [(0, shorts) for shorts in SHORTS]
    mixed = [(longs, shorts) for longs in LONGS for shorts in SHORTS]
    asked = [
        cell(view, "sglang", longs, shorts, kappa, figure) for kappa in KAPPAS for longs, shorts in (*alone, *mixed)
    ]
    return seeded(asked, view)


def shades(count: int) -> Sequence[str]:
    """Light to dark."""
    return ("#9ECAE1", "#4292C6", "#08519C")[:count]
