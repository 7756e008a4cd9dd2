"""The table of the runs behind a figure, with a row per cell and a column for each number that drawing reads.

The first line is a comment that holds the figure's view, its notes and a seal as JSON. Plain CSV follows. A figure drawn from its table
equals the one drawn from its runs, byte for byte. A column named by a path is a value in the run's file: ``summary/e2el_s/mean`` is in its
summary. ``totals/steps/num_rows`` is a sum over a table's column."""

import csv
import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.families.platforms import platform
from repro.files import SEAL, csv_text, is_whole, keep_mode, replace_bytes, sealed, writable_file
from repro.reports.figures import FigureEntry, Rendered, View, default_reading, figure
from repro.runs.cell import Cell
from repro.runs.family import Validity
from repro.runs.record import REQUESTS, RunRecord
from repro.runs.store import StoredRun

SUFFIX = ".runs.csv"
PACKED_BYTES = 1_000_000
"""Size from which a table is stored as ``.runs.csv.gz``."""
DIGEST_LENGTH = 12
FIXED = (
    *("system", "dataset", "rate", "seed"),
    *("asked", "key", "knobs", "digest"),
    *("obtained", "valid", "reasons", "warnings"),
)
"""``asked`` is the key of the figure's cell. ``key`` is that of the stored cell, which also has ``knobs``."""
WORDS = frozenset(("system", "dataset", "asked", "key", "digest", "obtained"))
"""Fixed columns that hold plain text; all others hold JSON."""
PARTS = ("summary", "manifest", "provenance", "tables", "totals")

Place = tuple[str, ...]
ALL = ""
"""Stands for all names of a part that was iterated over."""


class TableError(UserError):
    """The table cannot be read, or does not hold the figure's runs."""


# -- reading what drawing reads ---------------------------------------------------------------------------


class _Watched(Mapping[str, Any]):
    """A part of a run that records the place of everything that is read from it."""

    def __init__(self, part: Mapping[str, Any], place: Place, seen: dict[Place, None]) -> None:
        self._part, self._place, self._seen = part, place, seen

    def __getitem__(self, name: str) -> Any:
        if "/" in name:  # which could not be told from two names
            self._seen[(*self._place, ALL)] = None
            return self._part[name]
        place = (*self._place, name)
        self._seen[place] = None
        value = self._part[name]
        return _Watched(value, place, self._seen) if isinstance(value, Mapping) and value else value

    def __iter__(self) -> Iterator[str]:
        self._seen[(*self._place, ALL)] = None
        return iter(self._part)

    def __len__(self) -> int:
        self._seen[(*self._place, ALL)] = None
        return len(self._part)


class _WatchedRun(StoredRun):
    """A stored run that records what is read from it."""

    def __init__(self, run: StoredRun, seen: dict[Place, None]) -> None:
        manifest = _Watched(run.manifest, ("manifest",), seen)
        provenance = _Watched(run.provenance, ("provenance",), seen)
        super().__init__(run.cell, run.file, manifest, provenance, run.other_code, run.other_machine)
        summary = _Watched(run.summary, ("summary",), seen)
        vars(self).update(summary=summary, validity=run.validity, _run=run, _seen=seen)

    @property
    def obtained(self) -> str:
        return str(vars(self)["_run"].obtained)

    def table(self, name: str) -> Any:
        return _Watched(vars(self)["_run"].record.tables[name], ("tables", name), vars(self)["_seen"])

    def total(self, table: str, column: str) -> float:
        vars(self)["_seen"]["totals", table, column] = None
        return float(vars(self)["_run"].total(table, column))


def _columns(seen: Iterable[Place]) -> list[Place]:
    """The places to store. A part that was iterated over is stored whole; of other parts, only the places that were read."""
    marks = set(seen)
    whole = {place[:-1] for place in marks if place[-1] == ALL}
    read = {place for place in marks if place[-1] != ALL}
    outer = {place[:length] for place in read for length in range(1, len(place))} - whole
    return sorted(
        place for place in (read - outer) | whole if not any(place[:length] in whole for length in range(1, len(place)))
    )


