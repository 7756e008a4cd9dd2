"""What systems of one kind share: what their runs record beyond the harness's own tables, how it is checked, and what is read off it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from repro.runs.metrics import METRICS, Metric
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Column, RunRecord, Table
from repro.runs.validity import CHECKS, Validity

Check = Callable[[RunRecord], Iterator[str]]
"""Reasons why a run's numbers may not be used, a clause each; none if they may."""


class Shown(NamedTuple):
    title: str
    metric: str
    is_share: bool = False
    stat: str | None = None
    """Which number of a metric that is a distribution."""
    scale: float = 1.0
    is_predicted: bool = False
    """Whether a measured run shows what the simulator said, and its error, instead of what was measured."""


WAITS = (Shown("wait s", "queue_wait_s", stat="mean"), Shown("longest wait s", "queue_wait_s", stat="max"))
"""Beside the mean what a policy that starves a request would hide in it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """``checks`` and ``metrics`` come on top of the harness's, ``tables`` beside its table of requests."""

    name: str
    request_columns: tuple[Column, ...] = ()
    tables: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()
    checks: tuple[Check, ...] = ()
    shown: tuple[Shown, ...] = ()
    """What tables of runs show besides what every run has."""
    serves: bool = True
    """Whether runs serve requests; the harness's own metrics and checks are about them."""

    @cached_property
    def columns(self) -> Mapping[str, tuple[Column, ...]]:
        """Columns of every table of a run."""
        return {REQUESTS: REQUEST_COLUMNS + self.request_columns, **self.tables}

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        return (METRICS if self.serves else ()) + self.metrics

    def check_tables(self, record: RunRecord) -> None:
        """Raise ValueError unless the record has the family's tables and columns."""
        if wrong := sorted(set(record.tables) ^ set(self.columns)):
            kind = "unknown" if wrong[0] in record.tables else "missing"
            raise ValueError(f"table {wrong[0]!r} of a run of family {self.name} is {kind}")
        for name, columns in self.columns.items():
            check_table(name, record.tables[name], columns)

    def summarize(self, record: RunRecord) -> dict[str, Any]:
        """Every metric, by name."""
        return {metric.name: metric.compute(record) for metric in self.all_metrics}

    def assess(self, record: RunRecord) -> Validity:
        reasons = tuple(
            reason for check in (*(CHECKS if self.serves else ()), *self.checks) for reason in check(record)
        )
        return Validity(valid=not reasons, reasons=reasons)


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
