"""The runs behind Figures 1 and 3: a few clients with long prompts, a few with short ones, one instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.laps.compare import Of, Pairs
from paper_figures.laps.contenders import CONTENDERS, LARGE, LMSYS, seeded
from paper_figures.laps.layout import draw_line, log_axis
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYSTEM = "sglang"
"""The paper shows it alone."""


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """``longs`` and ``shorts`` are numbers of clients."""

    longs: tuple[int, ...]
    shorts: tuple[int, ...]
    kappas: tuple[float, ...]
    model: str | None
    """None: the platform's own, which is measured, and with it kappa."""
    turns_a_client: int
    least_turns: int

    def knobs(self, longs: int, shorts: int, kappa: float) -> dict[str, Scalar]:
        """``num_prompts`` gives each client as many turns."""
        turns = max(self.least_turns, self.turns_a_client * (longs + shorts))
        simulated: dict[str, Scalar] = {} if self.model is None else {"model": self.model, "kappa": kappa}
        return {"long_clients": longs, "short_clients": shorts, "num_prompts": turns, **simulated}

    @property
    def mixed(self) -> list[tuple[int, int]]:
        return [(longs, shorts) for longs in self.longs for shorts in self.shorts]

    @property
    def alone(self) -> list[tuple[int, int]]:
        return [(longs, 0) for longs in self.longs] + [(0, shorts) for shorts in self.shorts]


SIMULATED = Mixtures(
    longs=(1, 4, 16), shorts=(4, 16, 64), kappas=(0.0, 0.2), model=LARGE, turns_a_client=25, least_turns=250
)
MEASURED = Mixtures(longs=(1, 4), shorts=(4, 16), kappas=(0.0,), model=None, turns_a_client=30, least_turns=100)


def mixtures(view: View) -> Mixtures:
    return SIMULATED if view.obtained == "simulated" else MEASURED


def cell(view: View, longs: int, shorts: int, kappa: float, figure: str | None = None) -> Cell:
    knobs = mixtures(view).knobs(longs, shorts, kappa)
    return CONTENDERS[SYSTEM].cell(figure, view, LMSYS, knobs, together="laps-interference")


def cells(figure: str, view: View) -> list[Cell]:
    """Long prompts alone, short ones alone, and every mixture."""
    asked = mixtures(view)
    return seeded(
        [cell(view, *pair, kappa, figure) for kappa in asked.kappas for pair in (*asked.alone, *asked.mixed)], view
    )


def panels(view: View) -> tuple[str, ...]:
    """A title a kappa; measured there is one."""
    asked = mixtures(view)
    return ("measured",) if asked.model is None else tuple(f"kappa = {kappa:g}" for kappa in asked.kappas)


def model_sentence(view: View) -> str:
    model = "the tiny decoder" if mixtures(view).model is None else str(mixtures(view).model)
    return (
        f"{model[0].upper()}{model[1:]}, SGLang PD on one instance; long: above 1,000 tokens, short: below 64, both of LMSYS-Chat-1M's "
        "first turns; closed loop without think time."
    )


def draw(
    axes: Sequence[Axes],
    pairs: Pairs,
    view: View,
    of: Of,
    *,
    along: Sequence[int],
    each: Sequence[int],
    pair_of: Callable[[int, int], tuple[int, int]],
    words: tuple[str, str, str],
) -> None:
    """A panel a kappa: lines of mixtures, a shade for each number of other clients, over the alone ones dashed.

    ``pair_of`` (along, other) is (longs, shorts); ``words`` name the axis, a line's clients and the dashed line.
    """
    axis, others, alone = words
    contender = CONTENDERS[SYSTEM]
    for panel, kappa in zip(axes, mixtures(view).kappas, strict=True):
        for count, color in zip(each, shades(len(each)), strict=True):
            asked = [cell(view, *pair_of(place, count), kappa) for place in along]
            label = f"{count} client{'s' if count > 1 else ''} with {others}"
            draw_line(panel, pairs, contender, along, asked, of, color=color, label=label)
        asked = [cell(view, *pair_of(place, 0), kappa) for place in along]
        dashed = {"color": style.GUIDE_COLOR, "linestyle": "--", "label": alone}
        draw_line(panel, pairs, contender, along, asked, of, **dashed)
        log_axis(panel, along)
        panel.set_xlabel(axis)
        style.log_scale(panel)


def shades(count: int) -> Sequence[str]:
    """Light to dark."""
    return ("#9ECAE1", "#4292C6", "#08519C")[:count]
