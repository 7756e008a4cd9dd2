"""Runs on disk: one folder per cell, whole or absent.

``requests.parquet``, ``steps.parquet``, ``summary.json``, ``cell.json`` and ``manifest.json`` are the same bytes
for the same simulated cell; what differs from run to run (times, command, machine) is in ``provenance.json``.
Where pyarrow is missing the two tables are ``requests.json.gz`` and ``steps.json.gz``, a list per column; whichever
a folder has is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from repro.runs.cell import Cell
from repro.runs.metrics import Interval, mean_interval, summarize
from repro.runs.record import (
    REQUEST_COLUMNS,
    SCHEMA_VERSION,
    STEP_COLUMNS,
    Column,
    Obtained,
    RunRecord,
    Table,
    empty_table,
)
from repro.runs.validity import Validity, assess

REQUESTS, STEPS = "requests", "steps"
"""Tables, without the ending of their files."""
PARQUET, GZIPPED = ".parquet", ".json.gz"
SUMMARY, CELL = "summary.json", "cell.json"
MANIFEST, PROVENANCE = "manifest.json", "provenance.json"


class StoreError(RuntimeError):
    """A stored run was asked for that is absent or cannot be trusted; says why."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    cell: Cell
    record: RunRecord
    summary: dict[str, Any]
    validity: Validity
    manifest: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def obtained(self) -> str:
        """How the numbers came about: measured, simulated, or 'simulated, uncalibrated' from datasheet peaks."""
        is_uncalibrated = "uncalibrated" in str(self.record.manifest.get("calibration"))
        return self.record.obtained + (", uncalibrated" if is_uncalibrated else "")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``reason`` is one sentence: why the cell counts as done, or why it has to run."""

    done: bool
    reason: str


def over_repeats(runs: Sequence[StoredRun], metric: str, part: str | None = None) -> Interval:
    """Of a metric, or one part of it, over the valid runs that have it."""
    found = [run.summary[metric] for run in runs if run.validity.valid]
    values = found if part is None else [None if value is None else value[part] for value in found]
    return mean_interval([value for value in values if value is not None])


class Store:
    """``root`` holds the run folders, ``results/local`` for runs of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, cell: Cell) -> Path:
        return self.root / cell.folder_name

    def is_done(self, cell: Cell) -> bool:
        """Whether the stored run is this cell's, of this schema, and every file is as it was written."""
        return self.inspect(cell).done

    def why(self, cell: Cell) -> str:
        return self.inspect(cell).reason

    def validity(self, cell: Cell) -> Validity:
        """Of a run that is done."""
        return _validity(_read_json(self.folder(cell) / MANIFEST))

    def save(self, cell: Cell, record: RunRecord, *, provenance: Mapping[str, Any]) -> Path:
        """Replaces whatever the folder held, in one rename once everything is written."""
        obtained = record.obtained
        folder = self.folder(cell)
        partial = self.root / f".{cell.folder_name}.partial-{os.getpid()}"
        replaced = self.root / f".{cell.folder_name}.replaced-{os.getpid()}"
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            self._write(partial, cell, record, obtained, provenance)
            if folder.exists():
                folder.rename(replaced)
            partial.rename(folder)
        except BaseException:
            # An interrupt between the two renames must not lose the run that was there.
            if replaced.exists() and not folder.exists():
                replaced.rename(folder)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def load(self, cell: Cell, *, with_steps: bool = True) -> StoredRun:
        """``with_steps`` False leaves the table of steps empty: it is most of a run, and its metrics are in the summary."""
        verdict = self.inspect(cell)
        if not verdict.done:
            raise StoreError(f"{cell.folder_name}: {verdict.reason}")
        folder = self.folder(cell)
        manifest = _read_json(folder / MANIFEST)
        return StoredRun(
            cell=cell,
            record=RunRecord(
                requests=_read_table(_table(folder, REQUESTS), REQUEST_COLUMNS),
                steps=_read_table(_table(folder, STEPS), STEP_COLUMNS) if with_steps else empty_table(STEP_COLUMNS),
                manifest=manifest["facts"],
            ),
            summary=_read_json(folder / SUMMARY),
            validity=_validity(manifest),
            manifest=manifest,
            provenance=_read_json(folder / PROVENANCE),
        )

    def cells(self) -> Iterator[Cell]:
        """The cells of all runs that are done, by folder name."""
        if not self.root.is_dir():
            return
        for folder in sorted(self.root.iterdir()):
            if folder.name.startswith(".") or not (folder / CELL).is_file():
                continue
            try:
                cell = Cell.from_dict(_read_json(folder / CELL))
            except ValueError:  # not a cell of this version: not one of our runs
                continue
            if cell.folder_name == folder.name and self.is_done(cell):
                yield cell

    def remove_leftovers(self) -> int:
        """Deletes what killed processes left half-written. Not while another process is saving here."""
        leftovers = [*self.root.glob(".*.partial-*"), *self.root.glob(".*.replaced-*")]
        for folder in leftovers:
            shutil.rmtree(folder)
        return len(leftovers)

    def _write(
        self, folder: Path, cell: Cell, record: RunRecord, obtained: Obtained, provenance: Mapping[str, Any]
    ) -> None:
        validity = assess(record)
        _write_json(folder / CELL, cell.to_dict())
        _write_table(folder, REQUESTS, record.requests, REQUEST_COLUMNS)
        _write_table(folder, STEPS, record.steps, STEP_COLUMNS)
        _write_json(folder / SUMMARY, summarize(record))
        _write_json(folder / PROVENANCE, dict(provenance))
        _write_json(
            folder / MANIFEST,
            {
                "schema_version": SCHEMA_VERSION,
                "key": cell.key,
                "obtained": obtained,
                "validity": {"valid": validity.valid, "reasons": list(validity.reasons)},
                "files": {name: _checksum(folder / name) for name in _sealed(folder)},
                "facts": record.manifest,
            },
        )

    def inspect(self, cell: Cell) -> Verdict:
        folder = self.folder(cell)
        try:
            if not folder.is_dir():
                return Verdict(done=False, reason="no folder")
            sealed = _sealed(folder)
            for name in (MANIFEST, PROVENANCE, *sealed):
                if not (folder / name).is_file():
                    return Verdict(done=False, reason=f"incomplete: {name} is missing")
            manifest, provenance = _read_json(folder / MANIFEST), _read_json(folder / PROVENANCE)
            if (stored := manifest["schema_version"]) != SCHEMA_VERSION:
                return Verdict(done=False, reason=f"schema {stored} -> {SCHEMA_VERSION}")
            for name in sealed:
                if manifest["files"][name] != _checksum(folder / name):
                    return Verdict(done=False, reason=f"incomplete: {name} is not as it was written")
            other = Cell.from_dict(_read_json(folder / CELL))
            if manifest["key"] != cell.key or other.key != cell.key:
                return Verdict(done=False, reason=f"another cell: the folder holds {other.key}, not {cell.key}")
            if manifest["facts"]["obtained"] not in get_args(Obtained):
                return Verdict(done=False, reason=f"incomplete: {MANIFEST} does not say how the run was obtained")
            validity, finished = _validity(manifest), provenance["finished_utc"]
            if not isinstance(finished, str):
                return Verdict(done=False, reason=f"incomplete: {PROVENANCE} does not say when the run finished")
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Verdict(done=False, reason=f"incomplete: a file cannot be read ({type(error).__name__}: {error})")
        note = "" if validity.valid else f"; INVALID: {'; '.join(validity.reasons)}"
        return Verdict(done=True, reason=f"done: same cell, finished {finished}{note}")


