"""The papers' own numbers (results/paper), read strictly: claims, figure entries and tables. Also what runs make of a claim: findings, a
verdict on each claim, and which claims are separate facts."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    return tuple(claim for name in papers for claim in read_claims(root / FOLDERS[name] / "claims.yaml", name))


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
    with (root / name).open(encoding="utf-8", newline="") as file:
        return [{column: _table_value(text) for column, text in row.items()} for row in csv.DictReader(file)]


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
            f"{subject} has a missing or unknown key ({error}): use the keys of repro.reports.claims.Claim"
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


How = Literal["measured", "composed", "simulated", "computed"]

Verdict = Literal[
    "reproduced",
    "not reproduced",
    "undecided by reading",
    "by construction",
    "not testable here",
    "not run",
    "paper's inconsistency",
]
WIDEST = 10.0
"""If the ends of a range are this many times apart, it states only an order of magnitude, which hardly any run could miss."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one claim. ``value`` is in the claim's unit; it holds several values if the claim states or spans several. ``how``
    names the reading and the runs in one sentence."""

    claim: str
    value: float | tuple[float, ...]
    obtained: How
    how: str
    of: tuple[str, ...] = ()
    """The subject of each value, e.g. ``rtx4090/burst``; empty if there is only one."""
    holds: bool | None = None
    """Whether an ordering holds, for claims that state no number."""
    readings: tuple[tuple[str, float], ...] = ()
    """Values in other readings of what the paper leaves open: (name of the reading, value)."""
    place: str = ""
    """The card of this finding, if the paper does not say which card it measured on. The first finding has the first card."""
    is_between: bool = False
    """Whether readings are points on a continuous scale, such as load. A claim between two of them then counts as met between them."""
    comparable: bool = True
    """False if the runs do not match the claim's setting (such as another model); ``how`` says how."""
    command: str | None = None
    """The command that makes the runs behind it."""

    def __post_init__(self) -> None:
        if self.of and len(self.of) != len(self.values):
            raise ValueError(f"finding {self.claim} has {len(self.values)} values of {len(self.of)} things")

    @property
    def values(self) -> tuple[float, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)


@dataclass(frozen=True, kw_only=True)
class Judged:
    claim: Claim
    finding: Finding | None
    verdict: Verdict
    error_percent: float | None = None
    """100 * (ours / expected - 1), if the claim and the finding have one number each."""
    reason: str | None = None
    """One sentence that gives the reason, unless reproduced."""

    @property
    def role(self) -> Role | None:
        """The role of the comparison; None if nothing is compared."""
        return None if self.finding is None or self.verdict not in COMPARED else _role(self.claim, self.finding)


def _role(claim: Claim, finding: Finding) -> Role:
    """The claim's role. With steps priced by the fitted roofline it may differ, because numbers of the paper were fitted."""
    return claim.role_by_roofline if finding.obtained == "simulated" and claim.role_by_roofline else claim.role


COMPARED: tuple[Verdict, ...] = ("reproduced", "not reproduced", "undecided by reading", "by construction")


FlipKind = Literal["free", "reading"]
"""free: a setting of a system that no source prints; reading: something that the paper leaves open about what it measured."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One of our choices that changes a claim's verdict: a row of ``results/flips-PAPER.csv``."""

    kind: FlipKind
    change: str
    claim: str
    default: str
    changed: str
    default_value: str
    changed_value: str


Flips = Mapping[str, tuple[Flip, ...]]
"""Our choices that change a verdict, by claim."""
_OPPOSITE: Mapping[str, str] = {"reproduced": "not reproduced", "not reproduced": "reproduced"}


def judge_all(claims: Sequence[Claim], findings: Iterable[Finding], flips: Flips | None = None) -> list[Judged]:
    """Judges every claim, in their order.

    A claim is undecided by reading if a choice of ours reverses its verdict. A number that follows from one that is not reproduced is not
    reproduced either. Two errors may cancel, or a wider tolerance forgive one. An ordering can be right although numbers are not."""
    by_claim: dict[str, list[Finding]] = {claim.id: [] for claim in claims}
    for finding in findings:
        if finding.claim not in by_claim:
            raise ValueError(f"finding for unknown claim {finding.claim!r}")
        by_claim[finding.claim].append(finding)
    judged = [_judged_by_place(claim, by_claim[claim.id]) for claim in claims]
    verdicts: dict[str, Judged] = {each.claim.id: _after_flips(each, flips or {}) for each in judged}

    def after_flips(judged: Judged) -> Judged:
        if judged.verdict != "reproduced" or judged.claim.expected.value is None:
            return judged
        missed = next((name for name in judged.claim.follows if verdicts[name].verdict == "not reproduced"), None)
        reason = f"{missed}, which it follows from, is not reproduced"
        return judged if missed is None else replace(judged, verdict="not reproduced", reason=reason)

    for _ in judged:  # as long as one follows from another that was settled
        updated = {name: after_flips(each) for name, each in verdicts.items()}
        if updated == verdicts:
            break
        verdicts = updated
    return list(verdicts.values())


