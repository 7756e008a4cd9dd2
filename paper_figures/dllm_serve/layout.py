"""What dLLM-Serve's figures have in common: where they are drawn, and in which view they answer claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paper_figures.common.caption import held_out_note
from paper_figures.common.figure import Page, figure, no_cells, no_findings
from paper_figures.common.runs import Runs
from paper_figures.common.style import Look
from repro.reports.claims import Finding
from repro.reports.figures import Figure, View
from repro.reports.paper import load_figures
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

PAPER = "dLLM-Serve (arXiv:2512.17077)"
PRINTED = Look(color="black", marker="D")
"""Look of the paper's values in bars."""


def dllm_figure(
    name: str,
    source: str,
    *,
    platforms: tuple[str, ...],
    page: Callable[[Runs], Page],
    cells: Callable[[View], list[Cell]] = no_cells,
    findings: Callable[[Runs], list[Finding]] = no_findings,
    card: str | None = None,
    decides_on: tuple[str, ...] | None = None,
    is_timed: bool = True,
    needs_runs: bool = True,
) -> Figure:
    """``card`` is the paper's: only there, and only of baselines as published, are its numbers comparable."""
    return figure(
        name=f"dllm-serve/{name}",
        source=source,
        platforms=platforms,
        page=page,
        cells=cells,
        findings=findings,
        is_timed=is_timed,
        decides_on=decides_on if card is None else (card,),
        needs_runs=needs_runs and cells is not no_cells,
        answers=lambda view: card is None or (view.platform.name == card and view.reading == "published"),
    )


def printed_in(figure: str) -> Mapping[str, Any]:
    """Values of a figure that the paper's text or labels print."""
    return next(entry.values for entry in load_figures("dllm-serve") if entry.id == f"dllm-serve/{figure}")


def simulation_note(runs: Runs) -> list[str]:
    """How good the simulation is where it can be checked."""
    is_simulated = any(run.record.obtained == "simulated" for run in runs.all)
    return held_out_note(runs.view.platform) if is_simulated else []


def all_valid(runs: Sequence[StoredRun]) -> bool:
    return all(run.validity.valid for run in runs)
