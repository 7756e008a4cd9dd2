"""Tables of a run: a row is a slotted dataclass, whose fields are the columns; the text below a field is the column's meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

Table = dict[str, list[Any]]


def table_of(kind: type, rows: Sequence[Any]) -> Table:
    """Rows of one kind, turned."""
    return {field.name: list(map(attrgetter(field.name), rows)) for field in fields(kind)}


def rows_of(table: Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """These columns, row by row."""
    return zip(*(table[name] for name in names), strict=True)
