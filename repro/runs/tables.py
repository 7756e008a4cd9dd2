"""Tables in files: Parquet, or gzipped JSON, a list per column, where pyarrow is missing. Either is read."""

from __future__ import annotations

import gzip
import io
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


def encoded_table(name: str, table: Table, columns: Sequence[Column]) -> tuple[str, bytes]:
    """The file's name, and what is in it."""
    for column in columns:
        if column.kind == "float" and not _is_finite(table[column.name]):
            raise ValueError(f"table {name}: column {column.name!r} holds a value that is not finite")
    if find_spec("pyarrow") is None:
        return f"{name}{GZIPPED}", _gzipped(table, columns)
    return f"{name}{PARQUET}", _parquet(table, columns)


def _is_finite(values: Sequence[float | None]) -> bool:
    """Nulls aside. A sum is finite only of finite values; where it overflows each is looked at."""
    given = [value for value in values if value is not None]
    return math.isfinite(sum(given)) or all(map(math.isfinite, given))


def read_table(path: Path, columns: Sequence[Column]) -> Table:
    """Raises OSError where the file needs pyarrow and there is none."""
    if path.name.endswith(GZIPPED):
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return {column.name: stored[column.name] for column in columns}
    if find_spec("pyarrow") is None:
        raise OSError(f"{path.parent.name}: {path.name} cannot be read without pyarrow: pip install pyarrow")
    return _read_parquet(path, columns)


def _gzipped(table: Table, columns: Sequence[Column]) -> bytes:
    plain = {
        column.name: [None if value is None else _KINDS[column.kind](value) for value in table[column.name]]
        for column in columns
    }
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


def _parquet(table: Table, columns: Sequence[Column]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    schema = pa.schema([pa.field(c.name, types[c.kind], nullable=c.nullable) for c in columns])
    # Built without pandas: its metadata would name versions in the file.
    arrow = pa.table({c.name: _array(table[c.name], types[c.kind]) for c in columns}, schema=schema)
    file = io.BytesIO()
    pq.write_table(arrow, file, compression="zstd")
    return file.getvalue()


def _array(values: Sequence[Any], kind: Any) -> Any:
    """The Arrow array of a column, ``kind`` its Arrow type. ``pa.array`` makes the same of it but imports pandas on the way,
    a third of a second in every process that stores a run. Raises TypeError for values of another kind."""
    import numpy as np
    import pyarrow as pa

    if kind == pa.string():
        builder = pa.lib.StringBuilder()
        builder.append_values(values)
        return builder.finish()
    given = np.array([value is not None for value in values], dtype=bool)
    dtype = kind.to_pandas_dtype()
    filled = values if given.all() else [dtype(0) if value is None else value for value in values]
    numbers = np.array(filled).astype(dtype, casting="safe" if len(values) else "unsafe")
    data = np.packbits(numbers, bitorder="little") if kind == pa.bool_() else numbers
    valid = None if given.all() else pa.py_buffer(np.packbits(given, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(data)])


def _read_parquet(path: Path, columns: Sequence[Column]) -> Table:
    import pyarrow.parquet as pq

    arrow = pq.read_table(path)
    return {column.name: arrow[column.name].to_pylist() for column in columns}