def _after_flips(judged: Judged, flips: Flips) -> Judged:
    """Undecided if one of our choices reverses the verdict. A flip is ignored if its own, fewer runs gave another default verdict."""
    opposite = _OPPOSITE.get(judged.verdict)
    turning = [
        flip for flip in flips.get(judged.claim.id, ()) if flip.default == judged.verdict and flip.changed == opposite
    ]
    if not turning:
        return judged
    texts = ", ".join(f"{flip.change} ({flip.changed_value})" for flip in turning)
    holds = judged.verdict == "reproduced"
    reason = f"holds by default; not with {texts}" if holds else f"holds with {texts}; not by default"
    return replace(judged, verdict="undecided by reading", reason=reason)


def _judged_by_place(claim: Claim, findings: Sequence[Finding]) -> Judged:
    """Undecided if findings of other places, which the paper leaves open, get another verdict."""
    by_place: dict[str, list[Finding]] = {}
    for finding in findings:
        by_place.setdefault(finding.place, []).append(finding)
    first, *others = [judge(claim, group) for group in by_place.values()] or [judge(claim)]
    places = dict(zip(by_place, (first, *others), strict=False))
    if not others or first.finding is None:
        return first
    scalars = {place: each.finding.value for place, each in places.items() if each.finding is not None}
    readings = tuple((place, value) for place, value in scalars.items() if isinstance(value, float))
    merged = judge(claim, [replace(first.finding, readings=(*first.finding.readings, *readings))])
    if merged.verdict != first.verdict or all(each.verdict != _OPPOSITE.get(first.verdict) for each in others):
        return merged
    holds, fails = (
        ", ".join(place for place, each in places.items() if (each.verdict == "reproduced") == is_met)
        for is_met in (True, False)
    )
    return replace(merged, verdict="undecided by reading", reason=f"holds with {holds}; not with {fails}")


def judge(claim: Claim, findings: Sequence[Finding] = ()) -> Judged:
    """Judge one claim. Reproduced means within its tolerance, for the same data sets and cards. A claim that no run can change is never
    reproduced: it agrees by construction, or it does not."""
    finding = None if claim.kind == "inconsistency" else _merged(claim, findings)

    def result(verdict: Verdict, reason: str | None = None, error: float | None = None) -> Judged:
        return Judged(claim=claim, finding=finding, verdict=verdict, error_percent=error, reason=reason)

    if claim.kind == "inconsistency":
        return result("paper's inconsistency")
    if claim.untestable is not None:
        return result("not testable here", claim.untestable)
    if finding is None:
        return result("not run", "no stored runs answer it")
    match claim.expected.value:
        case (low, high) if 0 < WIDEST * low <= high and len(finding.values) == 1:
            wide = f"what it states spans a factor of {high / low:.0f}, which hardly a run could miss"
            return result("not testable here", wide)
    if not finding.comparable:
        return result("not testable here", finding.how)
    # With as many values as the claim has, a differing label is a fault (an extreme lies elsewhere), not a gap.
    is_part = bool(finding.of) and len(finding.of) < len(claim.of)
    if missing := [each for each in claim.of if is_part and each is not None and each not in finding.of]:
        return result("not run", f"no stored runs of {', '.join(missing)}")
    faults = _faults(claim, finding)
    error = _error_percent(claim, finding)
    if (undecided := _undecided(claim, finding, not faults)) is not None:
        return result("undecided by reading", undecided, error)
    if faults:
        sentence = "; ".join([*faults[:2], *([f"and {len(faults) - 2} more"] if len(faults) > 2 else [])])
        return result("not reproduced", sentence if claim.gap is None else f"{sentence}: {claim.gap}", error)
    if _role(claim, finding) == "by construction":
        return result("by construction", "no run can change it", error)
    return result("reproduced", error=error)


