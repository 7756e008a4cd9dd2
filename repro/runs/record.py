"""What one run leaves behind: tables, of which one holds its requests, and a manifest of facts.

Tables are plain ``dict[column, list]``: nothing heavy is imported to make or read one. All times are
seconds on the driver's clock since the run began.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from engines.knobs import helps_of

SCHEMA_VERSION = 8
"""What is in the file of a stored run. Raise it with any change of columns, metrics or their meaning."""

Obtained = Literal["measured", "composed", "simulated"]
"""Timed in this run; simulated with steps composed of kernels that others timed; simulated with modelled steps."""
ColumnKind = Literal["int", "float", "str", "bool"]
Table = dict[str, list[Any]]

REQUESTS = "requests"
"""The table that every run has."""


class Column(NamedTuple):
    name: str
    kind: ColumnKind
    meaning: str
    nullable: bool = False


REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("request_id", "int", "as in the workload; unique in a run"),
    Column("arrival_s", "float", "when the request was due"),
    Column("submit_lag_s", "float", "submission minus due time; null if never submitted", nullable=True),
    Column("admitted_s", "float", "when work on it began", nullable=True),
    Column("first_output_s", "float", "when its first output was there", nullable=True),
    Column("finished_s", "float", "when its last output was there; null unless ok", nullable=True),
    Column("prompt_len", "int", "prompt tokens"),
    Column("output_len", "int", "tokens generated; null unless ok", nullable=True),
    Column("status", "str", "ok, failed, or unfinished (the run was stopped before its end)"),
    Column("error", "str", "one sentence for a failed request, else null", nullable=True),
)
"""Columns of every run's requests; a family adds its own behind them."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """``tables`` holds ``requests`` and what its family records besides.

    Keys of ``manifest`` the harness reads, all JSON; others are kept as they are:

    - ``obtained`` (required to store): measured, composed or simulated
    - ``calibration``: id of the calibration behind a simulated run, null if it has none
    - ``dataset``: where the requests came from (name, revision, checksum, sample ids)
    - ``facts``: what was learnt by preparing the run
    - ``slos``: ``{name: {"e2el_s": limit, "ttft_s": limit, "queue_wait_s": limit}}``, for goodput
    """

    tables: Mapping[str, Table]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    derived: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was made of the tables once for all who ask: a record does not change."""

    def __post_init__(self) -> None:
        if REQUESTS not in self.tables:
            raise ValueError(f"a run record has a table of {REQUESTS}")
        if self.manifest.get("obtained", "measured") not in get_args(Obtained):
            raise ValueError(f"obtained={self.manifest['obtained']!r} must be one of {', '.join(get_args(Obtained))}")

    @property
    def requests(self) -> Table:
        return self.tables[REQUESTS]

    @property
    def obtained(self) -> Obtained:
        if "obtained" not in self.manifest:
            raise ValueError("a run record must say how it was obtained: set manifest['obtained']")
        obtained: Obtained = self.manifest["obtained"]
        return obtained

    @property
    def facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.manifest.get("facts", {})
        return facts

    def with_manifest(self, **facts: Any) -> RunRecord:
        return replace(self, manifest={**self.manifest, **facts})

    def with_columns(self, table: str, **columns: list[Any]) -> RunRecord:
        return replace(self, tables={**self.tables, table: {**self.tables[table], **columns}})


class LazyTables(Mapping[str, Table]):
    """Tables that are read when they are asked for, each once."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Table]) -> None:
        self._names = tuple(names)
        self._read = cache(read)

    def __getitem__(self, name: str) -> Table:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def columns_of(row: type) -> tuple[Column, ...]:
    """The columns of a table whose rows are of a dataclass: its fields, each with the text below it as its meaning."""
    hints, meanings = get_type_hints(row), helps_of(row)
    found = []
    for each in fields(row):
        hint = hints[each.name]
        nullable = type(None) in get_args(hint)
        base = next(kind for kind in get_args(hint) if kind is not type(None)) if nullable else hint
        kind: ColumnKind = base.__name__ if isinstance(base, type) else "str"  # type: ignore[assignment]
        found.append(Column(each.name, kind, meanings.get(each.name, ""), nullable))
    return tuple(found)


def columns_in(path: Path) -> dict[str, tuple[Column, ...]]:
    """The columns of each table that a CSV describes, a row a column."""
    found: dict[str, tuple[Column, ...]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            column = Column(row["name"], row["kind"], row["meaning"], row["null"] != "")  # type: ignore[arg-type]
            found[row["table"]] = (*found.get(row["table"], ()), column)
    return found


def empty_table(columns: Sequence[Column]) -> Table:
    return {column.name: [] for column in columns}


class DriveProgress(NamedTuple):
    now_s: float
    num_total: int
    num_submitted: int
    num_closed: int
    """Finished or failed."""


OnProgress = Callable[[DriveProgress], None]
