"""Runs on disk: one folder per cell, whole or absent.

The tables, ``summary.json``, ``cell.json`` and ``manifest.json`` are the same bytes for the same simulated cell and
code; what differs from run to run (times, command, machine) is in ``provenance.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from repro.runs.cell import Cell
from repro.runs.code import Code
from repro.runs.experiment import Experiment
from repro.runs.family import Family
from repro.runs.record import REQUESTS, SCHEMA_VERSION, Obtained, RunRecord, Table, empty_table
from repro.runs.session import contention
from repro.runs.statistics import Interval, mean_interval
from repro.runs.system import SYSTEMS
from repro.runs.tables import read_table, table_file, write_table
from repro.runs.validity import Validity

SUMMARY, CELL = "summary.json", "cell.json"
MANIFEST, PROVENANCE = "manifest.json", "provenance.json"


class StoreError(RuntimeError):
    """A stored run was asked for that is absent or cannot be trusted; says why."""


@dataclass(frozen=True)
class StoredRun:
    """What is read of a run's folder is read when it is asked for."""

    cell: Cell
    folder: Path
    manifest: Mapping[str, Any]
    provenance: Mapping[str, Any]
    other_code: tuple[str, ...] = ()
    """Modules that are not as they were when it ran."""

    @property
    def family(self) -> Family:
        return SYSTEMS.get(self.cell.system).family

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return _read_json(self.folder / SUMMARY)

    @cached_property
    def record(self) -> RunRecord:
        """Its other tables are left empty (``table`` has them): their metrics are in the summary."""
        columns = self.family.columns
        tables = {name: empty_table(own) for name, own in columns.items()}
        return RunRecord(tables={**tables, REQUESTS: self.table(REQUESTS)}, manifest=self.manifest["facts"])

    def table(self, name: str) -> Table:
        return read_table(table_file(self.folder, name), self.family.columns[name])

    @property
    def title(self) -> str:
        """The system's, as figures and tables name it."""
        return SYSTEMS.get(self.cell.system).title

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the run says of itself besides its numbers."""
        facts: Mapping[str, Any] = self.manifest["facts"].get("facts", {})
        return facts

    @property
    def validity(self) -> Validity:
        stored = self.manifest["validity"]
        return Validity(
            valid=bool(stored["valid"]),
            reasons=tuple(map(str, stored["reasons"])),
            warnings=contention(self.provenance.get("load")),
        )

    @property
    def obtained(self) -> str:
        """How the numbers came about: measured or simulated; from datasheet peaks alone, on a busy machine, or by other
        code than there is now, where that is so."""
        obtained = str(self.manifest["obtained"])
        if "uncalibrated" in str(self.manifest["facts"].get("calibration")):
            obtained += ", uncalibrated"
        if self.validity.warnings:
            obtained += ", contended"
        return obtained + (", other code" if self.other_code else "")


@dataclass(frozen=True, kw_only=True)
class State:
    """What the store has of a cell. ``reason`` is one sentence: why it counts as done, or why it has to run."""

    run: StoredRun | None
    reason: str

    @property
    def is_done(self) -> bool:
        return self.run is not None


def over_repeats(runs: Sequence[StoredRun], metric: str, part: str | None = None) -> Interval:
    """Interval of a metric, or one part of it, over the valid runs that have it."""
    found = [run.summary[metric] for run in runs if run.validity.valid]
    values = found if part is None else [None if value is None else value[part] for value in found]
    return mean_interval([value for value in values if value is not None])


class Store:
    """``root`` holds the run folders, ``results/local`` for runs of this machine."""

    def __init__(self, root: Path, *, accept_other_code: bool = False) -> None:
        """``accept_other_code`` takes runs that other code made as done, and marks them."""
        self.root = root
        self.accept_other_code = accept_other_code

    def folder(self, cell: Cell) -> Path:
        return self.root / cell.folder_name

    def find(self, experiment: Experiment) -> State:
        """Whether the stored run is this cell's, by this code and schema, and every file is as it was written."""
        cell, folder = experiment.cell, self.folder(experiment.cell)
        try:
            if not folder.is_dir():
                return State(run=None, reason="no folder")
            return self._checked(cell, folder, experiment.code)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return State(run=None, reason=f"incomplete: a file cannot be read ({type(error).__name__}: {error})")

    def load(self, experiment: Experiment) -> StoredRun:
        state = self.find(experiment)
        if state.run is None:
            raise StoreError(f"{experiment.cell.folder_name}: {state.reason}")
        return state.run

    def save(self, experiment: Experiment, record: RunRecord, *, provenance: Mapping[str, Any]) -> StoredRun:
        """Replaces whatever the folder held, in one rename once everything is written."""
        cell = experiment.cell
        folder = self.folder(cell)
        partial = self.root / f".{cell.folder_name}.partial-{os.getpid()}"
        replaced = self.root / f".{cell.folder_name}.replaced-{os.getpid()}"
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            manifest = _write(partial, experiment, record, provenance)
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
        return StoredRun(cell=cell, folder=folder, manifest=manifest, provenance=provenance)

    def _checked(self, cell: Cell, folder: Path, code: Code) -> State:
        def unusable(reason: str) -> State:
            return State(run=None, reason=reason)

        sealed = _sealed(folder, SYSTEMS.get(cell.system).family)
        for name in (MANIFEST, PROVENANCE, *sealed):
            if not (folder / name).is_file():
                return unusable(f"incomplete: {name} is missing")
        manifest, provenance = _read_json(folder / MANIFEST), _read_json(folder / PROVENANCE)
        if (stored := manifest["schema_version"]) != SCHEMA_VERSION:
            return unusable(f"schema {stored} -> {SCHEMA_VERSION}")
        for name in sealed:
            if manifest["files"][name] != _checksum(folder / name):
                return unusable(f"incomplete: {name} is not as it was written")
        other = Cell.from_dict(_read_json(folder / CELL))
        if manifest["key"] != cell.key or other.key != cell.key:
            return unusable(f"another cell: the folder holds {other.key}, not {cell.key}")
        if manifest["facts"]["obtained"] not in get_args(Obtained):
            return unusable(f"incomplete: {MANIFEST} does not say how the run was obtained")
        finished = provenance["finished_utc"]
        if not isinstance(finished, str):
            return unusable(f"incomplete: {PROVENANCE} does not say when the run finished")
        changed = () if manifest["code"]["digest"] == code.digest else code.changed_from(manifest["code"]["modules"])
        if changed and not self.accept_other_code:
            return unusable(f"code changed: {_named(changed)}")
        run = StoredRun(cell=cell, folder=folder, manifest=manifest, provenance=provenance, other_code=changed)
        note = f"; other code: {_named(changed)}" if changed else ""
        if not run.validity.valid:
            note += f"; INVALID: {'; '.join(run.validity.reasons)}"
        return State(run=run, reason=f"done: same cell, finished {finished}{note}")


def _write(folder: Path, experiment: Experiment, record: RunRecord, provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    """The files of a run; its manifest."""
    cell, family, code = experiment.cell, experiment.family, experiment.code
    family.check_tables(record)
    validity = family.assess(record)
    _write_json(folder / CELL, cell.to_dict())
    for name, columns in family.columns.items():
        write_table(folder, name, record.tables[name], columns)
    _write_json(folder / SUMMARY, family.summarize(record))
    _write_json(folder / PROVENANCE, provenance)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "key": cell.key,
        "family": family.name,
        "obtained": record.obtained,
        "validity": {"valid": validity.valid, "reasons": list(validity.reasons)},
        "code": {"digest": code.digest, "modules": dict(code.modules)},
        "files": {name: _checksum(folder / name) for name in _sealed(folder, family)},
        "facts": dict(record.manifest),
    }
    _write_json(folder / MANIFEST, manifest)
    return manifest


def _sealed(folder: Path, family: Family) -> tuple[str, ...]:
    """Files whose SHA-256 is in the manifest."""
    return CELL, *(table_file(folder, name).name for name in family.columns), SUMMARY


def _named(modules: Sequence[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more modules"


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


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
