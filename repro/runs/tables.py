"""Tables as a run has them, checked, and as they are stored: a list of plain values per column."""

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


def check_table(name: str, table: Table, columns: Sequence[Column]) -> None:
    """Raise ValueError for a table that does not have exactly these columns, all of one length, nulls where they may be and
    no number that is none."""
    expected = [column.name for column in columns]
    if wrong := sorted(set(table) ^ set(expected)):
        raise ValueError(f"table {name}: column {wrong[0]!r} is {'unknown' if wrong[0] in table else 'missing'}")
    if len({len(values) for values in table.values()}) > 1:
        raise ValueError(f"table {name}: columns differ in length: { {k: len(v) for k, v in table.items()} }")
    for column in columns:
        values = table[column.name]
        if not column.nullable and None in values:
            raise ValueError(f"table {name}: column {column.name!r} holds a null")
        if column.kind == "float":
            given = [value for value in values if value is not None]
            # A sum is finite only of finite values; where it overflows each is looked at.
            if not math.isfinite(sum(given)) and not all(map(math.isfinite, given)):
                raise ValueError(f"table {name}: column {column.name!r} holds a value that is not finite")


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
