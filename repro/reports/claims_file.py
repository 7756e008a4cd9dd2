"""Judged claims as rows, which ``repro claims`` writes as CSV and prints as JSON, and the flips of their verdicts."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from engines.errors import UserError
from repro.files import csv_text, replace_text
from repro.paths import RESULTS
from repro.reports.claims import Claim, Finding, Flip, Flips, How, Judged, judge_all


def _finding_field(name: str, default: object = None) -> Callable[[Judged], Any]:
    """Returns a function that reads a field of the finding, or gives ``default`` if there is none."""
    return lambda each: default if each.finding is None else getattr(each.finding, name)


_ROW: Mapping[str, Callable[[Judged], Any]] = {
    **{name: attrgetter(f"claim.{name}") for name in ("id", "kind", "section", "statement")},
    "role": attrgetter("role"),
    "verdict": attrgetter("verdict"),
    "expected": attrgetter("claim.expected.value"),
    "unit": attrgetter("claim.expected.unit"),
    "ours": _finding_field("value"),
    "holds": _finding_field("holds"),
    "of": _finding_field("of", ()),
    "error_percent": attrgetter("error_percent"),
    "direction": attrgetter("claim.direction"),
    "tolerance": attrgetter("claim.tolerance.value"),
    "tolerance_type": attrgetter("claim.tolerance.type"),
    "why": attrgetter("claim.tolerance.why"),
    "reason": attrgetter("reason"),
    "figure": attrgetter("claim.figure"),
    "conditions": attrgetter("claim.conditions"),
    **{name: _finding_field(name) for name in ("obtained", "how", "command")},
    "recomputed": lambda each: None if each.claim.recomputed is None else each.claim.recomputed.verdict,
    "fact": lambda each: each.claim.follows or (each.claim.id,),
    "readings": lambda each: [f"{name}: {value!r}" for name, value in _finding_field("readings", ())(each)],
}
COLUMNS = tuple(_ROW)


def as_row(judged: Judged) -> dict[str, Any]:
    """A judged claim as a row. Lists stay lists; ``command`` makes the runs behind the numbers."""
    return {name: value_of(judged) for name, value_of in _ROW.items()}


def as_csv(judged: Sequence[Judged]) -> str:
    return csv_text(COLUMNS, ([flat(value) for value in as_row(each).values()] for each in judged))


def save(path: Path, judged: Sequence[Judged]) -> Path:
    return replace_text(path, as_csv(judged))


def read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns, rows = reader.fieldnames, list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path.name} cannot be read ({type(error).__name__}: {error}): run 'repro claims' again"
        ) from error
    # A row that is too short has a value None; one that is too long has a key None.
    if tuple(columns or ()) != COLUMNS or any(None in (*row, *row.values()) for row in rows):
        raise UserError(f"{path.name} has other columns than 'repro claims' writes: run it again")
    return rows


def rejudged(claims: Sequence[Claim], rows: Sequence[Mapping[str, str]], flips: Flips | None = None) -> list[Judged]:
    """Judge the findings in the rows again, by the claims as they are stated now."""
    by_id = {row["id"]: row for row in rows}
    pairs = [(claim, by_id[claim.id]) for claim in claims]
    return judge_all(claims, [finding_of(claim, row) for claim, row in pairs if row["ours"]], flips)


def finding_of(claim: Claim, row: Mapping[str, str]) -> Finding:
    """The finding in the row of an answered claim."""
    values = tuple(map(float, row["ours"].split()))
    readings = [part.rpartition(": ") for part in row["readings"].split("; ") if part]
    is_testable = row["verdict"] != "not testable here" or claim.untestable is not None
    how: How = next((how for how in get_args(How) if row["obtained"].startswith(how)), "computed")
    return Finding(
        claim=claim.id,
        value=values if len(values) > 1 else values[0],
        obtained=how,
        how=row["how"],
        of=_parts(row["of"], len(values)),
        holds={"True": True, "False": False}.get(row["holds"]),
        readings=tuple((name, float(value)) for name, _, value in readings),
        is_between="met between readings" in row["reason"],
        comparable=is_testable,
        command=row["command"] or None,
    )


def _parts(text: str, count: int) -> tuple[str, ...]:
    """Split a flattened tuple of words or phrases, which has ``count`` parts or none."""
    if not text:
        return ()
    return (text,) if count == 1 else tuple(text.split("; " if "; " in text else " "))


def flat(value: object) -> object:
    """A value for a CSV: every digit of a number, and several values side by side."""
    if isinstance(value, tuple | list):
        separator = "; " if any(" " in str(part) for part in value) else " "
        return separator.join(str(flat(part)) for part in value)
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else value


def value_text(value: float | tuple[float, ...] | None, unit: str | None) -> str:
    """A value as text for a table. ``unit`` may have one unit for each of several values, and name their subject in brackets."""
    if value is None:
        return "ordering"
    values = value if isinstance(value, tuple) else (value,)
    units = [part.strip() for part in re.split("[,;]", (unit or "").partition(" (")[0])]
    if len(units) == len(values):
        return ", ".join(_number(number, label) for number, label in zip(values, units, strict=True))
    if len(set(values)) == 1:
        return _number(values[0], units[0])
    *first, last = (f"{number:.4g}" for number in values)
    return (" to " if len(values) == 2 else ", ").join([*first, f"{last} {units[0]}".strip()])


def our_text(judged: Judged) -> str:
    """Our number for a judged claim as text for a table."""
    if judged.finding is None:
        return "-"
    if judged.claim.expected.value is None and judged.finding.holds is not None:
        return "holds" if judged.finding.holds else "does not hold"
    return value_text(judged.finding.value, judged.claim.expected.unit)


def _number(value: float, unit: str) -> str:
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "rank":
        return f"rank {value:.4g}"
    if unit == "bytes":
        return f"{value / 1e9:.4g} GB"
    return f"{value:.4g} {'' if unit == 'fraction' else unit}".strip()


# -- flips ------------------------------------------------------------------------------------------------


def flips_path(paper: str, root: Path = RESULTS) -> Path:
    return root / f"flips-{paper}.csv"


def flips_csv(flips: Sequence[Flip]) -> str:
    return csv_text([field.name for field in fields(Flip)], map(astuple, flips))


def read_flips(paper: str, root: Path = RESULTS) -> Flips:
    """The stored flips of a paper, by claim; empty if it has no such file."""
    path = flips_path(paper, root)
    if not path.is_file():
        return {}
    flips: dict[str, tuple[Flip, ...]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            flips[row["claim"]] = (*flips.get(row["claim"], ()), Flip(**row))  # type: ignore[arg-type]
    return flips
