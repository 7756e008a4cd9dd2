"""Figures and tables by name. The harness never imports ``paper_figures``: a module is looked up and
imported when its figure is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from engines.errors import UserError
from repro.reports.claims import Finding, Obtained
from repro.runs.cell import Cell, Scalar
from repro.runs.store import StoredRun
from repro.systems.platforms import PLATFORMS, Platform

READINGS: Mapping[str, str] = MappingProxyType(
    {
        "published": "baselines as published: upstream's batch limits and overheads",
        "efficient": "baselines in our implementation, largest static batch",
        "policy": "baselines' cache policies under continuous batching",
    }
)
"""Three readings of every comparison. Only the first can be held against the paper, only the last isolates the policy."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What is asked of a figure: where, in which reading of the baselines, over how many repeats."""

    platform: Platform
    reading: str
    num_runs: int = 1
    """Repeats with seeds 0, 1, ...: other arrivals, lengths and prompts."""
    knobs: tuple[tuple[str, Scalar], ...] = ()
    """Of every cell that does not set them itself: the weights of a measured run, or fewer requests."""

    def __post_init__(self) -> None:
        if self.reading not in READINGS:
            raise UserError(f"reading={self.reading!r} is unknown: use one of {', '.join(READINGS)}")
        if self.num_runs < 1:
            raise UserError(f"num_runs={self.num_runs} must be at least 1")

    @property
    def seeds(self) -> range:
        return range(self.num_runs)

    @property
    def obtained(self) -> Obtained:
        return "simulated" if self.platform.executor == "roofline" else "measured"

    @property
    def stem(self) -> str:
        """Ending of the figure's file names."""
        where = self.platform
        known = PLATFORMS.get(where.name)
        parts = [where.name]
        if known is not None and known.executor != where.executor:
            parts.append(self.obtained)
        if self.reading != default_reading(where):
            parts.append(self.reading)
        return "-".join(parts)

    def applied(self, cell: Cell) -> Cell:
        """A figure's cell as this view runs it."""
        return replace(cell, knobs=tuple({**dict(self.knobs), **cell.knob_values}.items())) if self.knobs else cell

    def baseline_knobs(self) -> tuple[tuple[str, Scalar], ...]:
        """The knob that puts a baseline's cell into this reading; none for a system's own default."""
        return () if self.reading == "efficient" else (("reading", self.reading),)


def default_reading(platform: Platform) -> str:
    """A simulated card stands for the paper's runs; on other hardware nothing was published."""
    return "published" if platform.executor == "roofline" else "efficient"


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

    def cells(self, view: View) -> list[Cell]:
        """The grid of runs behind the figure; empty where arithmetic is enough."""
        ...

    def render(self, runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
        """Draw stored runs into ``out``: <name>-<stem>.png, .pdf and the .csv behind them."""
        ...

    def findings(self, runs: Sequence[StoredRun], view: View) -> list[Finding]:
        """What the runs say about the paper's claims that this figure decides."""
        ...


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    name: str
    module: str
    title: str
    aliases: tuple[str, ...] = field(default=())

    def load(self) -> FigureModule:
        return cast(FigureModule, import_module(self.module))


def _dllm_serve(name: str, title: str) -> FigureEntry:
    return FigureEntry(
        name=name,
        module=f"paper_figures.dllm_serve.{name}",
        title=f"dLLM-Serve {title}",
        aliases=(f"dllm-serve/{name}",),
    )


FIGURES: Mapping[str, FigureEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _dllm_serve("fig2", "Figure 2: standard against logit-aware profiling"),
            _dllm_serve("fig3", "Figure 3: throughput against arrival rate"),
            _dllm_serve("fig4", "Figure 4: mean latency against arrival rate"),
            _dllm_serve("fig5", "Figure 5: jitter under high load"),
            _dllm_serve("fig6", "Figure 6: accuracy against retention ratio"),
            _dllm_serve("fig7", "Figure 7: relative throughput by input and output length"),
            _dllm_serve("fig8", "Figure 8: ablation of relative throughput"),
            _dllm_serve("table1", "Table 1: what is cached, and its footprint"),
            _dllm_serve("table2", "Table 2: hardware settings"),
            _dllm_serve("table3", "Table 3: hyper-parameters"),
            _dllm_serve("table4", "Table 4: latency and throughput at a high rate"),
            _dllm_serve("baselines", "baselines: every sampler alone and batched"),
            _dllm_serve("growth", "growth: throughput and memory by concurrency, length, retention and logit budget"),
        )
    }
)


def figure(name: str) -> FigureEntry:
    for entry in FIGURES.values():
        if name == entry.name or name in entry.aliases:
            return entry
    raise UserError(f"figure={name!r} is unknown: use one of {', '.join(FIGURES)}")
