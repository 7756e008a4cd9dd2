"""Runs on disk: one folder per cell, whole or absent.

The tables, ``summary.json``, ``cell.json`` and ``manifest.json`` are the same bytes for the same simulated cell and
code; what differs from run to run (times, command, machine) is in ``provenance.json``, which seals them all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.errors import RunError
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment
from repro.runs.family import Family
from repro.runs.inputs import changed as changed_inputs
from repro.runs.locks import CellLocks
from repro.runs.record import REQUESTS, SCHEMA_VERSION, RunRecord, Table, empty_table
from repro.runs.session import contention
from repro.runs.statistics import Interval, mean_interval
from repro.runs.system import SYSTEMS
from repro.runs.tables import encoded_table, read_table, table_file
from repro.runs.validity import Validity

SUMMARY, CELL = "summary.json", "cell.json"
MANIFEST, PROVENANCE = "manifest.json", "provenance.json"
_RESERVE = 1 << 20
"""Bytes that are given back where memory runs out while a run is written: enough to remove what is half written."""


class StoreError(RunError):
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
    is_of_other_machine: bool = False
    """Whether it was measured on a machine unlike this one."""

    @property
    def machine(self) -> Mapping[str, Any] | None:
        """What it was measured on; None of a simulated run."""
        return self.manifest.get("machine")

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
            warnings=(*contention(self.provenance.get("load")), *map(str, self.facts.get("warnings", ()))),
        )

    @property
    def obtained(self) -> str:
        """How the numbers came about: measured or simulated; from datasheet peaks alone, on a busy machine, or by other
        code than there is now, where that is so."""
        obtained = str(self.manifest["obtained"])
        if "uncalibrated" in str(self.manifest["facts"].get("calibration")):
            obtained += ", uncalibrated"
        if contention(self.provenance.get("load")):
            obtained += ", contended"
        obtained += ", other code" if self.other_code else ""
        return obtained + (", other machine" if self.is_of_other_machine else "")


@dataclass(frozen=True, kw_only=True)
class State:
    """What the store has of a cell. ``reason`` is one sentence: why it counts as done, or why it has to run."""

    run: StoredRun | None
    reason: str

    @property
    def is_done(self) -> bool:
        return self.run is not None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A run's files by name, ready to be put into a store."""

    cell: Cell
    files: Mapping[str, bytes]
    manifest: Mapping[str, Any]
    provenance: Mapping[str, Any]


def over_repeats(runs: Sequence[StoredRun], metric: str, part: str | None = None) -> Interval:
    """Interval of a metric, or one part of it, over the valid runs that have it."""
    found = [run.summary[metric] for run in runs if run.validity.valid]
    values = found if part is None else [None if value is None else value[part] for value in found]
    return mean_interval([value for value in values if value is not None])


