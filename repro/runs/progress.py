"""How far a sweep is: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from repro.runs.sweep import CellEvent, OnEvent

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


@contextmanager
def sweep_progress(num_total: int, console: Console | None = None) -> Iterator[OnEvent]:
    """Yields an ``on_event`` for ``Sweep.run``. Reused, failed and interrupted cells are told in words on both."""
    from rich.console import Console as RichConsole

    console = console or RichConsole(stderr=True)
    if not console.is_terminal:
        yield _log_event
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=num_total)

        def draw(event: CellEvent) -> None:
            description = event.cell.folder_name if event.kind == "started" and event.cell is not None else None
            progress.update(task, completed=event.num_closed, description=description)
            if event.kind in ("reused", "failed", "interrupted"):
                # Plain text: an error message may hold brackets.
                progress.console.print(Text(_line(event)))

        yield draw


def _log_event(event: CellEvent) -> None:
    level = {"failed": logging.ERROR, "interrupted": logging.WARNING}.get(event.kind, logging.INFO)
    logger.log(level, "%s", _line(event))


def _line(event: CellEvent) -> str:
    name = "" if event.cell is None else f"{event.kind} {event.cell.folder_name}: "
    return f"[{event.num_closed}/{event.num_total}] {name}{event.message}"
