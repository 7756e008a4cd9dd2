"""Rows of data files and hub data sets, read one by one. Errors name the file, line and field.

Files are CSV, JSON lines, one JSON array, or parquet. All but parquet may be gzipped. We skip blank lines.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeGuard

from engines.data import DECODER, RepeatedKeyError, open_file
from engines.errors import UserError, require
from repro.workloads.rounds import MOST_SECONDS, MOST_TOKENS, bad_field

_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""The first bytes of packed files that we do not read."""

_UNREADABLE = (UnicodeDecodeError, EOFError, OSError, zlib.error)
"""Errors from reading a file that is not text, or a damaged .gz."""
_ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte-order mark that some editors write."""
_CHUNK = 1 << 20
_LONGEST_LINE = 64 << 20
"""The most characters of a line."""
_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?\s*", re.ASCII)
_GROUPED = re.compile(r"\s*\d{1,3}(,\d{3})+(\.\d+)?\s*", re.ASCII)
_SEPARATORS = (",", ";", "\t")
_BLANKS = re.compile(r"\s*")


csv.field_size_limit(_LONGEST_LINE)
"""We raise Python's default limit of 131,072 characters, because prompts can be longer."""


class Row(NamedTuple):
    where: str
    """File and line."""
    values: Mapping[str, Any]

    def bad(self, field: str, value: object, fix: str) -> UserError:
        return bad_field(self.where, field, value, fix)

    def required(self, field: str) -> Any:
        if field not in self.values:
            raise self.bad(field, None, "the key is missing")
        return self.values[field]

    def is_empty(self, field: str) -> bool:
        """Whether a cell is empty: blanks, or a null."""
        value = self.values.get(field)
        return value is None or (isinstance(value, str) and not value.strip())

    def has(self, field: str | None) -> TypeGuard[str]:
        return field is not None and not self.is_empty(field)

    def count(self, field: str, low: int = 0) -> int:
        """Read a whole number, which may be written as 100.0."""
        value = self.required(field)
        number = _number(value)
        if number is None or number < low or number != int(number):
            raise self.bad(field, value, f"expected a whole number, at least {low}{_without_commas(value)}")
        if number > MOST_TOKENS:
            raise self.bad(field, value, f"expected a whole number, at most {MOST_TOKENS}")
        return int(number)

    def seconds(self, field: str, limit: float = MOST_SECONDS) -> float:
        return float(self.moment(field, limit))

    def moment(self, field: str, limit: float = MOST_SECONDS) -> float:
        """Read a time in any unit, at most ``limit``. A whole number keeps all of its digits."""
        value = self.required(field)
        number = _number(value)
        if number is None or not 0 <= number <= limit:
            fix = f"expected a finite number, not negative, at most {MOST_SECONDS:g}{_without_commas(value)}"
            raise self.bad(field, value, fix)
        return number

    def numbers(self, field: str) -> list[int]:
        """Read a list of whole numbers, which a CSV file holds as text."""
        value = self.required(field)
        items = value
        if isinstance(value, str):
            try:
                items = DECODER.decode(value)
            except ValueError:
                items = None
        if not isinstance(items, list) or any(type(item) is not int for item in items):
            raise self.bad(field, value, "expected a list of whole numbers")
        return items

    def is_number(self, field: str) -> bool:
        return _number(self.values[field]) is not None

    def value_at(self, field: str) -> Any:
        """Return the value at ``name``, or at ``name[i]`` of a list. None if there is none."""
        match = re.fullmatch(r"([^\[\]]+)(?:\[(\d+)\])?", field)
        if match is None:
            raise UserError(f"prompt column {field!r} is not a name or name[index]")
        value = self.values.get(match[1])
        if match[2] is None:
            return value
        index = int(match[2])
        return value[index] if isinstance(value, list) and index < len(value) else None

    def text(self, field: str) -> str:
        value = self.value_at(field)
        if not isinstance(value, str):
            raise self.bad(field, value, "expected text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            part = value[max(0, error.start - 10) : error.start + 10]
            raise self.bad(field, part, "holds half a character (a lone surrogate), take it out") from None
        return value


def _number(value: object) -> int | float | None:
    """The value as a finite number; None if people do not write numbers so (1_0 and 0x10 are Python's own forms)."""
    if isinstance(value, str):
        if len(value) < 19 and value.isascii() and value.isdigit():  # the common case, faster than the pattern
            return int(value)
        if _WHOLE.fullmatch(value):
            return int(value)
        if _NUMBER.fullmatch(value) is None:
            return None
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return value if isinstance(value, int) or abs(value) < 1e300 else None


def _without_commas(value: object) -> str:
    if isinstance(value, str) and _GROUPED.fullmatch(value):
        return f", written without commas: {value.strip().replace(',', '')}"
    if isinstance(value, str) and re.fullmatch(r"\s*\d+,\d+\s*", value, re.ASCII):
        return f", written with a point: {value.strip().replace(',', '.')}"
    return ""


def is_seconds(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limit


Form = Literal["parquet", "csv", "objects", "array"]
"""A table of parquet or CSV, objects of JSON one a line, or one JSON array of them."""


def form_of(path: Path) -> Form:
    """Tell a file's form by its name or its first bytes. Raises UserError if it does not exist, or if we cannot unpack it."""
    with open_file("file", path) as file:
        if path.suffix == ".parquet" or file.peek(4)[:4] == b"PAR1":
            return "parquet"
    with _opened(path) as text:
        forms: Mapping[str, Form] = {"{": "objects", "[": "array"}
        return forms.get(_first_character(text), "csv")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text file, and unpack it if it is gzipped, whatever its name."""
    with open_file("file", path) as file:
        start = file.peek(6)
        kind = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None)
        require(kind is None, f"{path.name} is packed by {kind}, which is not read here: unpack it, or pack it by gzip")
        is_packed = path.suffix == ".gz" or start[:2] == b"\x1f\x8b"
        with gzip.open(file) if is_packed else file as content:
            try:
                yield io.TextIOWrapper(content, encoding=_ENCODING, newline="")
            except _UNREADABLE as error:
                raise _unreadable(path.name, error) from error


def _unreadable(where: str, error: Exception) -> UserError:
    return UserError(f"{where} is unreadable ({error}): save it as text of UTF-8, or get the file again")


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        for number in count(1):
            try:
                line = file.readline(_LONGEST_LINE)
            except _UNREADABLE as error:
                raise _unreadable(f"{path.name} line {number}", error) from error
            if len(line) == _LONGEST_LINE:
                raise UserError(
                    f"{path.name} line {number} has more than {_LONGEST_LINE:,} characters: give a row a line"
                )
            if not line:
                return
            yield line


def first_line(path: Path) -> str:
    """Read the first line that is not blank, without its end and without blanks around it (but with tabs)."""
    return next((line.strip(" \r\n\f\v") for line in _lines(path) if line.strip()), "")


def header_of(path: Path) -> tuple[str, ...]:
    """Read the names of a CSV file's columns."""
    return _header(path.name, first_line(path))[0]


def _header(name: str, line: str) -> tuple[tuple[str, ...], str]:
    """The names, and their separator: the comma, or a semicolon or tab if it makes more columns."""
    try:
        cells = {mark: next(csv.reader([line], delimiter=mark), []) for mark in _SEPARATORS}
    except csv.Error as error:
        raise UserError(f"{name} is no table ({error}): give CSV, JSON lines or parquet") from error
    mark = max(_SEPARATORS, key=lambda each: len(cells[each]))
    names = tuple(cell.strip().lstrip("\ufeff") for cell in cells[mark])
    _check_distinct(f"{name} line 1", names)
    return names, mark


def _check_distinct(location: str, names: Sequence[str]) -> None:
    repeated = next((name for index, name in enumerate(names) if name and name in names[:index]), None)
    if repeated is not None:
        raise bad_field(location, "header", ",".join(names), f"the column {repeated!r} is given twice, keep one")


def csv_rows(path: Path, *columns: str) -> Iterator[Row]:
    """Read these columns of every line; there may be more. Cells have the header's separator: commas, semicolons or tabs."""
    number, line, lines, name = 0, "", _lines(path), path.name
    while not line.strip() and (line := next(lines, "")):
        number += 1
    header, mark = _header(name, line.strip(" \r\n\f\v"))
    for column in columns:
        if column not in header:
            names = ", ".join(header) or "none"
            raise bad_field(f"{name} line {number}", column, None, f"column missing, the file has {names}")
    picked = [(column, header.index(column)) for column in columns]
    num_named = len(header)
    while num_named and not header[num_named - 1]:
        num_named -= 1
    reader = csv.reader(lines, delimiter=mark)
    try:
        for cells in reader:
            location = f"{name} line {number + reader.line_num}"
            # A separator at the end of a line or of the header makes no column.
            if num_named <= len(cells) and not any(cell.strip() for cell in cells[len(header) :]):
                yield Row(location, {column: cells[index] for column, index in picked})
            elif any(cell.strip() for cell in cells):
                field = header[min(len(cells), len(header) - 1)]
                fix = f"the line has {len(cells)} cells, the header {len(header)}"
                raise bad_field(location, field, mark.join(cells), fix)
    except csv.Error as error:
        raise _unreadable(f"{name} line {number + reader.line_num}", error) from error


def json_rows(path: Path) -> Iterator[Row]:
    """Read JSON lines, one object each."""
    for number, text in enumerate(_lines(path), start=1):
        if text.strip():
            yield _json_row(f"{path.name} line {number}", text)


def _json_row(location: str, text: str) -> Row:
    try:
        record = DECODER.decode(text)
    except RepeatedKeyError as error:
        raise bad_field(location, "line", text.strip(), f"{error}, keep one") from None
    except json.JSONDecodeError as error:
        raise bad_field(location, "line", text.strip(), f"not JSON ({error.msg}), one object a line") from error
    except (RecursionError, ValueError) as error:
        fix = "nested too deeply, or with a number too long, to be read"
        raise bad_field(location, "line", text.strip(), fix) from error
    if not isinstance(record, dict):
        raise bad_field(location, "line", record, "expected an object {...}, one a line")
    return Row(location, record)


def object_rows(path: Path) -> Iterator[Row]:
    """Read the objects of JSON lines, or of one JSON array."""
    return array_rows(path) if form_of(path) == "array" else json_rows(path)


def _first_character(file: TextIO) -> str:
    """Read up to the first character that is not blank, and return it."""
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    return start


def array_rows(path: Path) -> Iterator[Row]:
    """Read the objects of one JSON array, with only a piece of the file in memory, because ShareGPT's is 673 MB."""
    number = 0
    with _opened(path) as file:
        if (start := _first_character(file)) != "[":
            raise UserError(f"{path.name} begins with {start!r}: expected a list [...] of objects")
        try:
            for number, value in enumerate(_values(file), start=1):
                location = f"{path.name} row {number}"
                if not isinstance(value, dict):
                    raise bad_field(location, "row", value, "expected one JSON object")
                yield Row(location, value)
        except (UserError, UnicodeDecodeError):
            raise
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(
                f"{path.name} row {number + 1} cannot be read as JSON ({reason}): check that it is the whole file"
            ) from error


def _values(file: TextIO) -> Iterator[object]:
    text, offset, separator, is_whole = "", 0, "", False
    while True:
        offset = _skip_blanks(text, offset)
        if text.startswith("]", offset):
            if (text[offset + 1 :] + file.read()).strip():
                raise json.JSONDecodeError("more behind the list", text, offset)
            return
        if offset < len(text) and not text.startswith(separator, offset):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, offset)
        try:
            value, end = DECODER.raw_decode(text, _skip_blanks(text, offset + len(separator)))
            # A number at the end of a piece may continue in the next.
            if end == len(text) and not is_whole:
                raise json.JSONDecodeError("it may go on", text, end)
        except json.JSONDecodeError as error:
            if is_whole or isinstance(error, RepeatedKeyError):
                raise
            # Pieces grow, so that we parse a value of many pieces only a few times, not once per piece.
            piece = file.read(max(_CHUNK, len(text) - offset))
            is_whole = not piece
            text, offset = text[offset:] + piece, 0
            continue
        yield value
        offset, separator = end, ","


def _skip_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    return len(text) if match is None else match.end()


def parquet_rows(path: Path, *columns: str) -> Iterator[Row]:
    """Read those of the columns that the file has."""
    with _parquet(path) as file:
        names = [name for name in columns if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=1000, columns=names):
            for values in batch.to_pylist():
                number += 1
                # An empty cell among numbers is a NaN.
                yield Row(f"{path.name} row {number}", {name: _python_value(value) for name, value in values.items()})


def _python_value(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    return None if value != value else value


def parquet_names(path: Path) -> tuple[str, ...]:
    with _parquet(path) as file:
        return tuple(file.schema_arrow.names)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path.name}: reading parquet needs pyarrow: pip install pyarrow") from None
    from pyarrow.lib import ArrowException

    try:
        with open_file("file", path) as opened, parquet.ParquetFile(opened) as file:
            _check_distinct(path.name, file.schema_arrow.names)
            yield file
    except (ArrowException, OSError) as error:
        raise UserError(f"{path.name} cannot be read as parquet ({error}): check that it is the whole file") from error
