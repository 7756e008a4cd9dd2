"""Compares committed figures and verdicts with those from the committed tables of runs, and makes a sample of the runs again."""

import csv
import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from engines.errors import RunError, UserError, require
from repro.families.cost import load_calibration
from repro.files import SEAL, is_whole, replace_bytes, replace_text
from repro.reports import claims_file
from repro.reports.claims import Claim, Finding, judge_all, load_claims, read_claims
from repro.reports.evidence import FigureSource, sources
from repro.reports.figures import DLLM_SERVE, PAPERS, pictures
from repro.reports.fitting import PROTOCOLS, read_report, report, report_path
from repro.reports.run_table import (
    Place,
    RunTable,
    TableRun,
    command_of,
    digest_of,
    read_table,
    tables_in,
    value_at,
    with_head,
)
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import MANIFEST, StoredRun, pack, part_of, parts_of

OTHER_FOLDERS = ("paper", "truth", "local", "figures")
"""Folders of results with inputs, with files that a test makes again, or with files of this machine."""
PAGES = ("README.md", "verdict.md")
"""Pages about the results of a folder."""
WORDS = (".csv", ".md", ".txt")
"""Endings of the figure files that are compared. Pictures are not, because libraries change them."""
WITHOUT_RUNS = "without-runs.csv"
"""Lists tables of figures whose runs are no longer stored, of scripts and of calibrations, each with its digest."""

Status = Literal["same", "differs", "by digest"]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check. ``by digest`` marks a measured figure without a table, whose files are as they were drawn."""

    figure: str
    path: Path
    status: Status
    reason: str
    command: str = "-"
    """The command that makes it again."""

    @property
    def is_fault(self) -> bool:
        return self.status == "differs"


def _compared(figure: str, path: Path, differs: str | None, how: str, command: str) -> Checked:
    """The result "same" with the reason ``how``, or "differs" with the reason ``differs``."""
    return Checked(
        figure=figure, path=path, status="differs" if differs else "same", reason=differs or how, command=command
    )


def check_results(root: Path, advance: Callable[[], None] = lambda: None) -> list[Checked]:
    """Check every figure, table, verdict and calibration report below ``root``. ``advance`` is called after each."""
    checks, tables = list[Checked](), list[RunTable]()

    def collect(result: Checked) -> None:
        checks.append(result)
        advance()

    for path in tables_in(root):
        try:
            tables.append(read_table(path))
        except UserError as error:
            collect(Checked(figure=path.name, path=path, status="differs", reason=str(error)))
    for table in tables:
        collect(check_figure(table))
    for checked in (*_check_digests(root, tables), *check_claims(root, tables)):
        collect(checked)
    return checks


# -- figures ----------------------------------------------------------------------------------------------


def check_figure(table: RunTable) -> Checked:
    """Whether the committed figure has the numbers and words of one drawn from its table."""
    reason = "no runs behind it"
    try:
        if table.cells:
            reason = f"{len(table.runs)} runs"
        difference = _other_words(table)
    except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        difference = f"it cannot be drawn from {table.path.name} ({type(error).__name__}: {error})"
    return _compared(table.entry.name, table.path, difference, f"{reason}, drawn again", command_of(table))


def _other_words(table: RunTable) -> str | None:
    with TemporaryDirectory() as folder, pictures("none"):
        rendered = table.entry.load().render(table.runs, table.view, Path(folder))
        drawn = {path.name: path.read_bytes() for path in rendered.files if path.suffix in WORDS}
    stored = {path.name: path.read_bytes() for path in _files_of(table.stem)}
    if unmatched := sorted(stored.keys() ^ drawn.keys()):
        return f"{unmatched[0]} is {'no longer drawn' if unmatched[0] in stored else 'missing'}"
    for name, content in drawn.items():
        if content != stored[name]:
            old, new = _first_difference(stored[name].decode(), content.decode())
            return f"{name} has {old!r}, where it is drawn now with {new!r}"
    if list(rendered.notes) != table.head["notes"]:
        return f"the notes in {table.path.name} are not those that it is drawn with now"
    return None if table.is_whole else f"{table.path.name} is not as it was written: draw the figure again"


def _files_of(stem: Path) -> list[Path]:
    return [path for ending in WORDS if (path := stem.with_name(stem.name + ending)).is_file()]


def _first_difference(there: str, now: str) -> tuple[str, str]:
    """The first line that differs, on both sides, starting shortly before the difference."""
    pairs = zip_longest(there.splitlines(), now.splitlines(), fillvalue="")
    before, after = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    start = max(0, alike - 20)
    return before[start : start + _SHOWN], after[start : start + _SHOWN]


_SHOWN = 60
"""Characters shown of a differing line."""


def _check_digests(root: Path, tables: Iterable[RunTable]) -> Iterator[Checked]:
    """Check tables without runs. Listed ones must be as they were made; an unlisted one is a fault."""
    digests: dict[str, str] = {}
    if (path := root / WITHOUT_RUNS).is_file():
        _, *rows = csv.reader(io.StringIO(path.read_text(encoding="utf-8")))
        digests = dict(rows)
    table_files = {path for table in tables for path in (table.path, *_files_of(table.stem))}
    for path in sorted(path for path in root.glob("*/*") if path.suffix in WORDS):
        is_result = path.parent.name not in OTHER_FOLDERS and path.name not in PAGES
        if is_result and path not in table_files and str(path.relative_to(root)) not in digests:
            reason = "nothing says what it was drawn from"
            yield Checked(figure=path.stem, path=path, status="differs", reason=reason)
    figures: dict[Path, list[str]] = {}
    for name in digests:
        figures.setdefault((root / name).with_suffix(""), []).append(name)
    for stem, names in figures.items():
        changed = [name for name in names if _digest(root / name) != digests[name]]
        yield Checked(
            figure=stem.name,
            path=stem.with_suffix(".csv"),
            status="differs" if changed else "by digest",
            reason=f"{changed[0]} is not as it was drawn" if changed else "its runs are gone: not drawn again",
        )


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def redraw(table: RunTable) -> list[Path]:
    """Writes the figure's pictures and words again from its table, and the notes in the table's head. Returns the files that changed.

    Raises UserError if its CSV would change: only ``repro reproduce`` makes numbers."""
    csv_path = table.stem.with_name(table.stem.name + ".csv")
    with TemporaryDirectory() as folder:
        rendered = table.entry.load().render(table.runs, table.view, Path(folder))
        contents = {path.name: path.read_bytes() for path in rendered.files}
    require(
        contents[csv_path.name] == csv_path.read_bytes(),
        f"{csv_path.name} has other numbers than are drawn now: run {command_of(table)}",
    )
    contents |= _with_notes(table, rendered.notes)
    paths = [csv_path.with_name(name) for name in contents]
    changed = [path for path in paths if not path.is_file() or path.read_bytes() != contents[path.name]]
    return [replace_bytes(path, contents[path.name]) for path in changed]


def _with_notes(table: RunTable, notes: Sequence[str]) -> dict[str, bytes]:
    """The table's file name and its content with these notes; empty if it has them already."""
    if list(notes) == table.head["notes"]:
        return {}
    content = table.path.read_bytes()
    is_packed = table.path.suffix == ".gz"
    _, _, rows = (gzip.decompress(content) if is_packed else content).decode().partition("\n")
    head = {name: value for name, value in table.head.items() if name != SEAL}
    text = with_head({**head, "notes": list(notes)}, rows).encode()
    return {table.path.name: gzip.compress(text, mtime=0) if is_packed else text}


