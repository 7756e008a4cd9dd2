"""How far a sweep is: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.runs.cell import Cell
from repro.runs.drivers.steps import DriveProgress
from repro.runs.experiment import Experiment
from repro.runs.runner import OnStep
from repro.runs.sweep import CellEvent, OnEvent

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


REDRAW_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """What a sweep tells; ``on_step`` within a run made in this process, None where nobody watches."""

    on_event: OnEvent
    on_step: OnStep | None = None


@contextmanager
def sweep_progress(num_total: int, console: Console | None = None) -> Iterator[SweepProgress]:
    """Yields what ``Sweep.run`` is to tell. Failed and interrupted cells are told in words on both, reused ones
    where what is reused is logged."""
    from rich.console import Console as RichConsole

    console = console or RichConsole(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield SweepProgress(on_event=_log_event)
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("", total=num_total)
        drawn_at, num_closed = 0.0, 0

        def draw(event: CellEvent) -> None:
            nonlocal num_closed
            num_closed = event.num_closed
            description = _short(event.cell) if event.kind == "started" and event.cell is not None else None
            progress.update(task, completed=event.num_closed, description=description)
            # Of the reused ones the summary tells how many.
            is_told = event.kind != "reused" or logger.isEnabledFor(logging.INFO)
            if event.kind in ("reused", "failed", "interrupted") and is_told:
                # Plain text: an error message may hold brackets.
                progress.console.print(Text(_line(event)))

        def draw_step(experiment: Experiment, done: DriveProgress) -> None:
            nonlocal drawn_at
            # Seldom: a run that is measured is not to be disturbed.
            if (now := time.monotonic()) - drawn_at < REDRAW_S:
                return
            drawn_at = now
            share = done.num_closed / max(done.num_total, 1)
            description = f"{_short(experiment.cell)}: {done.num_closed} of {done.num_total} requests"
            progress.update(task, completed=num_closed + share, description=description)

        yield SweepProgress(on_event=draw, on_step=draw_step)


def _short(cell: Cell) -> str:
    """What fits beside a bar on a narrow terminal."""
    rate = "" if cell.rate is None else f" at {cell.rate:g}/s"
    return f"{cell.system.partition(':')[2] or cell.system}, {cell.dataset}{rate}"


def _log_event(event: CellEvent) -> None:
    level = {"failed": logging.ERROR, "interrupted": logging.WARNING}.get(event.kind, logging.INFO)
    logger.log(level, "%s", _line(event))


def _line(event: CellEvent) -> str:
    name = "" if event.cell is None else f"{event.kind} {event.cell.folder_name}: "
    line = f"[{event.num_closed}/{event.num_total}] {name}{event.message}"
    # A message may hold what a server or a file said.
    return "".join(c if c.isprintable() else "?" for c in " ".join(line.split()))
