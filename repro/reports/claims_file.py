"""Judged claims as rows: what ``repro claims`` writes as CSV and prints as JSON."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from engines.errors import UserError
from repro.files import replace_text
from repro.reports.claims import Answer, Finding, Flips, How, Judged, judge, with_facts
from repro.reports.paper import Claim
from repro.reports.roles import MOST_ALONE
from repro.runs.store import StoredRun

COLUMNS = (
    "id",
    "kind",
    "section",
    "statement",
    "role",
    "verdict",
    "expected",
    "unit",
    "ours",
    "holds",
    "of",
    "roles",
    "error_percent",
    "direction",
    "tolerance",
    "tolerance_type",
    "why",
    "reason",
    "figure",
    "conditions",
    "obtained",
    "how",
    "code",
    "commit",
    "runs",
    "command",
    "minutes",
    "recomputed",
    "fact",
    "readings",
)
ADDED = ("fact", "readings")
"""Columns that older files lack."""


def names_of(keys: Collection[str], most: int = MOST_ALONE) -> list[str]:
    """Keys of runs in order; those of more than ``most`` as ``6000x0123456789ab``, their number and a digest."""
    if len(keys) <= most:
        return sorted(keys)
    return [f"{len(keys)}x{hashlib.sha256(' '.join(sorted(keys)).encode()).hexdigest()[:12]}"]


def as_row(each: Judged) -> dict[str, Any]:
    """Lists stay lists; ``runs`` name the runs that decide the numbers; ``minutes`` is the processor time of the command, measured when it
    made all of its runs; empty where it has made some of them alone."""
    claim, finding, answer = each.claim, each.finding, each.answer
    runs = () if answer is None else answer.runs
    row = {
        "id": claim.id,
        "kind": claim.kind,
        "section": claim.section,
        "statement": claim.statement,
        "role": each.role,
        "verdict": each.verdict,
        "expected": claim.expected.value,
        "unit": claim.expected.unit,
        "ours": None if finding is None else finding.value,
        "holds": None if finding is None else finding.holds,
        "of": () if finding is None else finding.of,
        "roles": answer.roles if answer is not None and each.role is not None else (),
        "error_percent": each.error_percent,
        "direction": claim.direction,
        "tolerance": claim.tolerance.value,
        "tolerance_type": claim.tolerance.type,
        "why": claim.tolerance.why,
        "reason": each.reason,
        "figure": claim.figure,
        "conditions": claim.conditions,
        "obtained": None if finding is None else _obtained(finding.obtained, runs),
        "how": None if finding is None else finding.how,
        "code": sorted({str(run.manifest["code"]["digest"]) for run in runs}),
        "commit": sorted({_commit(run) for run in runs}),
        "runs": names_of({run.cell.key for run in runs}),
        "command": None if answer is None else answer.command,
        "minutes": None if answer is None or answer.command_s is None else round(answer.command_s / 60, 2),
        "recomputed": None if claim.recomputed is None else claim.recomputed.verdict,
        "fact": claim.follows or (claim.id,),
        "readings": () if finding is None else [f"{name}: {value!r}" for name, value in finding.readings],
    }
    assert tuple(row) == COLUMNS
    return row


def save(path: Path, judged: Sequence[Judged]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
    writer.writeheader()
    for each in judged:
        writer.writerow({name: flat(value) for name, value in as_row(each).items()})
    return replace_text(path, text.getvalue())


def read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns, rows = reader.fieldnames, list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path.name} cannot be read ({type(error).__name__}: {error}): run 'repro claims' again"
        ) from error
    # A row that is short or long has a value, or a key, None.
    older = tuple(name for name in COLUMNS if name not in ADDED)
    if tuple(columns or ()) == older:
        rows = [{**row, **dict.fromkeys(ADDED, "")} for row in rows]
    elif tuple(columns or ()) != COLUMNS:
        raise UserError(f"{path.name} has other columns than 'repro claims' writes: run it again")
    if any(None in (*row, *row.values()) for row in rows):
        raise UserError(f"{path.name} has other columns than 'repro claims' writes: run it again")
    return rows


def judged_again(
    claims: Sequence[Claim], rows: Sequence[Mapping[str, str]], flips: Flips | None = None
) -> list[Judged]:
    """The rows' own answers to the claims they are of, judged as claims are stated now. Their runs stay behind."""
    by_id = {row["id"]: row for row in rows}
    return with_facts(
        [judge(claim, [_answer(claim, by_id[claim.id])] if by_id[claim.id]["ours"] else []) for claim in claims], flips
    )


def _answer(claim: Claim, row: Mapping[str, str]) -> Answer:
    values = tuple(map(float, row["ours"].split()))
    is_testable = row["verdict"] != "not testable here" or claim.untestable is not None
    how: How = next((how for how in get_args(How) if row["obtained"].startswith(how)), "computed")
    finding = Finding(
        claim=claim.id,
        value=values if len(values) > 1 else values[0],
        obtained=how,
        how=row["how"],
        of=_parts(row["of"], len(values)),
        holds={"True": True, "False": False}.get(row["holds"]),
        readings=_readings(row["readings"]),
        is_between="met between readings" in row["reason"],
        comparable=is_testable,
    )
    roles = _parts(row["roles"], len(values)) or ("prediction",) * len(values)
    seconds = 60 * float(row["minutes"]) if row["minutes"] else None
    return Answer(finding=finding, roles=roles, command=row["command"] or None, command_s=seconds)  # type: ignore[arg-type]


def _readings(text: str) -> tuple[tuple[str, float], ...]:
    parts = [part.rpartition(": ") for part in text.split("; ") if part]
    return tuple((name, float(value)) for name, _, value in parts)


def _parts(text: str, count: int) -> tuple[str, ...]:
    """The parts of a flat tuple of words or phrases, of which there are ``count`` or none."""
    if not text:
        return ()
    return (text,) if count == 1 else tuple(text.split("; " if "; " in text else " "))


def _obtained(how: str, runs: Sequence[StoredRun]) -> str:
    """How the runs were obtained, with what they add to it, such as that other code made them."""
    found = sorted({run.obtained for run in runs})
    return " and ".join(found) if found else how


def _commit(run: StoredRun) -> str:
    git = run.provenance["git"]
    return f"{str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}"


def flat(value: object) -> object:
    """As a CSV holds it: every digit of a number, and several values side by side."""
    if isinstance(value, tuple | list):
        separator = "; " if any(" " in str(part) for part in value) else " "
        return separator.join(str(flat(part)) for part in value)
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else value