# -- verdicts ---------------------------------------------------------------------------------------------


def check_claims(root: Path, tables: Iterable[RunTable]) -> Iterator[Checked]:
    """Check that every ``claims-PAPER.csv`` has the rows that the tables give now."""
    usual = _by_figure(tables)
    for paper in PAPERS:
        path = root / f"claims-{paper}.csv"
        if path.is_file():
            try:
                difference = _other_row(paper, path, usual)
            except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                difference = f"they cannot be judged ({type(error).__name__}: {error})"
            yield _compared("claims", path, difference, "judged again", "repro check-results --judge")


def usual_tables(root: Path) -> dict[tuple[str, str], RunTable]:
    """The tables below ``root`` with the views in which figures answer claims, by figure and platform."""
    return _by_figure(map(read_table, tables_in(root)))


def _by_figure(tables: Iterable[RunTable]) -> dict[tuple[str, str], RunTable]:
    return {(table.entry.name, table.view.platform.name): table for table in tables if table.is_usual}


def judged_text(paper: str, path: Path, usual: Mapping[tuple[str, str], RunTable]) -> str:
    """The content of a claims file by the tables. A figure without all its runs answers no claim."""
    claims = read_claims(PAPERS[paper].claims, paper)
    runs_of = ((source, _runs_of(source, usual)) for source in sources(PAPERS[paper].entries))
    findings = [finding for source, runs in runs_of if runs is not None for finding in source.findings(runs)]
    return claims_file.as_csv(judge_all(claims, findings, claims_file.read_flips(paper, path.parent)))


def _runs_of(source: FigureSource, usual: Mapping[tuple[str, str], RunTable]) -> list[StoredRun] | None:
    """The runs of a figure's cells, from its table; None if some are missing."""
    if not source.cells:
        return []
    table = usual.get((source.entry.name, source.view.platform.name))
    if table is None:
        return None
    by_key = {run.figure_key: run for run in table.runs}
    matches = [by_key.get(cell.key) for cell in source.cells]
    runs: list[StoredRun] = [run for run in matches if run is not None]
    return runs if len(runs) == len(matches) else None


def _other_row(paper: str, path: Path, usual: Mapping[tuple[str, str], RunTable]) -> str | None:
    stored, new = path.read_bytes().decode(), judged_text(paper, path, usual)
    if stored == new:
        return None
    for before, after in zip_longest(*(csv.DictReader(io.StringIO(text)) for text in (stored, new)), fillvalue={}):
        for name in claims_file.COLUMNS:
            if before.get(name) != after.get(name):
                claim = before.get("id") or after.get("id")
                return f"{claim} has {name}={before.get(name)!r}, where it is judged now {name}={after.get(name)!r}"
    return "it is not written as 'repro check-results --judge' writes it"


