"""Figures and tables by name. The harness never imports ``paper_figures``: a module is looked up and
imported when its figure is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from engines.errors import UserError
from repro.cell import Cell
from repro.platforms import Platform
from repro.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What drawing a figure left behind, and what is said about it on the terminal."""

    files: tuple[Path, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class FigureModule(Protocol):
    """Interface of a module in ``paper_figures``."""

    TITLE: str
    SOURCE: str
    """Figure and section of the paper."""
    PLATFORMS: tuple[str, ...]
    """Platforms drawn by default, each its own figure file."""

    def cells(self, platform: Platform) -> list[Cell]:
        """The grid of runs behind the figure on one platform."""
        ...

    def render(self, runs: Sequence[StoredRun], platform: Platform, out: Path) -> Rendered:
        """Draw stored runs into ``out``: <name>-<platform>.png, .pdf and the .csv behind them."""
        ...


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    name: str
    module: str
    title: str
    aliases: tuple[str, ...] = field(default=())

    def load(self) -> FigureModule:
        return cast(FigureModule, import_module(self.module))


FIGURES: Mapping[str, FigureEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            FigureEntry(
                name="fig3",
                module="paper_figures.dllm_serve.fig3",
                title="dLLM-Serve Figure 3: throughput against arrival rate",
                aliases=("dllm-serve/fig3",),
            ),
        )
    }
)


def figure(name: str) -> FigureEntry:
    for entry in FIGURES.values():
        if name == entry.name or name in entry.aliases:
            return entry
    raise UserError(f"figure={name!r} is unknown: use one of {', '.join(FIGURES)}")