def count(judged: Iterable[Judged]) -> Mapping[Verdict, int]:
    return Counter(each.verdict for each in judged)


def count_by_role(judged: Iterable[Judged]) -> Mapping[Role, Mapping[Verdict, int]]:
    judgements = list(judged)
    by_role = {role: count(each for each in judgements if each.role == role) for role in reversed(ROLES)}
    return {role: counts for role, counts in by_role.items() if counts}


def facts(judged: Iterable[Judged]) -> list[Judged]:
    """The claims without those that follow from another one, so that each fact counts once."""
    return [each for each in judged if not each.claim.follows and each.claim.kind != "inconsistency"]


def count_facts(judged: Sequence[Judged]) -> Mapping[Role, Mapping[Verdict, int]]:
    """Numbers of compared facts by role and verdict. Agreement by construction counts as reproduced here."""
    return count_by_role(
        replace(each, verdict="reproduced") if each.verdict == "by construction" else each for each in facts(judged)
    )


# -- several findings of one claim ---------------------------------------------------------------------------


def _merged(claim: Claim, findings: Sequence[Finding]) -> Finding | None:
    """The first comparable finding. If the claim covers several data sets or cards, findings of different ones are joined."""
    usable = [finding for finding in findings if finding.comparable] or list(findings)
    if not usable:
        return None
    first, *others = usable
    if not claim.of or not first.of:
        return first
    for other in others:
        if set(other.of).isdisjoint(first.of):
            first = _joined(first, other)
    return first


def _joined(a: Finding, b: Finding) -> Finding:
    commands = dict.fromkeys(finding.command for finding in (a, b) if finding.command is not None)
    return Finding(
        claim=a.claim,
        value=a.values + b.values,
        obtained=a.obtained,
        how=a.how if a.how == b.how else f"{a.how}; {b.how}",
        of=a.of + b.of,
        holds=None if a.holds is None or b.holds is None else a.holds and b.holds,
        command=" && ".join(commands) or None,
    )


# -- rules ------------------------------------------------------------------------------------------------


def _faults(claim: Claim, finding: Finding) -> list[str]:
    """Why the claim is not met, a phrase per value; empty if it is met."""
    expected, values = claim.expected.value, finding.values
    if expected is None:
        if finding.holds is None:
            raise ValueError(f"claim {claim.id} states no number: its finding must say whether it holds")
        return [] if finding.holds else [f"does not hold ({finding.how}: {_values_text(values, claim)})"]
    if isinstance(expected, tuple) and len(expected) == 2:
        return _outside_range(claim, finding, *expected)
    if isinstance(expected, tuple):
        if len(values) != len(expected):
            raise ValueError(f"claim {claim.id} states {len(expected)} values, its finding has {len(values)}")
        return _subject_faults(claim, finding) + [
            _deviation_text(claim, want, got, label)
            for want, got, label in zip(expected, values, _labels(finding), strict=True)
            if not _within(claim, want, got)
        ]
    if len(values) > 1 and len(claim.of) != len(values):
        raise ValueError(f"claim {claim.id} states one value, its finding has {len(values)}")
    return _subject_faults(claim, finding) + [
        _deviation_text(claim, expected, got, label)
        for got, label in zip(values, _labels(finding), strict=True)
        if not _within(claim, expected, got)
    ]


def _other_value(claim: Claim) -> float | None:
    """The value that the paper's other numbers give for this claim, if it differs from the stated one; else None."""
    if claim.kind != "stated" or claim.recomputed is None or claim.tolerance.type == "one_sided":
        return None
    value, differs = claim.recomputed.value, claim.recomputed.verdict.startswith(("disagrees", "loosely"))
    return float(value) if differs and isinstance(value, float | int) and not isinstance(value, bool) else None


