"""Tables on a terminal, JSON for machines."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TextIO

from repro.runs.clean import hidden

NOT_A_TERMINAL = 160
"""Columns where nothing says how many there are."""
NARROW = 14
"""A cell with a number in it that is no wider is never broken into lines."""
MOST_COLUMNS = 1000
"""The widest terminal that one would believe."""
GAP = "  "


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """No wider than the terminal: columns that say the same in every row become a line above (numbers only where the rest
    still does not fit), words of a cell come one below the other, and where that is not enough each row is written
    downwards."""
    held = [tuple(row) for row in rows]
    width = _room(sys.stdout) or NOT_A_TERMINAL
    say(title)
    if _taken(_lengths(columns, held, by_word=False)) > width and len(held) > 1:
        columns, held = _without_constants(columns, held, width)
    if _taken(_lengths(columns, held, by_word=True)) > width:
        _print_downwards(columns, held, width)
    else:
        _print_across(columns, held, width)


def say(text: str, indent: str = "", *, file: TextIO | None = None) -> None:
    """A paragraph without secrets, broken between words where it is longer than the terminal; as it is where there is none."""
    text = hidden(text)
    room = _room(file or sys.stdout)
    print("\n".join(_broken(text, max(room, 40), indent)) if room else indent + text, file=file)


def _room(stream: TextIO) -> int:
    """Columns of the stream's terminal; where it has none, as COLUMNS says, and 0 where nothing does."""
    if told := terminal_size_of(os.environ.get("COLUMNS", "")):
        return told
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def terminal_size_of(told: str) -> int | None:
    """Columns or lines, as an environment variable gives them; None where no terminal has as many."""
    size = int(told[:9]) if told.isdecimal() else 0
    return size if 0 < size <= MOST_COLUMNS else None


def _broken(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [indent]


def _lengths(columns: Sequence[str], rows: Sequence[Sequence[str]], *, by_word: bool) -> list[int]:
    """The longest cell of each column, or the longest word of its head and cells; a number and its unit stay together."""

    def length(cell: str, *, is_head: bool = False) -> int:
        may_break = is_head or len(cell) > NARROW or not any(map(str.isdigit, cell))
        return max(map(len, cell.split() if by_word and may_break else cell.splitlines()), default=0)

    return [
        max(length(name, is_head=True), *(length(str(cell)) for cell in cells), 0)
        for name, *cells in zip(columns, *rows, strict=True)
    ]


def _taken(lengths: Sequence[int]) -> int:
    """Columns of the terminal that a table takes."""
    return sum(lengths) + len(GAP) * (len(lengths) - 1)


def _without_constants(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Without the words that are constant and, the longest first, as many of the numbers as have to go."""
    same = [i for i in range(len(columns)) if len({row[i] for row in rows}) == 1]
    numbers = [i for i in same if any(map(str.isdigit, rows[0][i]))]
    lengths = _lengths(columns, rows, by_word=True)
    kept = [i for i in range(len(columns)) if i not in same or i in numbers]
    for i in sorted(numbers, key=lambda i: -lengths[i]):
        if _taken([lengths[i] for i in kept]) <= width:
            break
        kept.remove(i)
    kept = kept or [0]
    if said := "; ".join(f"{columns[i]}: {rows[0][i]}" for i in same if i not in kept and rows[0][i]):
        say(said)
    return [columns[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]


def _print_across(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    given = _shared(columns, rows, width)

    def lines(cells: Sequence[str]) -> list[list[str]]:
        return [
            [line for part in str(cell).splitlines() or [""] for line in _broken(part, length)]
            for cell, length in zip(cells, given, strict=True)
        ]

    heads = lines(columns)
    highest = max(map(len, heads))
    # A short head stands right above its column.
    lowered = [[""] * (highest - len(head)) + head for head in heads]
    for cells in (lowered, [["-" * length] for length in given], *map(lines, rows)):
        for parts in zip_longest(*cells, fillvalue=""):
            print(GAP.join(part.ljust(length) for part, length in zip(parts, given, strict=True)).rstrip())


def _shared(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns: none below its longest word. The rest of the terminal goes to cells before heads, and first to those
    that lack least."""
    whole = _lengths(columns, rows, by_word=False)
    if _taken(whole) <= width:
        return whole
    given = _lengths(columns, rows, by_word=True)
    room = width - _taken(given)
    for wanted in (_lengths([""] * len(columns), rows, by_word=False), whole):
        lacking = [max(0, wanted[i] - given[i]) for i in range(len(given))]
        for done, i in enumerate(sorted(range(len(given)), key=lacking.__getitem__)):
            more = min(lacking[i], room // (len(given) - done))
            given[i], room = given[i] + more, room - more
    return given


def _print_downwards(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    indent = min(max(map(len, columns), default=0) + 2, width // 2)
    for row in rows:
        print()
        for name, cell in zip(columns, row, strict=True):
            label, parts = f"{name}:", cell.splitlines() or ["-"]
            if len(label) < indent and max(map(len, cell.split()), default=0) <= width - indent:
                lines = [line for part in parts for line in _broken(part, width - indent)]
                print(label.ljust(indent) + f"\n{' ' * indent}".join(lines))
            else:
                lines = [line for part in parts for line in _broken(part, width, "  ")]
                print(*_broken(label, width), *lines, sep="\n")


@contextmanager
def counting(description: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Yields what advances a bar on stderr's terminal by one; nothing is drawn where it has none that
    can, and nothing stays."""
    from rich.console import Console

    from repro.runs.progress import bars

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda: None
        return
    with bars(console, is_counted=total is not None) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 1, *, scale: float = 1.0, half_width: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{scale * value:z,.{digits}f}" + ("" if half_width is None else f" ± {scale * half_width:.{digits}f}")


def ratio(mean: float | None, low: float | None = None, high: float | None = None) -> str:
    """``1.25x [1.18, 1.32]``, with no more decimals than the interval has."""
    if mean is None:
        return "-"
    if low is None or high is None:
        return f"{mean:.2f}x"
    from repro.runs.statistics import Interval, decimals

    digits = decimals(Interval(mean=mean, half_width=(high - low) / 2, n=2, confidence=0.95))
    return f"{mean:.{digits}f}x [{low:.{digits}f}, {high:.{digits}f}]"


def counted(count: int, name: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {name}{'' if count == 1 else 's'}"
