"""Tables in documents, made from the committed results.

A document marks a table by ``<!-- generated: NAME -->`` and ``<!-- end -->``; ``docs/tables`` holds one YAML file a document that says which
numbers the table shows. ``python -m repro.checks.documents`` fills every table.
"""

import csv
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

from engines.errors import UserError, require
from repro.files import one_line, read_yaml, replace_text, unreadable_yaml
from repro.paths import REPO, RESULTS
from repro.runs.statistics import (
    Interval,
    as_percent,
    crossed_interval,
    decimals,
    from_logarithms,
    mean_interval,
    paired_ratio,
)

TABLES = Path("docs/tables")
COMMAND = "python -m repro.checks.documents"
Row = Mapping[str, str]
Number = float | tuple[float, float] | Interval
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}
BLOCK = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
_SUMMARIES: Mapping[str, Callable[[Sequence[float]], Number]] = {
    "mean": mean,
    "sum": sum,
    "max": max,
    "range": lambda values: (min(values), max(values)),
}


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """How one cell of a table is computed from rows of a CSV file.

    ``where``, ``one`` and ``other`` choose rows by a value, or a list of values, for each column. ``=name`` stands for the value of another
    column, ``*`` for any value, ``>0`` for numbers above 0. ``one`` and ``other`` are the sides of a comparison.
    """

    of: str | Sequence[str]
    """CSV files below the folder of results."""
    column: str = ""
    show: str = "mean"
    """``mean`` and other summaries, ``value``, ``text``, ``count``, ``interval``, ``ratio`` or ``gap``."""
    where: Mapping[str, Any] = field(default_factory=dict)
    one: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    best: str = ""
    """Column that names competitors. The other side is the competitor with the largest mean."""
    pair: str | Sequence[str] = "seed"
    """Column that pairs the two sides; without such a column, a side is one row. Two columns are crossed effects."""
    each: Sequence[str] = ()
    """Columns that divide the rows into cells, which are compared separately."""
    take: str = ""
    """With ``each``: a summary of the comparisons, their ``pooled`` interval, or how many are significant (``ahead``, ``behind``)."""
    over: str = ""
    """Column whose mean divides the mean of ``column``."""
    low: str = ""
    high: str = ""
    """Columns with the ends of a ``value``'s interval."""
    times: float = 1
    format: str = ""
    """Python's format of a number. ``%`` shows the excess over 1 in percent; ``+`` before it shows the sign."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Words by which a row's text names a column's value, or what is compared cell by cell, if it does not use the value itself."""
    missing: str = ""
    """Text for a cell without rows, which otherwise is an error. A row with only this text is left out."""

    def text(self, read: Callable[[str], Sequence[Row]]) -> str:
        names = [self.of] if isinstance(self.of, str) else self.of
        rows = _matching_rows([row for name in names for row in read(name)], self.where)
        if self.missing and not _matching_rows(rows, self.one):
            return self.missing
        if self.show == "text":
            (text,) = {row[self.column] for row in rows}
            return text
        return _formatted(self._number(rows), self.format)

    def check_named(self, label: str, read: Callable[[str], Sequence[Row]]) -> None:
        """Raise UserError if a row's text does not name a value that its number depends on, although the column has several."""
        names = [self.of] if isinstance(self.of, str) else self.of
        rows = [row for name in names for row in read(name)]
        pairs = [] if self.pair == "seed" else [self.pair] if isinstance(self.pair, str) else self.pair
        for column in dict.fromkeys([*self.where, *self.each, *pairs]):
            words = self.says.get(column, str(self.where.get(column, column)))
            several = len({row.get(column) for row in rows}) > 1
            require(
                words in label or not several,
                f"{label!r} does not name {column}={self.where.get(column, 'each')}, one of several in {', '.join(names)}: say it, and add "
                f"the words as says: {{{column}: WORDS}}",
            )

    def _number(self, rows: Sequence[Row]) -> Number:
        if self.show == "count":
            return float(len(rows))
        if self.show in ("ratio", "gap"):
            return self._comparison_of_cells(rows) if self.each else self._comparison(self._sides(rows))
        # Take the first number of a text like ``72 ± 10 %``.
        values = [self.times * float(row[self.column].partition("±")[0]) for row in rows if row[self.column]]
        if self.show == "interval":
            return mean_interval(values)
        if self.show == "value":
            return self._value(rows)
        if self.over:
            return mean(values) / mean(float(row[self.over]) for row in rows)
        return _SUMMARIES[self.show](values)

    def _value(self, rows: Sequence[Row]) -> Number:
        (value,) = {self.times * float(row[self.column]) for row in rows}
        if not self.low:
            return value
        low, high = (self.times * float(rows[0][name]) for name in (self.low, self.high))
        return Interval(mean=value, half_width=(high - low) / 2, n=0, confidence=0.95, bounds=(low, high))

    def _sides(self, rows: Sequence[Row]) -> tuple[Mapping[str, float], Mapping[str, float]]:
        one, other = (_matching_rows(rows, side) for side in (self.one, self.other))
        if not self.best:
            return self._by_pair(one), self._by_pair(other)
        competitors = {row[self.best] for row in other}
        sides = [self._by_pair([row for row in other if row[self.best] == name]) for name in sorted(competitors)]
        return self._by_pair(one), max(sides, key=lambda values: mean(values.values()))

    def _by_pair(self, rows: Sequence[Row]) -> Mapping[str, float]:
        names = [self.pair] if isinstance(self.pair, str) else self.pair
        pairs = {
            (" | ".join(row.get(name, "") for name in names), self.times * float(row[self.column])) for row in rows
        }
        if not pairs or len(pairs) != len(dict(pairs)):
            raise ValueError(f"{len(rows)} rows of one side, where one for each {self.pair} is needed")
        return dict(pairs)

    def _comparison(self, sides: tuple[Mapping[str, float], Mapping[str, float]]) -> Interval:
        one, other = sides
        if not isinstance(self.pair, str):
            return from_logarithms(crossed_interval(_crossed({key: math.log(one[key] / other[key]) for key in one})))
        if self.show == "ratio":
            return paired_ratio(one, other)
        return mean_interval([one[seed] - other[seed] for seed in one if seed in other])

    def _comparison_of_cells(self, rows: Sequence[Row]) -> Number:
        cells: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            cells.setdefault(tuple(row[name] for name in self.each), []).append(row)
        sides = [self._sides(cell) for cell in cells.values()]
        if self.take == "pooled":
            return self._pooled(sides)
        intervals = [self._comparison(pair) for pair in sides]
        even = 1 if self.show == "ratio" else 0
        if self.take == "ahead":
            return float(sum(interval.low is not None and interval.low > even for interval in intervals))
        if self.take == "behind":
            return float(sum(interval.high is not None and interval.high < even for interval in intervals))
        return _SUMMARIES[self.take]([interval.mean for interval in intervals if interval.mean is not None])

    def _pooled(self, sides: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Interval:
        """Interval of the mean over cells, seed by seed; a ratio uses logarithms."""
        seeds = [seed for seed in sides[0][0] if all(seed in one and seed in other for one, other in sides)]
        if self.show == "gap":
            return mean_interval([mean(one[seed] - other[seed] for one, other in sides) for seed in seeds])
        logs = [mean(math.log(one[seed] / other[seed]) for one, other in sides) for seed in seeds]
        return from_logarithms(mean_interval(logs))


def _crossed(values: Mapping[str, float]) -> list[list[float]]:
    """A table, rows by columns, of values whose keys name both columns of ``pair``."""
    rows, columns = (list(dict.fromkeys(name.split(" | ")[index] for name in values)) for index in (0, 1))
    return [[values[f"{row} | {column}"] for column in columns] for row in rows]


def _matching_rows(rows: Sequence[Row], conditions: Mapping[str, Any]) -> Sequence[Row]:
    return [row for row in rows if all(_matches(row, column, wanted) for column, wanted in conditions.items())]


def _matches(row: Row, column: str, wanted: Any) -> bool:
    text = row[column]
    if wanted == "*":
        return True
    if isinstance(wanted, list):
        return any(_matches(row, column, value) for value in wanted)
    if isinstance(wanted, bool):
        return text.lower() == str(wanted).lower()
    if isinstance(wanted, int | float):
        return bool(text) and math.isclose(float(text), wanted)
    if isinstance(wanted, str) and wanted[:1] in ("<", ">"):
        return bool(text) and _COMPARED[wanted[0]](float(text), float(wanted[1:]))
    if isinstance(wanted, str) and wanted.startswith("="):
        return text == row[wanted[1:]]
    return text == ("" if wanted is None else wanted)


def _formatted(number: Number, form: str) -> str:
    """A number with its interval. Digits finer than the interval are left out."""
    sign, is_percent = "+z" if form.startswith("+") else "z", form.endswith("%")
    if isinstance(number, tuple):
        return " to ".join(_formatted(end, form) for end in number)
    if not isinstance(number, Interval):
        value = 100 * (number - 1) if is_percent else number
        return format(value, sign + (".0f" if is_percent else form.removeprefix("+") or ".4g"))
    require(form in ("", "+", "%", "+%"), f"format={form!r} does not suit an interval: give %, + or nothing")
    if is_percent:
        number = as_percent(number)
    if number.mean is None:
        raise ValueError("there is no pair to compare")
    digits = f".{decimals(number)}f"
    centre = format(number.mean, sign + digits)
    if number.bounds is not None:
        return f"{centre} [{', '.join(format(end, sign + digits) for end in number.bounds)}]"
    return centre if number.half_width is None else f"{centre} ± {format(number.half_width, digits)}"


def table(declared: Mapping[str, Any], results: Path) -> str:
    """Markdown of one table: every row with every column, whose keys extend or replace the table's own."""
    try:
        return _table(declared, results)
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"it declares no table with rows and columns ({reason}): correct its keys") from error


