"""Runs on disk: one file per cell, whole or absent.

A file is lines of JSON, gzipped. Each line holds one part by its name, and the last line seals the others. All lines but the provenance and
the seal are the same for the same simulated cell and code. Any tool for gzip can read it: ``zcat RUN.jsonl.gz``.

The file of a measured run holds every table. A simulated run comes out the same whenever it is made, so its file keeps only numbers read
off its tables. The tables are made again when somebody asks for them.
"""

import gzip
import hashlib
import json
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.data import read_bytes
from engines.errors import RunError, require
from repro.files import SEAL, replacing
from repro.runs.cell import BASIS, Cell
from repro.runs.clean import clean_value
from repro.runs.experiment import Experiment, prepare
from repro.runs.family import Family, Validity, column, plain_table
from repro.runs.provenance import contention, differing_facts
from repro.runs.record import REQUESTS, SCHEMA_VERSION, LazyTables, RunRecord, Table
from repro.runs.statistics import Interval, mean_interval
from repro.runs.system import SYSTEMS, options_text

SUFFIX = ".jsonl.gz"
CELL, MANIFEST, SUMMARY, PROVENANCE = "cell", "manifest", "summary", "provenance"

_HEADER = bytes.fromhex("1f8b08000000000000ff")
_LAST_STORED = b"\x01"


class Damaged(ValueError):
    """A file is not as it was written."""


def encoded(parts: Mapping[str, Any]) -> bytes:
    """The content of a run's file. Raises ValueError for values that JSON cannot hold."""
    content = gzip.compress(b"".join(json_line(name, value) for name, value in parts.items()), mtime=0)
    return content + _seal(content)


def parts_of(content: bytes) -> dict[str, bytes]:
    """The line of each part. Raises Damaged unless every byte is as it was written."""
    end = max(0, len(content) - _SEAL_SIZE)
    if content[end:] != _seal(content[:end]):
        raise Damaged("it is not as it was written")
    lines = gzip.decompress(content[:end]).split(b"\n")[:-1]
    return {line.split(b'"', 2)[1].decode(): line for line in lines}


def part_of(parts: Mapping[str, bytes], name: str) -> Any:
    return json.loads(parts[name])[name]


