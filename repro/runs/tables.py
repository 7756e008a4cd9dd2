"""Tables as they are stored: a list of plain values per column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from repro.runs.record import Column, Table

_KINDS: Mapping[str, tuple[type | tuple[type, ...], Callable[[Any], Any]]] = {
    "int": (Integral, int),
    "float": (Real, float),
    "str": (str, str),
    "bool": ((bool, np.bool_), bool),
}


def check_finite(name: str, table: Table, columns: Sequence[Column]) -> None:
    """Raise ValueError for a number that is none."""
    for column in columns:
        if column.kind == "float" and not _is_finite(table[column.name]):
            raise ValueError(f"table {name}: column {column.name!r} holds a value that is not finite")


def _is_finite(values: Sequence[float | None]) -> bool:
    """Nulls aside. A sum is finite only of finite values; where it overflows each is looked at."""
    given = [value for value in values if value is not None]
    return math.isfinite(sum(given)) or all(map(math.isfinite, given))


def plain_table(name: str, table: Table, columns: Sequence[Column]) -> Table:
    """The values as JSON has them. Raises TypeError for one of another kind than its column's."""
    plain: Table = {}
    for column in columns:
        kind, made = _KINDS[column.kind]
        values = table[column.name]
        if not all(value is None or isinstance(value, kind) for value in values):
            raise TypeError(f"table {name}: column {column.name!r} holds a value that is no {column.kind}")
        plain[column.name] = [None if value is None else made(value) for value in values]
    return plain