def _table(declared: Mapping[str, Any], results: Path) -> str:
    common = {name: value for name, value in declared.items() if name not in ("corner", "rows", "columns")}
    read = cache(partial(_read_rows, results))
    columns = _axis(declared["columns"], ", ")
    lines = [[declared.get("corner", ""), *(name for name, _ in columns)]]
    has_conditions = "conditions" in str(declared.get("corner", "")).split(" | ")
    for name, row in _axis(declared["rows"], " | "):
        if has_conditions:
            TableCell(**_merged(common, {key: row[key] for key in row if key != "cells"})).check_named(name, read)
        literal = row.pop("cells", {})
        unknown = literal.keys() - {column for column, _ in columns}
        require(not unknown, f"row {name!r} has cells for {sorted(unknown)}, which are no columns: rename them")
        cells = [
            str(literal[column]) if column in literal else _text(_merged(common, row, keys), read, name, column)
            for column, keys in columns
        ]
        if set(cells) != {common.get("missing")}:
            lines.append([name, *cells])
    width = len(" | ".join(lines[0]).split(" | "))
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * width, *lines[1:]])


def _text(keys: Mapping[str, Any], read: Callable[[str], Sequence[Row]], row: str, column: str) -> str:
    try:
        return TableCell(**keys).text(read)
    except (LookupError, ValueError, TypeError, ArithmeticError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"row {row!r}, column {column!r} cannot be computed ({reason}): correct its keys") from error