def json_line(name: str, value: Any) -> bytes:
    text = json.dumps({name: value}, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def _seal(content: bytes) -> bytes:
    """A digest of the compressed lines, as another line in its own gzip member. That member is not compressed, so its bytes do not depend
    on the compressor."""
    line = json_line(SEAL, hashlib.sha256(content).hexdigest())
    size = struct.pack("<HH", len(line), len(line) ^ 0xFFFF)
    return _HEADER + _LAST_STORED + size + line + struct.pack("<II", zlib.crc32(line), len(line))


_SEAL_SIZE = len(_seal(b""))


_LEFT_S = 3600.0
"""Age at which a partial file counts as left over, because nobody still writes it."""


class StoreError(RunError):
    """A requested stored run is absent or cannot be trusted; the message says why."""


@dataclass(frozen=True)
class StoredRun:
    cell: Cell
    file: Path
    manifest: Mapping[str, Any]
    provenance: Mapping[str, Any]
    other_code: tuple[str, ...] = ()
    """Names of modules that have changed since the run was made."""
    other_machine: str = ""
    """How the machine that measured it differs from this one."""
    content: bytes = field(default=b"", repr=False)
    """Content of the file, checked to be whole. Numbers are read from it when they are asked for."""

    @property
    def machine(self) -> Mapping[str, Any] | None:
        """The machine that measured it; None for a simulated run."""
        return self.manifest.get("machine")

    @property
    def family(self) -> Family:
        return SYSTEMS.get(self.cell.system).family

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = part_of(parts_of(self.content), SUMMARY)
        return summary

    @property
    def tokens_per_processor_s(self) -> float | None:
        """Tokens per second of processor time on the requests, without loading and waiting. Other work on the machine hardly changes it.
        None if nothing was measured."""
        rate, window, cpu_s = (*map(self.summary.get, ("throughput_tok_s", "window_s")), self.facts.get("processor_s"))
        return rate * window / cpu_s if cpu_s and rate is not None and window else None

    @property
    def num_requests(self) -> int:
        return int(self.manifest["requests"]["num"])

    def sum_of(self, column: str) -> tuple[int, int]:
        """The number of non-null values in a request column of whole numbers, and their sum."""
        num, total = self.manifest["requests"]["sums"][column]
        return int(num), int(total)

    def total(self, table: str, column: str) -> float:
        """Sum of the numbers in a table's column."""
        import numpy as np

        return float(np.sum(self.record.tables[table][column]))

    @cached_property
    def record(self) -> RunRecord:
        return RunRecord(tables=LazyTables(self.family.columns, self.table), manifest=self.manifest["facts"])

    def table(self, name: str) -> Table:
        """A table of the run. Raises StoreError if it was not stored and cannot be made again."""
        require(name in self.family.columns, f"table={name!r} is unknown: use one of {', '.join(self.family.columns)}")
        columns = self.family.columns[name]
        parts = parts_of(self.content)
        return part_of(parts, name) if name in parts else plain_table(name, self._remade.tables[name], columns)

    @cached_property
    def _remade(self) -> RunRecord:
        experiment = prepare(self.cell.without(BASIS))
        if experiment.cell.key == self.cell.key:
            record = experiment.run()
            if json_line(SUMMARY, self.family.summarize(record)) == json_line(SUMMARY, self.summary):
                return record
        origin = f"by other code, {_module_names(self.other_code)}" if self.other_code else "of other data"
        raise StoreError(
            f"{self.cell.folder_name}: tables of a simulated run are made when they are asked for, and its numbers were made "
            f"{origin}: make it anew with --force"
        )

    @property
    def ran(self) -> str | None:
        """The settings that ran or that a search chose, as options; None if the run does not tell."""
        settings = self.facts.get("ran") or self.facts.get("tuned", {}).get("chosen")
        return options_text(settings) if settings else None

    @property
    def code_digest(self) -> str:
        return str(self.manifest["code"]["digest"])

    @property
    def title(self) -> str:
        """The system's title in figures and tables, and the policies that the cell names as ``module:NAME``."""
        return ", ".join([SYSTEMS.get(self.cell.system).title, *self.cell.policies])

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that the run records besides its numbers."""
        facts: Mapping[str, Any] = self.manifest["facts"].get("facts", {})
        return facts

    @cached_property
    def validity(self) -> Validity:
        stored = self.manifest["validity"]
        return Validity(
            valid=bool(stored["valid"]),
            reasons=tuple(map(str, stored["reasons"])),
            warnings=(*contention(self.provenance.get("load")), *map(str, self.facts.get("warnings", ()))),
        )

    @property
    def why_reused(self) -> str:
        text = f"done: same cell, finished {self.provenance['finished_utc']}"
        text += f"; other code: {_module_names(self.other_code)}" if self.other_code else ""
        text += f"; other machine: {self.other_machine}" if self.other_machine else ""
        return text if self.validity.valid else f"{text}; INVALID: {'; '.join(self.validity.reasons)}"

    @property
    def obtained(self) -> str:
        """How the numbers came about: measured or simulated. It also tells if they rest on datasheet peaks alone, a busy machine, changed
        code or another machine."""
        obtained = str(self.manifest["obtained"])
        if "uncalibrated" in str(self.manifest["facts"].get("calibration")):
            obtained += ", uncalibrated"
        if contention(self.provenance.get("load")):
            obtained += ", contended"
        obtained += ", other code" if self.other_code else ""
        return obtained + (", other machine" if self.other_machine else "")


UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError, zlib.error)
"""Exceptions that reading a file without a whole run can raise."""


def read_run(file: Path, name: str = "run") -> StoredRun:
    """The run in a file, whatever code made it. Raises StoreError for another schema, UserError if there is no file to read (the message
    uses ``name``), and otherwise one of ``UNREADABLE``."""
    content = read_bytes(name, file)
    parts = parts_of(content)
    manifest = part_of(parts, MANIFEST)
    if (version := manifest["schema_version"]) != SCHEMA_VERSION:
        raise StoreError(f"{file.name}: schema {version} -> {SCHEMA_VERSION}")
    cell = Cell.from_written(part_of(parts, CELL))
    return _checked_run(StoredRun(cell, file, manifest, part_of(parts, PROVENANCE), content=content), parts)


def _checked_run(run: StoredRun, parts: Mapping[str, bytes]) -> StoredRun:
    """Checks that the run has all required parts, and returns it. Raises one of ``UNREADABLE`` for a file that others put together."""
    manifest, provenance = run.manifest, run.provenance
    # Keep the summary, because reading it later would decompress the content again.
    vars(run)["summary"] = part_of(parts, SUMMARY)
    kinds: tuple[tuple[str, Any, type | tuple[type, ...]], ...] = (
        ("summary", run.summary, dict),
        ("validity", manifest["validity"]["valid"], bool),
        ("reasons", manifest["validity"]["reasons"], list),
        ("obtained", manifest["obtained"], str),
        ("code", manifest["code"]["digest"], str),
        ("modules", manifest["code"]["modules"], dict),
        ("requests", manifest["requests"]["num"], int),
        ("sums", manifest["requests"]["sums"], dict),
        ("facts", manifest["facts"], dict),
        ("own facts", manifest["facts"].get("facts", {}), dict),
        ("machine", manifest["machine"], (dict, type(None))),
        ("commit", provenance["git"]["commit"], (str, type(None))),
        ("finished_utc", provenance["finished_utc"], str),
    )
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise Damaged(f"its {name} is {value!r:.40}")
    _ = run.validity, run.obtained
    return run


@dataclass(frozen=True, kw_only=True)
class State:
    """The stored run of a cell, if any. ``reason`` is one sentence: why the cell counts as done, or why it must run."""

    reason: str
    run: StoredRun | None = None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A run that is ready to be put into a store."""

    cell: Cell
    content: bytes
    """Content of its file."""
    manifest: Mapping[str, Any]
    provenance: Mapping[str, Any]


def over_repeats(runs: Sequence[StoredRun], metric: str, part: str | None = None) -> Interval:
    """Interval of a metric, or of one part of it, over the valid runs that have it."""
    results = [run.summary[metric] for run in runs if run.validity.valid]
    values = results if part is None else [None if value is None else value[part] for value in results]
    return mean_interval([value for value in values if value is not None])


def by_seed(runs: Iterable[StoredRun], value_of: Callable[[StoredRun], float | None]) -> dict[int, float]:
    """The value of each valid run that has one, by seed."""
    return {run.cell.seed: value for run in runs if run.validity.valid and (value := value_of(run)) is not None}


@dataclass(frozen=True)
class Store:
    """A folder of runs. ``root`` holds their files; ``results/local`` is that of this machine."""

    root: Path
    accept_other_code: bool = field(default=False, kw_only=True)
    """Accept runs that other code made as done, and mark them."""
    accept_other_machine: bool = field(default=False, kw_only=True)
    """Accept runs measured on another machine too. Use this to draw runs, not to add to them."""

    def file(self, cell: Cell) -> Path:
        return self.root / f"{cell.folder_name}{SUFFIX}"

    def surely_missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Cells that have no stored run with any knobs. This lists the folder once, and does not prepare requests."""
        try:
            prefixes = {name.rpartition("_")[0] for name in os.listdir(self.root) if name.endswith(SUFFIX)}
        except OSError:
            prefixes = set()
        return [cell for cell in cells if cell.folder_prefix not in prefixes]

    def written(self, cell: Cell) -> tuple[int, int] | None:
        """A value that changes each time the cell is stored (inode and time); None if it is not stored."""
        try:
            status = self.file(cell).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def find(self, experiment: Experiment) -> State:
        """Look a run up. It must be this cell's, made by this code and schema, with every byte as it was written."""
        file = self.file(experiment.cell)
        try:
            if not stat.S_ISREG(file.lstat().st_mode):
                return State(reason="incomplete: it is no plain file")
            return self._checked(experiment, file, file.read_bytes())
        except FileNotFoundError:
            return State(reason="not stored")
        except Damaged as error:
            return State(reason=f"incomplete: {error}")
        except UNREADABLE as error:
            return State(reason=f"incomplete: it cannot be read ({type(error).__name__}: {error})")

    def load(self, experiment: Experiment) -> StoredRun:
        state = self.find(experiment)
        if state.run is None:
            raise StoreError(f"{experiment.cell.folder_name}: {state.reason}")
        return state.run

    def put(self, packed: Packed) -> StoredRun:
        """Stores a run, replacing the cell's old one, by one rename once everything is written."""
        file = self.file(packed.cell)
        try:
            with replacing(file) as temporary:
                temporary.write_bytes(packed.content)
        except OSError as error:
            raise RunError(
                f"{file.name} could not be stored in {self.root} ({error.strerror or error}): make room, or give another "
                f"--result-dir; the same command continues"
            ) from error
        return StoredRun(packed.cell, file, packed.manifest, packed.provenance, content=packed.content)

    def clear_leftovers(self) -> None:
        """Removes old partial files of processes that were killed while storing."""
        for path in self.root.glob(f".*{SUFFIX}.partial-*"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > _LEFT_S:
                    path.unlink()

    def _checked(self, experiment: Experiment, file: Path, content: bytes) -> State:
        cell, code = experiment.cell, experiment.code
        parts = parts_of(content)
        manifest, provenance = part_of(parts, MANIFEST), part_of(parts, PROVENANCE)
        if (version := manifest["schema_version"]) != SCHEMA_VERSION:
            return State(reason=f"schema {version} -> {SCHEMA_VERSION}")
        if manifest["key"] != cell.key:
            return State(reason=f"another cell: the file holds {manifest['key']}, not {cell.key}")
        changed = () if manifest["code"]["digest"] == code.digest else code.changed_from(manifest["code"]["modules"])
        if changed and not self.accept_other_code:
            return State(reason=f"code changed: {_module_names(changed)}")
        if code.fileless and not self.accept_other_code:
            return State(reason=f"{_module_names(code.fileless)} is in no file: such a run is made again each time")
        other_machine = _difference(manifest.get("machine"), experiment.machine)
        if other_machine and not self.accept_other_machine:
            return State(reason=f"another machine: {other_machine}")
        run = _checked_run(StoredRun(cell, file, manifest, provenance, changed, other_machine, content), parts)
        return State(run=run, reason=run.why_reused)


def pack(experiment: Experiment, record: RunRecord, provenance: Mapping[str, Any]) -> Packed:
    """Check and summarise a run, and build its file in memory. This is most of the work of storing it."""
    cell, family, code = experiment.cell, experiment.family, experiment.code
    family.check_tables(record)
    validity = family.assess(record)
    counts = [column.name for column in family.columns[REQUESTS] if column.kind == "int"]
    sums = {name: _count_and_sum(record, name) for name in counts}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "key": cell.key,
        "family": family.name,
        "obtained": record.obtained,
        "validity": {"valid": validity.valid, "reasons": clean_value(validity.reasons)},
        "machine": experiment.machine,
        "code": {"digest": code.digest, "modules": dict(code.modules)},
        "requests": {"num": len(record.requests["request_id"]), "sums": sums},
        "facts": clean_value(record.manifest),
    }
    tables = family.columns if record.obtained == "measured" else {}
    provenance = clean_value(provenance)
    parts = {CELL: cell.written(), MANIFEST: manifest, SUMMARY: family.summarize(record)}
    parts |= {name: _clean_errors(plain_table(name, record.tables[name], columns)) for name, columns in tables.items()}
    # Give the provenance as it will be read back.
    return Packed(
        cell=cell,
        content=encoded({**parts, PROVENANCE: provenance}),
        manifest=manifest,
        provenance=json.loads(json_line(PROVENANCE, provenance))[PROVENANCE],
    )


def _count_and_sum(record: RunRecord, name: str) -> list[int]:
    """The number of non-null values in a column of whole numbers, and their sum."""
    import numpy as np

    values = column(record, name)
    known = values[~np.isnan(values)]
    if np.abs(known).sum() < 2**53:
        return [len(known), int(known.sum())]
    integers = [int(value) for value in record.requests[name] if value is not None]  # too large for a double
    return [len(integers), sum(integers)]


def _clean_errors(table: Table) -> Table:
    """Cleans the column ``error``, because a server's message may repeat what it was sent. Answers are kept as they came."""
    return {name: clean_value(values) if name == "error" else values for name, values in table.items()}


def _difference(stored: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> str:
    """How two machines differ; empty if they are alike, or if nothing was measured."""
    if current is None:
        return ""
    if stored is None:
        return "it does not say which"
    return "; ".join(f"{name} {' -> '.join(values)}" for name, values in differing_facts([stored, current]).items())


def _module_names(modules: Sequence[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