class Store:
    """``root`` holds the run folders, ``results/local`` for runs of this machine."""

    def __init__(self, root: Path, *, accept_other_code: bool = False, accept_other_machine: bool = False) -> None:
        """``accept_other_code`` takes runs that other code made as done, and marks them; so does ``accept_other_machine``
        with those measured on a machine unlike this one, which is for drawing them and not for adding to them."""
        self.root = root
        self._locks = CellLocks(root)
        self.accept_other_code = accept_other_code
        self.accept_other_machine = accept_other_machine
        self._is_cleared = False

    def folder(self, cell: Cell) -> Path:
        return self.root / cell.folder_name

    def surely_missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those of which there is no folder whatever their knobs; tells in one look, and without their requests."""
        try:
            held = {name.rpartition("_")[0] for name in os.listdir(self.root)}
        except OSError:
            held = set()
        return [cell for cell in cells if cell.folder_prefix not in held]

    def written(self, cell: Cell) -> tuple[int, int] | None:
        """Another value for every time that the cell is stored; None where it is not."""
        try:
            found = self.folder(cell).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def claim(self, cells: Sequence[Cell], *, wait: bool) -> AbstractContextManager[bool]:
        """Whether all the cells are this process's to make, in the body; ``wait`` for others to have made theirs. Several
        claims may be open at once, if they share no cell."""
        return self._locks.held(cells, wait=wait)

    def find(self, experiment: Experiment) -> State:
        """Whether the stored run is this cell's, by this code and schema, and every file is as it was written."""
        folder = self.folder(experiment.cell)
        try:
            if not folder.is_dir():
                return State(run=None, reason="no folder")
            return self._checked(experiment, folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return State(run=None, reason=f"incomplete: a file cannot be read ({type(error).__name__}: {error})")

    def load(self, experiment: Experiment) -> StoredRun:
        state = self.find(experiment)
        if state.run is None:
            raise StoreError(f"{experiment.cell.folder_name}: {state.reason}")
        return state.run

    def save(self, experiment: Experiment, record: RunRecord, *, provenance: Mapping[str, Any]) -> StoredRun:
        """Replaces whatever the folder held, in one rename once everything is written."""
        return self.put(pack(experiment, record, provenance))

    def put(self, packed: Packed) -> StoredRun:
        """As ``save``."""
        cell = packed.cell
        folder = self.folder(cell)
        partial = self.root / f".{cell.folder_name}.partial-{os.getpid()}"
        replaced = self.root / f".{cell.folder_name}.replaced-{os.getpid()}"
        self._clear_leftovers()
        reserve = bytearray(_RESERVE)
        try:
            partial.mkdir(parents=True)
            for name, content in packed.files.items():
                (partial / name).write_bytes(content)
            _put(partial, folder, replaced)
        except BaseException as error:
            # An interrupt between the two renames must not lose the run that was there.
            if replaced.exists() and not folder.exists():
                replaced.rename(folder)
            if isinstance(error, OSError):
                raise RunError(
                    f"{folder.name} could not be stored in {self.root} ({error.strerror or error}): make room, or give "
                    f"another --result-dir; the same command continues"
                ) from error
            raise
        finally:
            del reserve
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)
        return StoredRun(cell=cell, folder=folder, manifest=packed.manifest, provenance=packed.provenance)

    def _clear_leftovers(self) -> None:
        """Of processes that were killed while they stored. Once, before the first run: a look at all folders for each run takes longer
        than storing it where there are thousands."""
        if self._is_cleared:
            return
        self._is_cleared = True
        with suppress(OSError):
            for name in os.listdir(self.root):
                _, _, last = name.rpartition(".")
                kind, _, pid = last.partition("-")
                if name.startswith(".") and kind in ("partial", "replaced") and not _is_running(pid):
                    shutil.rmtree(self.root / name, ignore_errors=True)

    def _checked(self, experiment: Experiment, folder: Path) -> State:
        cell, code = experiment.cell, experiment.code

        def unusable(reason: str) -> State:
            return State(run=None, reason=reason)

        names = _names(folder, SYSTEMS.get(cell.system).family)
        for name in names:
            if not (folder / name).is_file():
                return unusable(f"incomplete: {name} is missing")
        # Read once: what is checked is what is taken.
        files = {name: (folder / name).read_bytes() for name in names}
        manifest, provenance = (_parsed(name, files[name]) for name in (MANIFEST, PROVENANCE))
        if (stored := manifest["schema_version"]) != SCHEMA_VERSION:
            return unusable(f"schema {stored} -> {SCHEMA_VERSION}")
        for name, content in files.items():
            if not _is_sealed(name, content, manifest, provenance):
                return unusable(f"incomplete: {name} is not as it was written")
        other = Cell.from_dict(_parsed(CELL, files[CELL]))
        if manifest["key"] != cell.key or other.key != cell.key:
            return unusable(f"another cell: the folder holds {other.key}, not {cell.key}")
        changed = () if manifest["code"]["digest"] == code.digest else code.changed_from(manifest["code"]["modules"])
        if changed and not self.accept_other_code:
            return unusable(f"code changed: {_named(changed)}")
        if read := changed_inputs(provenance["inputs"], code.modules):
            if not self.accept_other_code:
                return unusable(f"what its plug-in reads has changed, or is not known: {_named(read)}")
            changed += read
        unlike = _unlike(manifest.get("machine"), experiment.machine)
        if unlike and not self.accept_other_machine:
            return unusable(f"another machine: {unlike}")
        run = StoredRun(
            cell=cell,
            folder=folder,
            manifest=manifest,
            provenance=provenance,
            other_code=changed,
            is_of_other_machine=bool(unlike),
        )
        note = f"; other code: {_named(changed)}" if changed else ""
        note += f"; other machine: {unlike}" if unlike else ""
        if not run.validity.valid:
            note += f"; INVALID: {'; '.join(run.validity.reasons)}"
        return State(run=run, reason=f"done: same cell, finished {provenance['finished_utc']}{note}")