def _validity(manifest: Mapping[str, Any]) -> Validity:
    stored = manifest["validity"]
    return Validity(valid=bool(stored["valid"]), reasons=tuple(map(str, stored["reasons"])))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return value


def _sealed(folder: Path) -> tuple[str, ...]:
    """Files whose SHA-256 is in the manifest."""
    return CELL, _table(folder, REQUESTS).name, _table(folder, STEPS).name, SUMMARY


def _table(folder: Path, name: str) -> Path:
    """The file that a stored table is in."""
    gzipped = folder / f"{name}{GZIPPED}"
    return gzipped if gzipped.is_file() else folder / f"{name}{PARQUET}"


def _write_table(folder: Path, name: str, table: Table, columns: tuple[Column, ...]) -> None:
    for column in columns:
        if column.kind == "float" and not all(value is None or math.isfinite(value) for value in table[column.name]):
            raise ValueError(f"table {name}: column {column.name!r} holds a value that is not finite")
    if find_spec("pyarrow") is None:
        _write_gzipped(folder / f"{name}{GZIPPED}", table, columns)
    else:
        _write_parquet(folder / f"{name}{PARQUET}", table, columns)


def _read_table(path: Path, columns: tuple[Column, ...]) -> Table:
    if path.name.endswith(GZIPPED):
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return {column.name: stored[column.name] for column in columns}
    if find_spec("pyarrow") is None:
        raise StoreError(f"{path.parent.name}: {path.name} cannot be read without pyarrow: pip install pyarrow")
    return _read_parquet(path, columns)


_KINDS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}


def _write_gzipped(path: Path, table: Table, columns: tuple[Column, ...]) -> None:
    plain = {
        column.name: [None if value is None else _KINDS[column.kind](value) for value in table[column.name]]
        for column in columns
    }
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _write_parquet(path: Path, table: Table, columns: tuple[Column, ...]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    schema = pa.schema([pa.field(c.name, types[c.kind], nullable=c.nullable) for c in columns])
    # Built without pandas: its metadata would name versions in the file.
    arrow = pa.table({c.name: pa.array(table[c.name], type=types[c.kind]) for c in columns}, schema=schema)
    pq.write_table(arrow, path, compression="zstd")


def _read_parquet(path: Path, columns: tuple[Column, ...]) -> Table:
    import pyarrow.parquet as pq

    arrow = pq.read_table(path)
    return {column.name: arrow[column.name].to_pylist() for column in columns}


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
