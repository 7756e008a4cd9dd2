"""What runs say about a paper's claims: findings, the role of each comparison, and a verdict apart from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from repro.reports.flipped import Flip, undecided
from repro.reports.paper import Claim
from repro.runs.store import StoredRun

How = Literal["measured", "composed", "simulated", "computed"]
Role = Literal["by construction", "fitted", "implied by the fit", "prediction"]
"""What a comparison is worth. By construction: no run can change it. Fitted: a constant was chosen to meet it. Implied by
the fit: fitted numbers alone determine it. Prediction: it could have come out otherwise."""

ROLES: tuple[Role, ...] = ("by construction", "fitted", "implied by the fit", "prediction")
"""Ordered from the least worth to the most: a comparison of several values has the first of their roles."""

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
"""Ends of a range that are this many times apart say an order of magnitude, which hardly a run could miss."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim answered. ``value`` is in the claim's unit, several where the claim states or spans several;
    ``how`` names reading and runs in one sentence."""

    claim: str
    value: float | tuple[float, ...]
    obtained: How
    how: str
    of: tuple[str, ...] = ()
    """What each value is of, e.g. ``rtx4090/burst``; empty where there is nothing to tell apart."""
    holds: bool | None = None
    """Whether an ordering holds, for claims that state no number."""
    readings: tuple[tuple[str, float], ...] = ()
    """The same in other readings of what the paper leaves open: a name and the value there."""
    is_between: bool = False
    """Whether readings are points of something continuous, as a load, so that what lies between two of them is met between them."""
    fitted_elsewhere: bool = False
    """Whether what of ours was chosen to meet the claim was chosen with other runs than these, which may miss it."""
    comparable: bool = True
    """False where the runs stand for something else than the claim's (another model); ``how`` says what."""

    def __post_init__(self) -> None:
        if self.of and len(self.of) != len(self.values):
            raise ValueError(f"finding {self.claim} has {len(self.values)} values of {len(self.of)} things")

    @property
    def values(self) -> tuple[float, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finding, what it is worth, and what it rests on."""

    finding: Finding
    roles: tuple[Role, ...]
    """One per value."""
    runs: tuple[StoredRun, ...] = ()
    """Those that decide the values."""
    command: str | None = None
    """Makes the runs that are missing and answers again."""
    command_s: float | None = None
    """Processor seconds that the command took when it made all of its runs."""

    @property
    def role(self) -> Role:
        return min(self.roles, key=ROLES.index)


@dataclass(frozen=True, kw_only=True)
class Judged:
    claim: Claim
    answer: Answer | None
    verdict: Verdict
    error_percent: float | None = None
    """(ours / expected - 1), where one number is expected and met by one."""
    reason: str | None = None
    """One sentence, unless reproduced."""

    @property
    def finding(self) -> Finding | None:
        return None if self.answer is None else self.answer.finding

    @property
    def role(self) -> Role | None:
        """The answer's role; None where nothing is compared. A prediction that something of ours was chosen to meet is fitted, where
        it was chosen with such runs."""
        if self.answer is None or self.verdict not in COMPARED:
            return None
        role = self.answer.role
        chosen = self.claim.chosen is not None and not self.answer.finding.fitted_elsewhere
        return "fitted" if role == "prediction" and chosen else role


COMPARED: tuple[Verdict, ...] = ("reproduced", "not reproduced", "undecided by reading", "by construction")


Flips = Mapping[str, tuple[Flip, ...]]
"""Choices of ours that turn a verdict, by claim."""


def judge_all(claims: Sequence[Claim], answers: Iterable[Answer], flips: Flips | None = None) -> list[Judged]:
    """Judges every claim, in their order."""
    found: dict[str, list[Answer]] = {claim.id: [] for claim in claims}
    for answer in answers:
        if answer.finding.claim not in found:
            raise ValueError(f"finding for unknown claim {answer.finding.claim!r}")
        found[answer.finding.claim].append(answer)
    return with_facts([judge(claim, found[claim.id]) for claim in claims], flips)


def with_facts(judged: Sequence[Judged], flips: Flips | None = None) -> list[Judged]:
    """What a choice of ours turns is undecided by reading. What follows from a number that is not reproduced is not either: two errors may cancel, or a wider tolerance forgive one. An
    ordering can be right where the numbers are not."""
    verdicts: dict[str, Judged] = {each.claim.id: _turned(each, flips or {}) for each in judged}

    def follows_missed(each: Judged) -> str | None:
        return next((name for name in each.claim.follows if verdicts[name].verdict == "not reproduced"), None)

    def settled(each: Judged) -> Judged:
        if each.verdict != "reproduced" or each.claim.expected.value is None:
            return each
        missed = follows_missed(each)
        reason = f"{missed}, which it follows from, is not reproduced"
        return each if missed is None else replace(each, verdict="not reproduced", reason=reason)

    for _ in judged:  # as long as one follows from another that was settled
        found = {name: settled(each) for name, each in verdicts.items()}
        if found == verdicts:
            break
        verdicts = found
    return list(verdicts.values())


def _turned(each: Judged, flips: Flips) -> Judged:
    open_ = undecided(each.verdict, flips.get(each.claim.id, ()))
    return each if open_ is None else replace(each, verdict="undecided by reading", reason=open_)


def judge(claim: Claim, answers: Sequence[Answer] = ()) -> Judged:
    """Reproduced: within the claim's tolerance, for the same data sets and cards. What no run can change is never
    reproduced: it agrees by construction, or does not."""
    if claim.kind == "inconsistency":
        return Judged(claim=claim, answer=None, verdict="paper's inconsistency")
    answer = _merged(claim, answers)
    if claim.untestable is not None:
        return Judged(claim=claim, answer=answer, verdict="not testable here", reason=claim.untestable)
    if answer is None:
        return Judged(claim=claim, answer=None, verdict="not run", reason="no stored runs answer it")
    finding, stated = answer.finding, claim.expected.value
    if (
        isinstance(stated, tuple)
        and len(stated) == 2
        and 0 < WIDEST * stated[0] <= stated[1]
        and len(finding.values) == 1
    ):
        wide = f"what it states spans a factor of {stated[1] / stated[0]:.0f}, which hardly a run could miss"
        return Judged(claim=claim, answer=answer, verdict="not testable here", reason=wide)
    if not finding.comparable:
        return Judged(claim=claim, answer=answer, verdict="not testable here", reason=finding.how)
    # Where as many are there an extreme lies elsewhere, and that is a fault, not a gap.
    is_part = bool(finding.of) and len(finding.of) < len(claim.of)
    if missing := [each for each in claim.of if is_part and each is not None and each not in finding.of]:
        return Judged(claim=claim, answer=answer, verdict="not run", reason=f"no stored runs of {', '.join(missing)}")
    faults = _faults(claim, finding)
    error = _error_percent(claim, finding)
    if (open_ := _undecided(claim, finding, not faults)) is not None:
        return Judged(claim=claim, answer=answer, verdict="undecided by reading", error_percent=error, reason=open_)
    if faults:
        sentence = "; ".join([*faults[:2], *([f"and {len(faults) - 2} more"] if len(faults) > 2 else [])])
        reason = sentence if claim.gap is None else f"{sentence}: {claim.gap}"
        return Judged(claim=claim, answer=answer, verdict="not reproduced", error_percent=error, reason=reason)
    if answer.role == "by construction":
        return Judged(
            claim=claim, answer=answer, verdict="by construction", error_percent=error, reason="no run can change it"
        )
    return Judged(claim=claim, answer=answer, verdict="reproduced", error_percent=error)


def count(judged: Iterable[Judged]) -> Mapping[Verdict, int]:
    counts: dict[Verdict, int] = {}
    for each in judged:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    return counts


def count_by_role(judged: Iterable[Judged]) -> Mapping[Role, Mapping[Verdict, int]]:
    """Counts verdicts of the comparisons by role."""
    kept = list(judged)
    own = {role: count(each for each in kept if each.role == role) for role in reversed(ROLES)}
    return {role: counts for role, counts in own.items() if counts}


# -- several answers to one claim ---------------------------------------------------------------------------


def _merged(claim: Claim, answers: Sequence[Answer]) -> Answer | None:
    """The first comparable answer; all of them as one where the claim speaks of several data sets or cards and they
    are of different ones."""
    kept = [answer for answer in answers if answer.finding.comparable] or list(answers)
    if not kept:
        return None
    first, *others = kept
    if not claim.of or not first.finding.of:
        return first
    for other in others:
        if set(other.finding.of).isdisjoint(first.finding.of):
            first = _joined(first, other)
    return first


def _joined(first: Answer, second: Answer) -> Answer:
    a, b = first.finding, second.finding
    holds = None if a.holds is None or b.holds is None else a.holds and b.holds
    how = a.how if a.how == b.how else f"{a.how}; {b.how}"
    finding = Finding(
        claim=a.claim, value=a.values + b.values, obtained=a.obtained, how=how, of=a.of + b.of, holds=holds
    )
    costs = {each.command: each.command_s for each in (first, second) if each.command is not None}
    seconds = [cost for cost in costs.values() if cost is not None]
    return Answer(
        finding=finding,
        roles=first.roles + second.roles,
        runs=tuple({run.cell.key: run for run in first.runs + second.runs}.values()),
        command=" && ".join(costs) or None,
        command_s=sum(seconds) if costs and len(seconds) == len(costs) else None,
    )


# -- rules ------------------------------------------------------------------------------------------------


def _faults(claim: Claim, finding: Finding) -> list[str]:
    """Why the claim is not met, a phrase per value; none if it is."""
    expected, values = claim.expected.value, finding.values
    if expected is None:
        if finding.holds is None:
            raise ValueError(f"claim {claim.id} states no number: its finding must say whether it holds")
        return [] if finding.holds else [f"does not hold ({finding.how}: {_text(values, claim)})"]
    if isinstance(expected, tuple) and len(expected) == 2:
        return _outside_range(claim, finding, *expected)
    if isinstance(expected, tuple):
        if len(values) != len(expected):
            raise ValueError(f"claim {claim.id} states {len(expected)} values, its finding has {len(values)}")
        return _elsewhere(claim, finding) + [
            _off(claim, want, got, label)
            for want, got, label in zip(expected, values, _labels(finding), strict=True)
            if not _within(claim, want, got)
        ]
    if len(values) > 1 and len(claim.of) != len(values):
        raise ValueError(f"claim {claim.id} states one value, its finding has {len(values)}")
    return _elsewhere(claim, finding) + [
        _off(claim, expected, got, label)
        for got, label in zip(values, _labels(finding), strict=True)
        if not _within(claim, expected, got)
    ]


def _other_value(claim: Claim) -> float | None:
    """What the paper's other numbers give in place of what the claim states, where it does not follow from them."""
    if claim.kind != "stated" or claim.recomputed is None or claim.tolerance.type == "one_sided":
        return None
    value, differs = claim.recomputed.value, claim.recomputed.verdict.startswith(("disagrees", "loosely"))
    return float(value) if differs and isinstance(value, float | int) and not isinstance(value, bool) else None


def _undecided(claim: Claim, finding: Finding, is_met: bool) -> str | None:
    """Which readings meet the claim and which do not, where they differ; the paper's own other value is one of what it states."""
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
    """One value lies in the range. Of several, none lies outside it, and each end is met by the data set that it is of,
    or by the least and the largest where the paper does not say."""
    values = finding.values
    if len(values) == 1:
        met = low <= values[0] <= high or _within(claim, low, values[0]) or _within(claim, high, values[0])
        return [] if met else [_off(claim, low if values[0] < low else high, values[0], _labels(finding)[0])]
    by_label = dict(zip(finding.of, values, strict=True)) if finding.of else {}
    names = claim.of or (None, None)
    ends = [(low, names[0], min(values)), (high, names[1], max(values))]
    faults = [
        _off(claim, want, got, label)
        for want, label, extreme in ends
        if not _within(claim, want, got := extreme if label is None else by_label[label])
    ]
    for label, value in zip(_labels(finding), values, strict=True):
        end = min(max(value, low), high)
        if label not in names and not _within(claim, end, value):
            faults.append(_off(claim, end, value, label))
    return list(dict.fromkeys(faults))


def _elsewhere(claim: Claim, finding: Finding) -> list[str]:
    """Values of other data sets or cards than the claim's."""
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


def _off(claim: Claim, expected: float, value: float, label: str | None) -> str:
    unit = f" {claim.expected.unit}" if claim.expected.unit not in (None, "x", "bool", "rank") else ""
    where = f"{label} " if label else ""
    off = (
        "" if not expected else f", {100 * abs(value / expected - 1):.0f} % {'above' if value > expected else 'below'}"
    )
    return f"{where}{value:.4g} for {expected:.4g}{unit}{off} ({allowed(claim)})"


def allowed(claim: Claim) -> str:
    """The tolerance in words."""
    tolerance = claim.tolerance
    if tolerance.type == "relative":
        return f"{100 * (tolerance.value or 0):g} % allowed"
    if tolerance.type == "absolute":
        return f"{tolerance.value:g} {tolerance.unit or claim.expected.unit or ''} allowed".replace("  ", " ")
    return {"one_sided": "a bound", "ordering": "an ordering"}.get(tolerance.type, "exact")


def _labels(finding: Finding) -> tuple[str | None, ...]:
    return finding.of if len(finding.of) > 1 else (None,) * len(finding.values)


def _text(values: tuple[float, ...], claim: Claim) -> str:
    return f"{' '.join(f'{value:.3g}' for value in values)} {claim.expected.unit or ''}".strip()


def _error_percent(claim: Claim, finding: Finding) -> float | None:
    expected, value = claim.expected.value, finding.value
    if isinstance(expected, tuple) or expected is None or isinstance(value, tuple) or not expected:
        return None
    return None if claim.tolerance.type in ("one_sided", "ordering") else 100 * (value / expected - 1)
