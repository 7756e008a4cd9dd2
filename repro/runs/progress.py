"""How far a sweep is: bars on a terminal, log lines elsewhere."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.runs.cell import Cell
from repro.runs.clean import hidden
from repro.runs.experiment import Experiment
from repro.runs.record import DriveProgress
from repro.runs.runner import OnStep
from repro.runs.sweep import CellEvent, OnEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

logger = logging.getLogger(__name__)


MANY_CELLS = 1000
"""That take a second or more to prepare."""
REDRAW_S = 0.5
WEEK_S = 7 * 24 * 3600.0
WHICH_VARIABLE = "REPRO_PROGRESS"
"""What is said before a bar: which of several figures the command is about, where another one calls it."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """What a sweep tells; ``on_step`` within a run made in this process, None where nobody watches."""

    on_event: OnEvent
    on_step: OnStep | None = None


def preparing(cells: Sequence[Cell], console: "Console | None" = None) -> Iterable[Cell]:
    """The cells, each to be prepared; a bar on a terminal where they are many, since each of them draws its workload."""
    if len(cells) < MANY_CELLS:
        return cells

    from rich.console import Console as RichConsole
    from rich.progress import track

    console = console or RichConsole(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        logger.info("preparing %d runs", len(cells))
        return cells
    return track(cells, "preparing", console=console, transient=True)


@contextmanager
def sweep_progress(num_total: int, console: "Console | None" = None) -> Iterator[SweepProgress]:
    """Yields what ``Sweep.run`` is to tell. Failed and interrupted cells are told in words on both, reused ones
    where what is reused is logged."""
    from rich.console import Console as RichConsole

    console = console or RichConsole(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield SweepProgress(on_event=_log_event)
        return

    from rich.text import Text

    which = os.environ.get(WHICH_VARIABLE, "")
    # The pace is that of all runs since the first began: what was stored took no time.
    with bars(console, pace_over_s=WEEK_S) as progress:
        task = progress.add_task(which, total=num_total, start=False)
        drawn_at, num_closed = 0.0, 0

        def described(text: str) -> str:
            return f"{which}, {text}" if which else text

        def draw(event: CellEvent) -> None:
            nonlocal num_closed
            num_closed = event.num_closed
            is_started = event.kind == "started" and event.cell is not None
            description = described(_short(event.cell)) if is_started and event.cell is not None else None
            if is_started and not progress.tasks[0].started:
                progress.reset(task, completed=event.num_closed)
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
            description = described(f"{_short(experiment.cell)}: {done.num_closed} of {done.num_total} requests")
            progress.update(task, completed=num_closed + share, description=description)

        yield SweepProgress(on_event=draw, on_step=draw_step)


def bars(console: "Console", *, is_counted: bool = True, pace_over_s: float = 30.0) -> "Progress":
    """A description, how far and how long; without a count of all only what is done. ``pace_over_s`` is the time whose pace is
    expected to go on."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if is_counted:
        columns += [BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [TimeRemainingColumn(), TextColumn("left")]
    else:
        columns += [TextColumn("{task.completed}"), TimeElapsedColumn()]
    return Progress(*columns, console=console, transient=True, expand=is_counted, speed_estimate_period=pace_over_s)


def _short(cell: Cell) -> str:
    """What fits beside a bar on a narrow terminal."""
    rate = "" if cell.rate is None else f" at {cell.rate:g}/s"
    return f"{cell.system.partition(':')[2] or cell.system}, {cell.dataset}{rate}"


def _log_event(event: CellEvent) -> None:
    level = {"failed": logging.ERROR, "interrupted": logging.WARNING}.get(event.kind, logging.INFO)
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _line(event))


def _line(event: CellEvent) -> str:
    name = "" if event.cell is None else f"{event.kind} {event.cell.folder_name}: "
    line = f"[{event.num_closed}/{event.num_total}] {name}{event.message}"
    # A message may hold what a server or a file said.
    return "".join(c if c.isprintable() else "?" for c in " ".join(hidden(line).split()))