def _axis(declared: Any, between: str) -> Sequence[tuple[str, dict[str, Any]]]:
    """Names and keys of rows or columns. Several mappings are combined, each entry with each."""
    mappings = declared if isinstance(declared, list) else [declared]
    products = itertools.product(*(mapping.items() for mapping in mappings))
    return [
        (between.join(str(name) for name, _ in entries), _merged(*(keys or {} for _, keys in entries)))
        for entries in products
    ]


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            is_choice = name in ("where", "one", "other", "cells")
            merged[name] = {**merged.get(name, {}), **value} if is_choice else value
    return merged


def _read_rows(root: Path, name: str) -> Sequence[Row]:
    with (root / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class StaleTable:
    """A table in a document that differs from the results, or cannot be made."""

    document: Path
    name: str
    reason: str


def documents(root: Path) -> Iterator[tuple[Path, Path]]:
    """Every document below ``root``, with the file that declares its tables, if it has any."""
    folder = root / TABLES
    names = {path.stem for path in (*(root / "docs").glob("*.md"), *folder.glob("*.yaml"), root / "README.md")}
    for name in sorted(names):
        yield root / (f"{name}.md" if name == "README" else f"docs/{name}.md"), folder / f"{name}.yaml"


def _declared(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        tables = read_yaml(path)
    except unreadable_yaml() as error:
        raise UserError(f"{path.name} is not valid YAML ({one_line(error)}): fix it") from error
    require(isinstance(tables, dict), f"{path.name} must map names of tables to their keys")
    return dict(tables)


def stale_tables(root: Path, results: Path) -> list[StaleTable]:
    """Tables in the documents below ``root`` that differ from those made of the CSV files below ``results``."""
    return [fault for document, declared in documents(root) for fault in _stale(document, declared, results)]


def _stale(document: Path, path: Path, results: Path) -> Iterator[StaleTable]:
    stale = partial(StaleTable, document=document)
    try:
        declared, text = _declared(path), document.read_text(encoding="utf-8")
    except (UserError, OSError) as error:
        yield stale(name=path.name, reason=str(error))
        return
    blocks = {match["name"]: match["body"].strip() for match in BLOCK.finditer(text)}
    for name in dict.fromkeys([*declared, *blocks, *re.findall(r"<!-- generated: ([\w-]+) -->", text)]):
        if name not in declared:
            yield stale(
                name=name, reason=f"no table {name!r} is declared in {path.name}: declare it, or remove the block"
            )
        elif name not in blocks or "<!-- generated:" in blocks[name]:
            yield stale(name=name, reason=f"the document has no block '<!-- generated: {name} -->' with an end: add it")
        else:
            try:
                is_same = blocks[name] == table(declared[name], results)
            except UserError as error:
                yield stale(name=name, reason=f"{path.name}, {name}: {error}")
            else:
                if not is_same:
                    yield stale(name=name, reason=f"table {name!r} is not what the results say: run '{COMMAND}'")


def fill(root: Path, results: Path) -> None:
    """Write the current tables into the documents below ``root``."""
    for document, path in documents(root):
        if declared := _declared(path):
            text = BLOCK.sub(partial(_filled, declared, results), document.read_text(encoding="utf-8"))
            replace_text(document, text)


def _filled(declared: Mapping[str, Any], results: Path, block: re.Match[str]) -> str:
    name = block["name"]
    if name not in declared:
        return block.group()
    return f"<!-- generated: {name} -->\n\n{table(declared[name], results)}\n\n<!-- end -->"


if __name__ == "__main__":
    try:
        fill(REPO, RESULTS)
        faults = [f"{fault.document.name}: {fault.reason}" for fault in stale_tables(REPO, RESULTS)]
    except UserError as error:
        faults = [str(error)]
    sys.exit("\n".join(faults) if faults else 0)
