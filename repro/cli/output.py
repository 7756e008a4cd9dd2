"""Tables on a terminal, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, whole: int = 0
) -> None:
    """``width`` None is the terminal's, or 160 where there is none. The first ``whole`` columns are never folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number < whole)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if width is None and not sys.stdout.isatty():
        width = 160
    Console(width=width).print(table)


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
