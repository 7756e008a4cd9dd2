"""Tables on a terminal, and JSON for machines."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest
from typing import Any, TextIO

from repro.runs.clean import without_secrets

NOT_A_TERMINAL = 160
"""Width of a table, in characters, if nothing tells the terminal's width."""
NARROW = 14
"""A cell that holds a number and is at most this wide is never broken into lines."""
MOST_COLUMNS = 1000
"""The widest terminal that we believe."""
GAP = "  "


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table no wider than the terminal. If it is too wide, columns with the same text in every row become a line above; those
    with numbers only if still needed. Then words of a cell are stacked, and if that is not enough, each row is printed downwards."""
    cells = [tuple(row) for row in rows]
    width = _terminal_width(sys.stdout) or NOT_A_TERMINAL
    say(title)
    if _table_width(_lengths(columns, cells, by_word=False)) > width and len(cells) > 1:
        columns, cells = _without_constants(columns, cells, width)
    if _table_width(_lengths(columns, cells, by_word=True)) > width:
        _print_downwards(columns, cells, width)
    else:
        _print_across(columns, cells, width)


def say(text: str, indent: str = "", *, file: TextIO | None = None) -> None:
    """Print a paragraph without secrets. On a terminal we wrap it between words, else we print it as it is."""
    text = without_secrets(text)
    room = _terminal_width(file or sys.stdout)
    print("\n".join(_wrapped_lines(text, max(room, 40), indent)) if room else indent + text, file=file)


def _terminal_width(stream: TextIO) -> int:
    """Return the width of the stream's terminal, in characters. COLUMNS overrides it; 0 if neither is known."""
    if columns := terminal_size_of(os.environ.get("COLUMNS", "")):
        return columns
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def terminal_size_of(text: str) -> int | None:
    """Parse columns or lines as an environment variable gives them; None if no terminal is that large."""
    size = int(text[:9]) if text.isdecimal() else 0
    return size if 0 < size <= MOST_COLUMNS else None


def _wrapped_lines(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [indent]


def _lengths(columns: Sequence[str], rows: Sequence[Sequence[str]], *, by_word: bool) -> list[int]:
    """Longest cell of each column, or longest word of its head and cells ``by_word``. A number and its unit stay together."""

    def length(cell: str, *, is_head: bool = False) -> int:
        may_break = is_head or len(cell) > NARROW or not any(map(str.isdigit, cell))
        return max(map(len, cell.split() if by_word and may_break else cell.splitlines()), default=0)

    return [
        max(length(name, is_head=True), *(length(str(cell)) for cell in cells), 0)
        for name, *cells in zip(columns, *rows, strict=True)
    ]


def _table_width(lengths: Sequence[int]) -> int:
    """Width of a table, in characters of the terminal."""
    return sum(lengths) + len(GAP) * (len(lengths) - 1)


def _without_constants(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Leave out constant columns of words, then constant columns of numbers, the widest first, until the table fits."""
    constant = [i for i in range(len(columns)) if len({row[i] for row in rows}) == 1]
    numbers = [i for i in constant if any(map(str.isdigit, rows[0][i]))]
    lengths = _lengths(columns, rows, by_word=True)
    kept = [i for i in range(len(columns)) if i not in constant or i in numbers]
    for i in sorted(numbers, key=lambda i: -lengths[i]):
        if _table_width([lengths[i] for i in kept]) <= width:
            break
        kept.remove(i)
    kept = kept or [0]
    if text := "; ".join(f"{columns[i]}: {rows[0][i]}" for i in constant if i not in kept and rows[0][i]):
        say(text)
    return [columns[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]


def _print_across(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    widths = _column_widths(columns, rows, width)

    def lines(cells: Sequence[str]) -> list[list[str]]:
        return [
            [line for part in str(cell).splitlines() or [""] for line in _wrapped_lines(part, width)]
            for cell, width in zip(cells, widths, strict=True)
        ]

    heads = lines(columns)
    highest = max(map(len, heads))
    # A short head stands directly above its column.
    lowered = [[""] * (highest - len(head)) + head for head in heads]
    for cells in (lowered, [["-" * width] for width in widths], *map(lines, rows)):
        for parts in zip_longest(*cells, fillvalue=""):
            print(GAP.join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns, each at least its longest word. We give the rest of the terminal to cells before heads, and first to the
    columns that lack least."""
    full = _lengths(columns, rows, by_word=False)
    if _table_width(full) <= width:
        return full
    widths = _lengths(columns, rows, by_word=True)
    room = width - _table_width(widths)
    for targets in (_lengths([""] * len(columns), rows, by_word=False), full):
        lacking = [max(0, targets[i] - widths[i]) for i in range(len(widths))]
        for done, i in enumerate(sorted(range(len(widths)), key=lacking.__getitem__)):
            more = min(lacking[i], room // (len(widths) - done))
            widths[i], room = widths[i] + more, room - more
    return widths


def _print_downwards(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    indent = min(max(map(len, columns), default=0) + 2, width // 2)
    for row in rows:
        print()
        for name, cell in zip(columns, row, strict=True):
            label, parts = f"{name}:", cell.splitlines() or ["-"]
            if len(label) < indent and max(map(len, cell.split()), default=0) <= width - indent:
                lines = [line for part in parts for line in _wrapped_lines(part, width - indent)]
                print(label.ljust(indent) + f"\n{' ' * indent}".join(lines))
            else:
                lines = [line for part in parts for line in _wrapped_lines(part, width, "  ")]
                print(*_wrapped_lines(label, width), *lines, sep="\n")


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a progress bar on stderr by one. We draw nothing unless stderr is a capable terminal, and clear the
    bar at the end."""
    from rich.console import Console

    from repro.runs.progress import bars

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda: None
        return
    with bars(console, is_counted=total is not None) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


_json_stream: TextIO | None = None
"""Standard output, while ``json_alone`` sends all other text to standard error."""


@contextmanager
def json_alone() -> Iterator[None]:
    """Send what policies and libraries print to standard error, so that standard output holds one JSON object and nothing else."""
    global _json_stream
    _json_stream = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json_stream = None


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False), file=_json_stream or sys.stdout)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 1, *, scale: float = 1.0, half_width: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{scale * value:z,.{digits}f}" + ("" if half_width is None else f" ± {scale * half_width:.{digits}f}")


def ratio(mean: float | None, low: float | None = None, high: float | None = None) -> str:
    """Format a ratio like ``1.25x [1.18, 1.32]``, with no more decimals than the interval warrants."""
    if mean is None:
        return "-"
    if low is None or high is None:
        return f"{mean:.2f}x"
    from repro.runs.statistics import Interval, decimals

    digits = decimals(Interval(mean=mean, half_width=(high - low) / 2, n=2, confidence=0.95))
    return f"{mean:.{digits}f}x [{low:.{digits}f}, {high:.{digits}f}]"


def count_text(count: int, name: str) -> str:
    """Format a count like ``1 run`` or ``2 runs``."""
    return f"{count} {name}{'' if count == 1 else 's'}"
