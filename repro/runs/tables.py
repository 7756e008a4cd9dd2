"""Tables in files: Parquet, or gzipped JSON, a list per column, where pyarrow is missing. Either is read."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from repro.runs.record import Column, Table

PARQUET, GZIPPED = ".parquet", ".json.gz"

_KINDS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}


def table_file(folder: Path, name: str) -> Path:
    """The file that a stored table is in, or would be."""
    gzipped = folder / f"{name}{GZIPPED}"
    return gzipped if gzipped.is_file() else folder / f"{name}{PARQUET}"


def write_table(folder: Path, name: str, table: Table, columns: Sequence[Column]) -> None:
    for column in columns:
        if column.kind == "float" and not all(value is None or math.isfinite(value) for value in table[column.name]):
            raise ValueError(f"table {name}: column {column.name!r} holds a value that is not finite")
    if find_spec("pyarrow") is None:
        _write_gzipped(folder / f"{name}{GZIPPED}", table, columns)
    else:
        _write_parquet(folder / f"{name}{PARQUET}", table, columns)


def read_table(path: Path, columns: Sequence[Column]) -> Table:
    """Raises OSError where the file needs pyarrow and there is none."""
    if path.name.endswith(GZIPPED):
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return {column.name: stored[column.name] for column in columns}
    if find_spec("pyarrow") is None:
        raise OSError(f"{path.parent.name}: {path.name} cannot be read without pyarrow: pip install pyarrow")
    return _read_parquet(path, columns)


def _write_gzipped(path: Path, table: Table, columns: Sequence[Column]) -> None:
    plain = {
        column.name: [None if value is None else _KINDS[column.kind](value) for value in table[column.name]]
        for column in columns
    }
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _write_parquet(path: Path, table: Table, columns: Sequence[Column]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    schema = pa.schema([pa.field(c.name, types[c.kind], nullable=c.nullable) for c in columns])
    # Built without pandas: its metadata would name versions in the file.
    arrow = pa.table({c.name: pa.array(table[c.name], type=types[c.kind]) for c in columns}, schema=schema)
    pq.write_table(arrow, path, compression="zstd")


def _read_parquet(path: Path, columns: Sequence[Column]) -> Table:
    import pyarrow.parquet as pq

    arrow = pq.read_table(path)
    return {column.name: arrow[column.name].to_pylist() for column in columns}
