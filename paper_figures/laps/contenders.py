"""What is compared in LAPS's figures, how a cell of each is asked for, and how it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.systems.laps.part import MODELS

PAIRED_SEEDS = 10
"""Repeats of a figure where a view asks for no other number."""
LMSYS, SHAREGPT = "lmsys-chat-1m", "sharegpt"
SMALL, MIDDLE, LARGE = MODELS
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
"""From 1 to 64 (LAPS §4.1); powers of two are assumed."""
CAPACITY: Mapping[str, float] = MappingProxyType({SMALL: 167.0, MIDDLE: 83.0, LARGE: 36.5})
"""Turns/s that SGLang serves on one instance with 256 clients: what a load of 1 means."""

_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _BLACK, _GOLD = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#000000",
    "#E69F00",
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    system: str
    title: str
    color: str
    marker: str
    linestyle: str = "-"
    knobs: tuple[tuple[str, Scalar], ...] = ()

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle}

    def cell(
        self,
        figure: str | None,
        view: View,
        dataset: str,
        knobs: Mapping[str, Scalar],
        *,
        rate: float | None = None,
        seed: int = 0,
        together: str | None = None,
    ) -> Cell:
        """``together`` names the comparison that a measured cell is made in."""
        compared = {} if together is None else dict(view.together(together))
        return Cell(
            figure=figure,
            system=self.system,
            dataset=dataset,
            platform=view.platform.name,
            executor=view.platform.executor,
            rate=rate,
            seed=seed,
            knobs=tuple({**dict(self.knobs), **knobs, **compared}.items()),
        )


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        each.name: each
        for each in (
            Contender(name="sglang", system="sglang-pd", title="SGLang PD", color=_ORANGE, marker="s"),
            Contender(
                name="router",
                system="sglang-pd-router",
                title="SGLang PD + router",
                color=_ORANGE,
                marker="D",
                linestyle="--",
            ),
            Contender(
                name="sglang-graphs",
                system="sglang-pd",
                title="SGLang PD, prefill graphs",
                color=_GOLD,
                marker="X",
                linestyle="--",
                knobs=(("prefill_graphs", True),),
            ),
            Contender(name="vllm", system="vllm-pd", title="vLLM PD", color=_GREEN, marker="^"),
            Contender(name="graphs", system="laps-graphs-only", title="LAPS, graphs only", color=_SKY, marker="v"),
            Contender(
                name="apart",
                system="laps-disaggregation-only",
                title="LAPS, disaggregation only",
                color=_PINK,
                marker="<",
            ),
            Contender(name="laps", system="laps", title="LAPS", color=_BLUE, marker="o"),
            Contender(name="reserve", system="reserve", title="Reserve", color=_BLACK, marker="P"),
        )
    }
)
SINGLE = ("sglang", "graphs", "apart", "laps", "reserve")
EIGHT = ("sglang", "router", "graphs", "apart", "laps", "reserve")


def seeded(cells: list[Cell], view: View) -> list[Cell]:
    """Each with every seed, all of one seed before the next: a sweep that is stopped has whole repeats."""
    return [replace(cell, seed=seed) for seed in view.seeds for cell in dict.fromkeys(cells)]