def _undecided(claim: Claim, finding: Finding, is_met: bool) -> str | None:
    """Which readings meet the claim and which do not, if they differ. The value from the paper's other numbers counts as one."""
    stated, other = claim.expected.value, _other_value(claim)
    if other is not None and len(finding.values) == 1 and _within(claim, other, finding.values[0]) != is_met:
        return (
            f"{finding.values[0]:.4g} {'does not meet' if is_met else 'meets'} {other:.4g}, which the paper's other numbers give, "
            f"and {'meets' if is_met else 'does not meet'} what it states"
        )
    if not finding.readings or isinstance(stated, tuple) or stated is None:
        return None
    met = [name for name, value in finding.readings if _within(claim, stated, value)]
    others = [name for name, value in finding.readings if name not in met]
    texts = {name: f"{name} {value:.4g}" for name, value in finding.readings}
    values = [*finding.values, *(value for _, value in finding.readings)]
    if not met and not is_met and finding.is_between and min(values) < stated < max(values):
        return f"met between readings ({', '.join(texts.values())}), in none of them"
    if met if not is_met else others:
        holds, fails = (", ".join(texts[name] for name in part) or "the default" for part in (met, others))
        return f"holds with {holds}; not with {fails}"
    return None


def _outside_range(claim: Claim, finding: Finding, low: float, high: float) -> list[str]:
    """A single value must lie in the range. Several values must all lie in it, and each end must be met. The value that meets an end is
    that of the end's data set, or the least or largest if the paper does not say."""
    values = finding.values
    if len(values) == 1:
        met = low <= values[0] <= high or _within(claim, low, values[0]) or _within(claim, high, values[0])
        return [] if met else [_deviation_text(claim, low if values[0] < low else high, values[0], _labels(finding)[0])]
    by_label = dict(zip(finding.of, values, strict=True)) if finding.of else {}
    names = claim.of or (None, None)
    ends = [(low, names[0], min(values)), (high, names[1], max(values))]
    faults = [
        _deviation_text(claim, want, got, label)
        for want, label, extreme in ends
        if not _within(claim, want, got := extreme if label is None else by_label[label])
    ]
    for label, value in zip(_labels(finding), values, strict=True):
        end = min(max(value, low), high)
        if label not in names and not _within(claim, end, value):
            faults.append(_deviation_text(claim, end, value, label))
    return list(dict.fromkeys(faults))


def _subject_faults(claim: Claim, finding: Finding) -> list[str]:
    """A fault if the values belong to other data sets or cards than the claim's."""
    if not claim.of or not finding.of or set(finding.of) == set(claim.of):
        return []
    return [f"of {', '.join(finding.of)}, the claim of {', '.join(map(str, claim.of))}"]


def _within(claim: Claim, expected: float, value: float) -> bool:
    tolerance = claim.tolerance
    if tolerance.type == "one_sided":
        return value >= expected if claim.direction == "higher" else value <= expected
    if tolerance.type == "relative":
        return abs(value - expected) <= (tolerance.value or 0) * abs(expected)
    if tolerance.type == "absolute":
        return abs(value - expected) <= (tolerance.value or 0)
    return value == expected


def _deviation_text(claim: Claim, expected: float, value: float, label: str | None) -> str:
    unit = f" {claim.expected.unit}" if claim.expected.unit not in (None, "x", "bool", "rank") else ""
    prefix = f"{label} " if label else ""
    deviation = (
        "" if not expected else f", {100 * abs(value / expected - 1):.0f} % {'above' if value > expected else 'below'}"
    )
    return f"{prefix}{value:.4g} for {expected:.4g}{unit}{deviation} ({tolerance(claim)})"


def tolerance(claim: Claim) -> str:
    """The tolerance in words."""
    tolerance = claim.tolerance
    if tolerance.type == "relative":
        return f"{100 * (tolerance.value or 0):g} % allowed"
    if tolerance.type == "absolute":
        return f"{tolerance.value:g} {tolerance.unit or claim.expected.unit or ''} allowed".replace("  ", " ")
    return {"one_sided": "a bound", "ordering": "an ordering"}.get(tolerance.type, "exact")


def _labels(finding: Finding) -> tuple[str | None, ...]:
    return finding.of if len(finding.of) > 1 else (None,) * len(finding.values)


def _values_text(values: tuple[float, ...], claim: Claim) -> str:
    return f"{' '.join(f'{value:.3g}' for value in values)} {claim.expected.unit or ''}".strip()


def _error_percent(claim: Claim, finding: Finding) -> float | None:
    expected, value = claim.expected.value, finding.value
    if isinstance(expected, tuple) or expected is None or isinstance(value, tuple) or not expected:
        return None
    return None if claim.tolerance.type in ("one_sided", "ordering") else 100 * (value / expected - 1)