def value_at(run: StoredRun, place: Place) -> Any:
    """The run's value at a place. Raises KeyError if there is none."""
    part, *names = place
    if part == "totals":
        return run.total(*names)
    if part == "tables":
        return run.record.tables[names[0]][names[1]] if len(names) > 1 else run.record.tables[names[0]]
    value: Any = getattr(run, part)
    for name in names:
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[name]
    return value


def digest_of(summary: Mapping[str, Any]) -> str:
    """A digest of a run's numbers to six digits, because processors differ in the last digits."""
    text = json.dumps(_rounded(summary), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return f"{value:.6g}"
        case Mapping():
            return {name: _rounded(part) for name, part in value.items()}
        case list() | tuple():
            return [_rounded(part) for part in value]
    return value


def places_read(findings: Callable[[Sequence[StoredRun]], object], runs: Sequence[StoredRun]) -> list[int]:
    """Indices of the runs from which ``findings`` reads a number."""
    seen: list[dict[Place, None]] = [{} for _ in runs]
    findings([_WatchedRun(run, places) for run, places in zip(runs, seen, strict=True)])
    return [index for index, places in enumerate(seen) if places]


# -- the table --------------------------------------------------------------------------------------------


def _row(cell: Cell, run: StoredRun, places: Sequence[Place]) -> list[str]:
    knobs = cell.knob_values
    extra = {name: value for name, value in run.cell.knobs if name not in knobs or knobs[name] != value}
    validity = run.validity
    fixed = (
        *(run.cell.system, run.cell.dataset, run.cell.rate, run.cell.seed),
        *(cell.key, run.cell.key, extra, digest_of(run.summary)),
        *(run.obtained, validity.valid, list(validity.reasons), list(validity.warnings)),
    )
    fields = zip(FIXED, fixed, strict=True)
    return [
        *(str(value) if name in WORDS else _text(value) for name, value in fields),
        *(_text_at(run, place) for place in places),
    ]


def _text_at(run: StoredRun, place: Place) -> str:
    try:
        return _text(value_at(run, place))
    except KeyError:
        return ""


def _text(value: Any) -> str:
    """The value as JSON. A word that is no JSON stays as it is."""
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    return _parsed(text) if text.startswith(("{", "[")) else _parsed_scalar(text)


def _parsed(text: str) -> Any:
    if text[:1].isalpha() and text not in _LITERALS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


_parsed_scalar = lru_cache(maxsize=1 << 15)(_parsed)
"""Cached, because two in three texts of a table are repeats."""
_LITERALS = frozenset(("true", "false", "null", "NaN", "Infinity"))


def write_table(
    path: Path, entry: FigureEntry, view: View, runs: Sequence[StoredRun], seen: Iterable[Place], notes: Sequence[str]
) -> Path:
    """Writes a figure's table and returns its path. ``path`` is that of the figure's files without their endings."""
    platform = view.platform
    head = {
        "figure": entry.name,
        "platform": platform.name,
        "executor": platform.executor,
        "reading": view.reading,
        "accuracy": view.accuracy,
        "num_runs": view.num_runs,
        "knobs": dict(view.knobs),
        "rates": list(view.rates),
        "notes": list(notes),
    }
    places = _columns(seen)
    cells = [view.applied(cell) for cell in entry.load().cells(view)] if runs else []
    rows = [_row(cell, run, places) for cell, run in zip(cells, runs, strict=True)]
    # A place at which no run has a value needs no column.
    indices = [i for i in range(len(FIXED) + len(places)) if i < len(FIXED) or any(row[i] for row in rows)]
    names = [*FIXED, *("/".join(place) for place in places)]
    columns, *lines = ([row[i] for i in indices] for row in (names, *rows))
    content = with_head(head, csv_text(columns, lines)).encode()
    plain_path = path.with_name(path.name + SUFFIX)
    packed_path = plain_path.with_name(f"{plain_path.name}.gz")
    if len(content) < PACKED_BYTES:
        return replace_bytes(plain_path, content)
    return replace_bytes(packed_path, gzip.compress(content, mtime=0))


def with_head(head: Mapping[str, Any], rows: str) -> str:
    """The text of a table: its head with a seal over head and rows, and then the rows as CSV."""
    seal = sealed({**head, "rows": rows})[SEAL]
    return f"# {json.dumps({**head, SEAL: seal}, ensure_ascii=False)}\n{rows}"


class TableRun(StoredRun):
    """A run as read from a figure's table. It holds only what drawing reads."""

    def __init__(self, cell: Cell, file: Path, row: Mapping[str, Any], places: Mapping[Place, str]) -> None:
        parts: dict[str, Any] = {name: {} for name in PARTS}
        parts["manifest"]["facts"] = {}
        for place, text in places.items():
            if text:
                node = parts
                for name in place[:-1]:
                    node = node.setdefault(name, {})
                node[place[-1]] = _value(text)
        marks = str(row["obtained"]).split(", ")
        others = (("as stored",) if "other code" in marks else (), "as stored" if "other machine" in marks else "")
        super().__init__(cell, file, parts["manifest"], parts["provenance"], *others)
        tables = {REQUESTS: {}, **parts["tables"]}
        vars(self).update(
            summary=parts["summary"],
            validity=Validity(valid=row["valid"], reasons=tuple(row["reasons"]), warnings=tuple(row["warnings"])),
            record=RunRecord(tables=tables, manifest=parts["manifest"]["facts"]),
            _row=row,
            _totals=parts["totals"],
        )

    @property
    def obtained(self) -> str:
        return str(vars(self)["_row"]["obtained"])

    @property
    def figure_key(self) -> str:
        """The key of the figure's cell."""
        return str(vars(self)["_row"]["asked"])

    @property
    def digest(self) -> str:
        return str(vars(self)["_row"]["digest"])

    def total(self, table: str, column: str) -> float:
        return float(vars(self)["_totals"][table][column])


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """A figure's table as it is stored."""

    path: Path
    head: Mapping[str, Any]
    places: tuple[Place, ...]
    rows: tuple[tuple[str, ...], ...]
    """The texts of the fixed columns and of the places."""
    is_whole: bool
    """Whether the table is as it was written."""

    @property
    def fixed(self) -> Iterator[dict[str, str]]:
        """The texts of each row's fixed columns."""
        return (dict(zip(FIXED, row, strict=False)) for row in self.rows)

    @property
    def stem(self) -> Path:
        """Path of the figure's files without their endings."""
        return self.path.with_name(self.path.name.removesuffix(".gz").removesuffix(SUFFIX))

    @cached_property
    def entry(self) -> FigureEntry:
        return figure(self.head["figure"])

    @cached_property
    def view(self) -> View:
        head = self.head
        return View(
            platform=replace(platform(head["platform"]), executor=head["executor"]),
            reading=head["reading"],
            accuracy=head["accuracy"],
            num_runs=head["num_runs"],
            knobs=tuple(head["knobs"].items()),
            rates=tuple(head["rates"]),
        )

    @property
    def is_usual(self) -> bool:
        """Whether the table's view is the one in which the figure answers claims."""
        view = self.view
        return (
            view.platform.executor == platform(view.platform.name).executor
            and view.accuracy == "usual"
            and view.reading == default_reading(view.platform)
            and not (view.knobs or view.rates)
        )

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells that the figure asks for now."""
        return [self.view.applied(cell) for cell in self.entry.load().cells(self.view)]

    @cached_property
    def runs(self) -> list[TableRun]:
        """The runs of the cells, in their order. Raises TableError if the figure now asks for other cells."""
        stored = {row[_ASKED]: row for row in self.rows}
        rows = [stored.pop(cell.key, None) for cell in self.cells]
        missing = sum(row is None for row in rows)
        if missing or stored:
            raise TableError(
                f"{missing} of {len(rows)} runs that the figure asks for are not in {self.path.name}, and {len(stored)} of its runs "
                f"are no longer asked for: draw the figure again"
            )
        return [self._run(cell, row) for cell, row in zip(self.cells, rows, strict=True) if row is not None]

    def _run(self, cell: Cell, texts: Sequence[str]) -> TableRun:
        row: dict[str, Any] = {
            name: text if name in WORDS else json.loads(text) for name, text in zip(FIXED, texts, strict=False)
        }
        stored = cell.with_knobs(row["knobs"])
        for name in ("system", "dataset", "rate", "seed", "key"):
            if row[name] != (value := getattr(stored, name)):
                raise TableError(
                    f"{self.path.name} has {name}={row[name]} for {stored.folder_name}, not {value}: draw the figure again"
                )
        return TableRun(stored, self.path, row, dict(zip(self.places, texts[len(FIXED) :], strict=True)))


_ASKED = FIXED.index("asked")


def read_table(path: Path) -> RunTable:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        first_line, _, body = text.partition("\n")
        head = json.loads(first_line.removeprefix("#"))
        columns, *rows = csv.reader(io.StringIO(body, newline=""), strict=True)
        places = tuple(tuple(name.split("/")) for name in columns[len(FIXED) :])
        if tuple(columns[: len(FIXED)]) != FIXED or any(len(row) != len(columns) for row in rows):
            raise ValueError("its columns are others")
        if head["executor"] not in ("torch", "roofline"):
            raise ValueError(f"executor={head['executor']!r}")
        whole = is_whole({**head, "rows": body})
        table = RunTable(path=path, head=head, places=places, rows=tuple(map(tuple, rows)), is_whole=whole)
        _ = table.view, table.entry
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise TableError(
            f"{path.name} cannot be read ({type(error).__name__}: {error}): draw its figure again"
        ) from error
    return table


def tables_in(root: Path) -> list[Path]:
    """Paths of the tables in the subfolders of a folder."""
    return sorted(path for ending in ("", ".gz") for path in root.glob(f"*/*{SUFFIX}{ending}"))


def command_of(table: RunTable) -> str:
    """The command that makes the figure again in its place."""
    view, entry = table.view, table.entry
    chosen, options = view.platform, list[str]()
    if chosen.executor != platform(chosen.name).executor:
        options += ["--executor", chosen.executor]
    if view.reading != default_reading(chosen):
        options += ["--reading", view.reading]
    if view.accuracy != "usual":
        options += ["--accuracy", view.accuracy]
    if table.cells and view.num_runs != entry.load().default_num_runs(chosen):
        options += ["--num-runs", str(view.num_runs)]
    options += [f"--request-rate {rate:g}" for rate in view.rates]
    options += [f"--{name.replace('_', '-')} {value}" for name, value in view.knobs]
    out = ["--out-dir", shlex.quote(os.path.relpath(table.path.parent))]
    return " ".join(["repro reproduce", entry.name, "--platform", chosen.name, *options, *out])


# -- drawing ----------------------------------------------------------------------------------------------


def draw(entry: FigureEntry, view: View, runs: Sequence[StoredRun], out: Path) -> Rendered:
    """Draw the figure's files and its table, which appear together or not at all."""
    figure, seen = entry.load(), dict[Place, None]()
    watched = [_WatchedRun(run, seen) for run in runs]
    with _move_together(out, entry.name.replace("/", "-")) as folder:
        rendered = figure.render(watched, view, folder)
        if view.platform.name in figure.deciding:
            figure.findings(watched, view)
        write_table(rendered.files[0].with_suffix(""), entry, view, runs, seen, rendered.notes)
    return replace(rendered, files=tuple(out / path.relative_to(folder) for path in rendered.files))


@contextmanager
def _move_together(out: Path, name: str) -> Iterator[Path]:
    """Yields a folder to write into, and moves its files into ``out`` at the end. Errors show the files' final names."""
    partial = out / f".{name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        targets = [writable_file("out_dir", out / path.relative_to(partial)) for path in files]
        for path, target in zip(files, targets, strict=True):
            keep_mode(target, path)
            path.replace(target)
    except OSError as error:
        if error.filename is not None and Path(error.filename).is_relative_to(partial):
            error.filename = str(out / Path(error.filename).relative_to(partial))
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