def judge(root: Path) -> list[Path]:
    """Writes every ``claims-PAPER.csv`` below ``root`` with the current verdicts."""
    usual = usual_tables(root)
    paths = {paper: root / f"claims-{paper}.csv" for paper in PAPERS}
    return [replace_text(path, judged_text(paper, path, usual)) for paper, path in paths.items()]


# -- calibration reports ----------------------------------------------------------------------------------


def check_reports() -> Iterator[Checked]:
    """Check every calibrated card's report: whole, of the stored constants, with verdicts and medians that follow from its values."""
    for card in PROTOCOLS:
        try:
            difference = _other_report(card)
        except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
            difference = str(error)
        command = f"repro calibrate --platform {card} --keep"
        yield _compared("calibration", report_path(card), difference, "judged again", command)


def _other_report(card: str) -> str | None:
    stored = read_report(card)
    if stored is None:
        return "no report is stored"
    if not is_whole(stored):
        return "it is not as it was written"
    claims = {claim.id: claim for claim in load_claims(DLLM_SERVE.name)}
    # Judge all claims together, because a claim that follows from a failed number fails too.
    judged = judge_all([*claims.values()], [_reported(row, claims[row["claim"]]) for row in stored["comparisons"]])
    current = json.loads(json.dumps(report(load_calibration(card), judged)))
    changed = [name for name, value in current.items() if stored[name] != value]
    return f"its {changed[0]} are not what claims.yaml, the stored constants and its values give" if changed else None


def _reported(row: Mapping[str, Any], claim: Claim) -> Finding:
    values = row["ours"]
    return Finding(
        claim=claim.id,
        value=tuple(values) if isinstance(values, list) else values,
        obtained="simulated",
        how=row["how"],
        of=tuple(row["of"]),
        # The report does not store whether an ordering holds.
        holds=row["verdict"] != "not reproduced" if claim.expected.value is None else None,
    )


ELSEWHERE = ("provenance",)
"""Parts of a run that tell where it was made, and hold none of its numbers."""


def remake_sample(root: Path, count: int, seed: int = 0, advance: Callable[[], None] = lambda: None) -> list[Checked]:
    """Make ``count`` simulated runs of the tables below ``root`` again, drawn with ``seed`` and spread over the figures."""
    checks = []
    for table, key in _sample([read_table(path) for path in tables_in(root)], count, random.Random(seed)):
        name = table.entry.name
        try:
            run = next(run for run in table.runs if run.figure_key == key)
            name = f"{name}: {run.cell.folder_name}"
            difference = _run_difference(table, run)
        except (UserError, RunError) as error:
            difference = str(error)
        checks.append(_compared(name, table.path, difference, "made again, with the same numbers", command_of(table)))
        advance()
    return checks


def _sample(tables: Sequence[RunTable], count: int, draw: random.Random) -> Iterator[tuple[RunTable, str]]:
    """Yields the tables in turn, each with the asked key of one of its simulated rows."""
    remaining = []
    for table in tables:
        rows = [row["asked"] for row in table.fixed if not row["obtained"].startswith("measured")]
        remaining.append((table, draw.sample(rows, len(rows))))
    draw.shuffle(remaining)
    while count > 0 and any(rows for _, rows in remaining):
        for table, rows in remaining:
            if rows and count > 0:
                count -= 1
                yield table, rows.pop()


def _run_difference(table: RunTable, stored: TableRun) -> str | None:
    """How a cell's run, made now, differs from the stored one; None if it does not."""
    cell = next(cell for cell in table.cells if cell.key == stored.figure_key)
    experiment = prepare(cell)
    if experiment.cell.key != stored.cell.key:
        return f"its key is {experiment.cell.key} today: its requests, settings, or the constants behind it are others"
    run = fresh_run(experiment)
    for place in table.places:
        old, new = (_stored_value(side, place) for side in (stored, run))
        if place[0] not in ELSEWHERE and not _is_alike(old, new):
            return f"{'/'.join(place)} is {old!r}, and {new!r} made again"
    if digest_of(run.summary) != stored.digest:
        return "a number that drawing does not read is another one made again"
    return None


def fresh_run(experiment: Experiment) -> StoredRun:
    """The experiment's run, made now and stored nowhere."""
    record = experiment.run()
    packed = pack(experiment, record, {})
    manifest = part_of(parts_of(packed.content), MANIFEST)
    run = StoredRun(packed.cell, Path(), manifest, packed.provenance, content=packed.content)
    vars(run)["record"] = record
    return run


def _stored_value(run: StoredRun, place: Place) -> Any:
    try:
        return value_at(run, place)
    except KeyError:
        return None


def _is_alike(before: Any, now: Any) -> bool:
    """Whether two values are equal, apart from the last digits, in which processors differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_alike(before[name], now[name]) for name in before)
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_is_alike, before, now))
    numbers = (int, float)
    if isinstance(before, numbers) and isinstance(now, numbers) and isinstance(before, bool) is isinstance(now, bool):
        return isclose(before, now)
    return bool(before == now)
