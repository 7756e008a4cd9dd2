"""Runs of Figures 1 and 3: a few clients with long prompts and a few with short ones, on one instance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paper_figures.common.panel import Axis, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import GUIDE_COLOR
from paper_figures.common.words import plural
from paper_figures.laps.contenders import CONTENDERS, LARGE, LMSYS
from paper_figures.laps.layout import doubling, line
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

SYSTEM = "sglang"
"""The paper shows only this system."""
SHADES = ("#9ECAE1", "#4292C6", "#08519C")
"""Light to dark, by the number of other clients."""


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """``longs`` and ``shorts`` are numbers of clients with long and with short prompts."""

    longs: tuple[int, ...]
    shorts: tuple[int, ...]
    kappas: tuple[float, ...]
    model: str | None
    """None is the platform's own model. It is measured, and so is its kappa."""
    turns_a_client: int
    least_turns: int

    @property
    def mixed(self) -> list[tuple[int, int]]:
        return [(longs, shorts) for longs in self.longs for shorts in self.shorts]

    @property
    def alone(self) -> list[tuple[int, int]]:
        return [(longs, 0) for longs in self.longs] + [(0, shorts) for shorts in self.shorts]

    @property
    def panels(self) -> dict[float, str]:
        """Return one title per kappa; if measured, there is one kappa."""
        return {kappa: "kappa as it is" if self.model is None else f"kappa = {kappa:g}" for kappa in self.kappas}

    @property
    def sentence(self) -> str:
        model = self.model or "The tiny decoder"
        return (
            f"{model}, SGLang PD on one instance; long: above 1,000 tokens, short: below 64, both of LMSYS-Chat-1M's "
            "first turns; closed loop without think time. Both axes are logarithmic. The paper's text states no value of this figure."
        )


MIXTURES: Mapping[str, Mixtures] = {
    "roofline": Mixtures(
        longs=(1, 4, 16), shorts=(4, 16, 64), kappas=(0.0, 0.2), model=LARGE, turns_a_client=25, least_turns=250
    ),
    "torch": Mixtures(longs=(1, 4), shorts=(4, 16), kappas=(0.0,), model=None, turns_a_client=30, least_turns=100),
}


def cell(view: View, longs: int, shorts: int, kappa: float = 0.0) -> Cell:
    """Every client gets the same number of turns."""
    mixtures = MIXTURES[view.platform.executor]
    turns = max(mixtures.least_turns, mixtures.turns_a_client * (longs + shorts))
    knobs: dict[str, Scalar] = {} if mixtures.model is None else {"model": mixtures.model, "kappa": kappa}
    knobs |= {"long_clients": longs, "short_clients": shorts, "num_prompts": turns}
    return CONTENDERS[SYSTEM].cell(view, LMSYS, knobs, together="laps-interference")


def cells(view: View) -> list[Cell]:
    """Return long prompts alone, short ones alone, and every mixture."""
    mixtures = MIXTURES[view.platform.executor]
    return [cell(view, *pair, kappa) for kappa in mixtures.kappas for pair in (*mixtures.alone, *mixtures.mixed)]


def panels(runs: Runs, of: Measure, whose: Literal["long", "short"]) -> list[Panel]:
    """Draw one panel per kappa, all on one scale, over the clients with long or short prompts. Lines are mixtures, with a shade for each
    number of other clients; runs without other clients are dashed."""
    mixtures = MIXTURES[runs.view.platform.executor]
    ticks, counts, other = mixtures.longs, mixtures.shorts, "short"
    if whose == "short":
        ticks, counts, other = counts, ticks, "long"

    def asked(count: int, kappa: float) -> list[Cell]:
        pairs = [(place, count) if whose == "long" else (count, place) for place in ticks]
        return [cell(runs.view, *pair, kappa) for pair in pairs]

    titles = mixtures.panels
    intervals = [runs.at(each, of) for kappa in titles for count in (0, *counts) for each in asked(count, kappa)]
    ends = [end for at in intervals if at.mean for end in (at.mean, at.low, at.high) if end is not None and end > 0]
    limits = (0.8 * min(ends), 1.25 * max(ends)) if ends else None

    return [
        Panel(
            title=title,
            layers=[
                *(
                    line(
                        runs,
                        SYSTEM,
                        ticks,
                        asked(count, kappa),
                        of,
                        f"{plural(count, 'client')} with {other} prompts",
                        color=shade,
                    )
                    for count, shade in zip(counts, SHADES, strict=False)
                ),
                line(
                    runs, SYSTEM, ticks, asked(0, kappa), of, f"{whose} prompts only", color=GUIDE_COLOR, linestyle="--"
                ),
            ],
            x=doubling(ticks, f"clients with {whose} prompts"),
            y=Axis(label=of.label, better=of.better, scale="plain log", limits=limits),
        )
        for kappa, title in titles.items()
    ]
