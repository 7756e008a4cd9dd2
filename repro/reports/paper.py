"""The papers' own numbers (results/paper): claims, figure entries and tables, read strictly."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from engines.errors import UserError
from engines.knobs import Checked, check_value
from repro.files import one_line, unreadable_yaml, yaml_loader
from repro.paths import PAPER

FOLDERS: Mapping[str, str] = {"dllm-serve": "dllm_serve", "ampd": "ampd", "laps": "laps", "block": "block"}
"""Paper's short name -> its folder."""

ClaimKind = Literal["stated", "derived", "inconsistency"]
Direction = Literal["higher", "lower", "equal"]
ToleranceType = Literal["relative", "absolute", "exact", "ordering", "one_sided"]
Severity = Literal["high", "medium", "low"]
Role = Literal["by construction", "fitted", "implied by the fit", "prediction"]
"""How much a comparison is worth. By construction: no run can change it. Fitted: a constant was chosen to meet it. Implied by the fit:
fitted numbers alone determine it. Prediction: it could have come out otherwise."""
ROLES: tuple[Role, ...] = get_args(Role)
"""Roles ordered from the least worth to the most."""
TableValue: TypeAlias = str | int | float | None
"""A table's entry. An empty cell is None, a plain number is a number, and anything else stays text."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    value: float | tuple[float, ...] | None
    """One number. Two numbers are a (low, high) range. More numbers are one value each, in the order of the statement. None if only an
    ordering is claimed."""
    unit: str | None


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The deviation that a verdict allows, meant for the paper's hardware. ``why`` justifies its size."""

    type: ToleranceType
    value: float | None = None
    unit: str | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The claim recomputed from the paper's other numbers. ``expr`` is plain Python arithmetic."""

    expr: str | None
    value: bool | float | tuple[float, ...] | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Claim(Checked):
    id: str
    paper: str
    kind: ClaimKind
    section: str
    statement: str
    metric: str | None
    expected: Expected
    direction: Direction
    tolerance: Tolerance
    figure: str | None
    """Id in figures.yaml of the figure or table that it belongs to."""
    conditions: str | None
    of: tuple[str | None, ...] = ()
    """The subject of each expected value, as a finding names it (``rtx4090/burst``); null if the paper does not say. For one expected
    value, all subjects for which it must hold."""
    follows: tuple[str, ...] = ()
    """Claims whose numbers imply this one; together they are one fact."""
    role: Role = "prediction"
    """How much a comparison with it is worth."""
    role_by_roofline: Role | None = None
    """The role if steps are priced by the roofline that was fitted to the paper, if it differs."""
    chosen: str | None = None
    """Our choice that was made to meet it, so that meeting it is no prediction."""
    untestable: str | None = None
    """Why no run can decide it."""
    gap: str | None = None
    """Why our number differs, if it does and as far as we know."""
    recomputed: Recomputed | None = None
    note: str | None = None
    severity: Severity | None = None
    advice: str | None = None


def load_claims(paper: str | None = None, root: Path = PAPER) -> tuple[Claim, ...]:
    """Claims of one paper, or of all."""
    papers = tuple(FOLDERS) if paper is None else (paper,)
    return tuple(claim for name in papers for claim in read_claims(root / _folder(name) / "claims.yaml", name))


def stated(paper: str, claim: str) -> float:
    """The number that a claim states."""
    (value,) = stated_together(paper, claim)
    return value


def stated_together(paper: str, claim: str) -> tuple[float, ...]:
    """All numbers that a claim states, one or several."""
    value = next(entry.expected.value for entry in load_claims(paper) if entry.id == claim)
    assert value is not None, "it states an order alone"
    return tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)


def load_figures(root: Path = PAPER) -> dict[str, dict[str, Any]]:
    """Entries of figures and tables by id. ``values`` holds the numbers that the paper prints in text or labels."""
    return {entry["id"]: entry for entry in _entries(root / "figures.yaml")}


def load_table(name: str, root: Path = PAPER) -> list[dict[str, TableValue]]:
    """Rows of a CSV by column, e.g. ``dllm_serve/table4.csv``."""
    path = root / name
    if not path.is_file():
        known = sorted(str(file.relative_to(root)) for file in root.glob("*/*.csv"))
        raise UserError(f"table {name!r} does not exist in {root}: use one of {', '.join(known)}")
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file))
    rows = []
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise UserError(f"{path}:{number} has {len(line)} cells, its header {len(header)}: fix the row")
        rows.append({column: _table_value(text) for column, text in zip(header, line, strict=True)})
    return rows


def read_claims(path: Path, paper: str) -> tuple[Claim, ...]:
    """Claims of one paper. Raises UserError for a claim of another paper and for a repeated claim."""
    claims = [_claim(raw, path) for raw in _entries(path)]
    ids: set[str] = set()
    for claim in claims:
        if claim.paper != paper or claim.id in ids:
            raise UserError(f"{path}: claim {claim.id!r} is doubled or belongs to {claim.paper!r}: fix its id or paper")
        ids.add(claim.id)
    for claim in claims:
        if unknown := [name for name in claim.follows if name not in ids or name == claim.id]:
            raise UserError(f"{path}: claim {claim.id!r} follows {unknown[0]!r}, no other claim of the file: name one")
    return tuple(claims)


def _claim(raw: Mapping[str, Any], path: Path) -> Claim:
    subject = f"{path}: claim {raw.get('id')!r}"
    recomputed: dict[str, Any] | None = raw.get("recomputed")
    try:
        expected: dict[str, Any] = raw["expected"]
        claim = Claim(
            **{
                **raw,
                "expected": Expected(**{**expected, "value": _frozen(expected["value"])}),
                "tolerance": Tolerance(**raw["tolerance"]),
                "of": tuple(raw.get("of") or ()),
                "follows": tuple(raw.get("follows") or ()),
                "recomputed": Recomputed(**{**recomputed, "value": _frozen(recomputed["value"])})
                if recomputed
                else None,
            }
        )
        check_value(ToleranceType, "tolerance.type", claim.tolerance.type)
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{subject} has a missing or unknown key ({error}): use the keys of repro.reports.paper.Claim"
        ) from error
    except UserError as error:
        raise UserError(f"{subject}: {error}") from error
    if claim.chosen is not None and claim.role == "prediction":
        raise UserError(f"{subject} has role='prediction', and what was chosen to meet it: give it role: fitted")
    return claim


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _table_value(text: str) -> TableValue:
    if not text:
        return None
    for kind in (int, float):
        # float() also reads "inf", "nan" and digits grouped by "_", which are not numbers in any table.
        if text.lstrip("+-")[:1].isdigit() and "_" not in text:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _folder(paper: str) -> str:
    if paper not in FOLDERS:
        raise UserError(f"paper={paper!r} is unknown: use one of {', '.join(FOLDERS)}")
    return FOLDERS[paper]


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = _yaml(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} must be a list of mappings")
    return entries


def _yaml(path: Path) -> Any:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: run from a complete checkout") from error
    except unreadable_yaml() as error:
        raise UserError(f"{path} is not valid YAML ({one_line(error)}): restore the file") from error


@lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """Readers share the parsed value and must not change it."""
    import yaml

    return yaml.load(text, Loader=yaml_loader())
