"""Tables on a terminal, JSON for machines."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

NOT_A_TERMINAL = 160
"""Columns where nothing says how many there are."""
NARROW = 14
"""A column no wider is never broken into lines."""


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """No wider than the terminal: columns that say the same in every row become a line above, a column of words is
    broken between them, and where that is not enough each row is written downwards."""
    held = [tuple(row) for row in rows]
    width = _width()
    say(title)
    if _natural_width(columns, held) > width and len(held) > 1:
        columns, held = _without_constants(columns, held, width)
    if _least_width(columns, held) > width:
        _print_downwards(columns, held, width)
    else:
        _print_across(columns, held, width)


def say(text: str, indent: str = "", *, file: TextIO | None = None) -> None:
    """A paragraph, broken between words where it is longer than the terminal; as it is where there is none."""
    columns = shutil.get_terminal_size((0, 0)).columns
    given = textwrap.TextWrapper(
        max(columns, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(given.fill(text) if columns else indent + text, file=file)


def _width() -> int:
    """Of the terminal, or as COLUMNS says."""
    return shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns


def _lengths(columns: Sequence[str], rows: Sequence[Sequence[str]], *, by_word: bool) -> list[int]:
    """Of each column the longest cell, or the longest word of its cells."""

    def length(cell: str) -> int:
        parts = cell.split() if by_word and len(cell) > NARROW else cell.splitlines()
        return max(map(len, parts), default=0)

    return [max(length(str(cell)) for cell in (name, *cells)) for name, *cells in zip(columns, *rows, strict=True)]


def _natural_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(_lengths(columns, rows, by_word=False)) + 3 * len(columns) + 1


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(_lengths(columns, rows, by_word=True)) + 3 * len(columns) + 1


def _without_constants(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> tuple[list[str], list[tuple[str, ...]]]:
    same = [i for i in range(len(columns)) if len({row[i] for row in rows}) == 1]
    kept = [i for i in range(len(columns)) if i not in same] or [0]
    said = "; ".join(f"{columns[i]}: {rows[0][i]}" for i in same if i not in kept)
    for line in textwrap.wrap(said, width):
        print(line)
    return [columns[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]


def _print_across(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    whole, words = _lengths(columns, rows, by_word=False), _lengths(columns, rows, by_word=True)
    fits = sum(whole) + 3 * len(columns) + 1 <= width
    for name, natural, least in zip(columns, whole, words, strict=True):
        is_rigid = fits or natural <= NARROW
        table.add_column(name, overflow="fold", no_wrap=is_rigid, min_width=natural if is_rigid else least)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=width).print(table)


def _print_downwards(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    indent = min(max(map(len, columns), default=0) + 2, width // 2)
    for row in rows:
        print("-" * min(width, 40))
        for name, cell in zip(columns, row, strict=True):
            label = f"{name}:".ljust(indent)
            lines = textwrap.wrap(cell, max(width - len(label), 10)) or ["-"]
            print(label + f"\n{' ' * len(label)}".join(lines))


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
