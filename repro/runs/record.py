"""The record of one run: tables, one of them for its requests, and a manifest of facts.

Tables are plain ``dict[column, list]``, so making or reading one imports nothing heavy. All times are seconds on the driver's clock since
the run began.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

SCHEMA_VERSION = 8
"""Version of the content of a stored run's file. Raise it with any change of columns, metrics or their meaning."""

Obtained = Literal["measured", "composed", "simulated"]
"""measured: timed in this run; composed: simulated with steps of kernels that others timed; simulated: with modelled steps."""
ColumnKind = Literal["int", "float", "str", "bool"]
Table = dict[str, Any]
"""Columns by name, each a list or another sequence of plain values."""

REQUESTS = "requests"
"""The table that every run has."""


class Column(NamedTuple):
    name: str
    kind: ColumnKind
    meaning: str
    nullable: bool = False


@cache
def _read_rows(path: Path) -> tuple[dict[str, str], ...]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = tuple(csv.DictReader(file))
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"{path}: give each column one cell in the row {row}")
    return rows


def rows_in(path: Path, family: str) -> Iterator[dict[str, str]]:
    """The rows of one family in a CSV file that describes what its runs record."""
    return (row for row in _read_rows(path) if row["family"] == family)


def is_marked(row: Mapping[str, str], mark: str) -> bool:
    """Whether a row has this mark: its cell in the column of that name holds the name, or else is empty."""
    if row[mark] not in ("", mark):
        raise ValueError(f"{mark}={row[mark]!r} must be {mark} or nothing in the row {row}")
    return row[mark] == mark


def columns_in(path: Path, family: str) -> dict[str, tuple[Column, ...]]:
    """The columns of each table of a family, from a CSV file with a row per column."""
    tables: dict[str, tuple[Column, ...]] = {}
    for row in rows_in(path, family):
        if row["kind"] not in get_args(ColumnKind):
            raise ValueError(f"{path}: kind={row['kind']!r} must be one of {', '.join(get_args(ColumnKind))}")
        column = Column(row["name"], row["kind"], row["meaning"], is_marked(row, "null"))  # type: ignore[arg-type]
        tables[row["table"]] = (*tables.get(row["table"], ()), column)
    return tables


EVERY = "any"
"""The family of rows about every run."""
REQUEST_COLUMNS = columns_in(Path(__file__).with_name("columns.csv"), EVERY)[REQUESTS]
"""Columns of every run's requests. A family adds its own after them."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run. ``tables`` holds ``requests`` and the tables of its family.

    The harness reads these keys of ``manifest``, all JSON. It keeps others as they are:

    - ``obtained`` (required to store): measured, composed or simulated
    - ``calibration``: id of the calibration behind a simulated run, null if it has none
    - ``dataset``: where the requests came from (name, revision, checksum, sample ids)
    - ``facts``: what preparing the run found out
    - ``slos``: ``{name: {"e2el_s": limit, "ttft_s": limit, "queue_wait_s": limit}}``, for goodput
    """

    tables: Mapping[str, Table]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    derived: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of values computed from the tables; a record never changes."""

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

    def with_manifest(self, **facts: Any) -> "RunRecord":
        return replace(self, manifest={**self.manifest, **facts})

    def with_columns(self, table: str, **columns: list[Any]) -> "RunRecord":
        return replace(self, tables={**self.tables, table: {**self.tables[table], **columns}})


class LazyTables(Mapping[str, Table]):
    """Tables that are each read once, on first use."""

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


def empty_table(columns: Sequence[Column]) -> Table:
    return {column.name: [] for column in columns}


class DriveProgress(NamedTuple):
    now_s: float
    num_total: int
    num_submitted: int
    num_closed: int
    """Requests that finished or failed."""


OnProgress = Callable[[DriveProgress], None]