def _put(partial: Path, folder: Path, replaced: Path) -> None:
    """Where another sweep stores the same simulated run at this moment, the later one stays."""
    while True:
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(replaced)
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return


def pack(experiment: Experiment, record: RunRecord, provenance: Mapping[str, Any]) -> Packed:
    """Check and sum up a run, and write its files in memory: most of the work of storing it."""
    cell, family, code = experiment.cell, experiment.family, experiment.code
    family.check_tables(record)
    validity = family.assess(record)
    numbers = dict(encoded_table(name, record.tables[name], columns) for name, columns in family.columns.items())
    numbers = {CELL: _json(cell.to_dict()), **numbers, SUMMARY: _json(family.summarize(record))}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "key": cell.key,
        "family": family.name,
        "obtained": record.obtained,
        "validity": {"valid": validity.valid, "reasons": list(validity.reasons)},
        "machine": experiment.machine,
        "code": {"digest": code.digest, "modules": dict(code.modules)},
        "files": {name: _digest(content) for name, content in numbers.items()},
        "facts": dict(record.manifest),
    }
    files = {**numbers, MANIFEST: _json(manifest)}
    # As it will be read: a seal is of what JSON makes of it.
    read = _parsed(
        PROVENANCE, _json({**provenance, "inputs": experiment.inputs_now(), "manifest": _digest(files[MANIFEST])})
    )
    provenance = _with_seal(read)
    return Packed(cell=cell, files={**files, PROVENANCE: _json(provenance)}, manifest=manifest, provenance=provenance)


def _with_seal(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance with a digest of itself. It has the manifest's, and the manifest those of the other files, so that an edit
    of any one of them is seen."""
    told = {name: value for name, value in provenance.items() if name != "seal"}
    return {**told, "seal": _digest(_json(told))}


def _is_sealed(name: str, content: bytes, manifest: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
    """Whether the file is as it was written, to the byte."""
    if name == PROVENANCE:
        return content == _json(_with_seal(provenance))
    expected = provenance.get("manifest") if name == MANIFEST else manifest["files"].get(name)
    return bool(expected == _digest(content))


def _unlike(stored: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> str:
    """Empty where they are alike, or nothing was measured."""
    if here is None:
        return ""
    if stored is None:
        return "it does not say which"
    return "; ".join(
        f"{name} {stored.get(name)} -> {value}" for name, value in here.items() if stored.get(name) != value
    )


def _is_running(pid: str) -> bool:
    """Whether another process of that number is there, which may be writing."""
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _names(folder: Path, family: Family) -> tuple[str, ...]:
    """The files of a run; one that seals others before them."""
    return PROVENANCE, MANIFEST, CELL, *(table_file(folder, name).name for name in family.columns), SUMMARY


def _named(modules: Sequence[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"


def _json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def _read_json(path: Path) -> dict[str, Any]:
    return _parsed(path.name, path.read_bytes())


def _parsed(name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} does not hold an object")
    return value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
