"""Progress of a sweep: bars on a terminal, log lines elsewhere."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.runs.cell import Cell
from repro.runs.clean import without_secrets
from repro.runs.experiment import Experiment
from repro.runs.pool import OnStep
from repro.runs.record import DriveProgress
from repro.runs.sweep import CellEvent, OnEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

logger = logging.getLogger(__name__)


MANY_CELLS = 1000
"""So many cells take a second or more to prepare."""
REDRAW_S = 0.5
WEEK_S = 7 * 24 * 3600.0
WHICH_VARIABLE = "REPRO_PROGRESS"
"""Variable with the text before a bar. A command that calls another one for each figure names the figure in it."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Callbacks for a sweep. ``on_step`` reports steps of a run in this process; None if nobody watches."""

    on_event: OnEvent
    on_step: OnStep | None = None


def preparing(cells: Sequence[Cell], console: "Console | None" = None) -> Iterable[Cell]:
    """Yields each cell before it is prepared. Many cells get a bar on a terminal, because each draws its workload."""
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
    """Yields the callbacks for ``Sweep.run``. Terminal and log both show failed and interrupted cells in words, and reused ones if that log
    level is on."""
    from rich.console import Console as RichConsole

    console = console or RichConsole(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield SweepProgress(on_event=_log_event)
        return

    from rich.text import Text

    label = os.environ.get(WHICH_VARIABLE, "")
    # The pace counts from the start of the first run, because reused runs took no time.
    with bars(console, pace_over_s=WEEK_S) as progress:
        task = progress.add_task(label, total=num_total, start=False)
        drawn_at, num_closed = 0.0, 0

        def with_label(text: str) -> str:
            return f"{label}, {text}" if label else text

        def draw(event: CellEvent) -> None:
            nonlocal num_closed
            num_closed = event.num_closed
            is_started = event.kind == "started" and event.cell is not None
            description = with_label(_short_name(event.cell)) if is_started and event.cell is not None else None
            if is_started and not progress.tasks[0].started:
                progress.reset(task, completed=event.num_closed)
            progress.update(task, completed=event.num_closed, description=description)
            # The summary tells how many cells were reused.
            is_shown = event.kind != "reused" or logger.isEnabledFor(logging.INFO)
            if event.kind in ("reused", "failed", "interrupted") and is_shown:
                # Plain text: an error message may hold brackets.
                progress.console.print(Text(_event_text(event)))

        def draw_step(experiment: Experiment, done: DriveProgress) -> None:
            nonlocal drawn_at
            # Redraw seldom, so that a measured run is not disturbed.
            if (now := time.monotonic()) - drawn_at < REDRAW_S:
                return
            drawn_at = now
            share = done.num_closed / max(done.num_total, 1)
            description = with_label(f"{_short_name(experiment.cell)}: {done.num_closed} of {done.num_total} requests")
            progress.update(task, completed=num_closed + share, description=description)

        yield SweepProgress(on_event=draw, on_step=draw_step)


def bars(console: "Console", *, is_counted: bool = True, pace_over_s: float = 30.0) -> "Progress":
    """Bars with a description, the progress and the time; without a known total, only what is done. The pace of the last ``pace_over_s``
    seconds predicts the time left."""
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


def _short_name(cell: Cell) -> str:
    """A name of the cell that fits beside a bar on a narrow terminal."""
    rate = "" if cell.rate is None else f" at {cell.rate:g}/s"
    return f"{cell.system.partition(':')[2] or cell.system}, {cell.dataset}{rate}"


def _log_event(event: CellEvent) -> None:
    level = {"failed": logging.ERROR, "interrupted": logging.WARNING}.get(event.kind, logging.INFO)
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _event_text(event))


def _event_text(event: CellEvent) -> str:
    name = "" if event.cell is None else f"{event.kind} {event.cell.folder_name}: "
    line = f"[{event.num_closed}/{event.num_total}] {name}{event.message}"
    # A message may hold text from a server or a file.
    return "".join(c if c.isprintable() else "?" for c in " ".join(without_secrets(line).split()))
