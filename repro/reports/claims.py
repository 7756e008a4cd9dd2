"""What runs say about a paper's claims, and the verdict on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from repro.reports.paper import Claim

How = Literal["measured", "simulated", "computed"]
Verdict = Literal[
    "reproduced", "partly (trend holds)", "not reproduced", "not run", "not comparable", "paper's inconsistency"
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim answered. ``value`` is in the claim's unit, several where the claim states several;
    ``how`` names platform, reading and runs in one sentence."""

    claim: str
    value: float | tuple[float, ...]
    obtained: How
    how: str
    holds: bool | None = None
    """Whether an ordering holds, for claims that state no number."""
    comparable: bool = True
    """False where the runs stand for something else than the claim's (another model); ``how`` says what."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    claim: Claim
    finding: Finding | None
    verdict: Verdict
    error_percent: float | None
    """(ours / expected - 1), where one number is expected and met by one."""


def judge(claim: Claim, finding: Finding | None) -> Judged:
    """Reproduced: within the claim's tolerance. Partly: outside it, but the comparison that the claim
    makes goes the same way. The tolerance is meant for the paper's hardware."""
    error = None if finding is None else _error_percent(claim, finding)
    return Judged(claim=claim, finding=finding, verdict=_verdict(claim, finding), error_percent=error)


def judge_all(claims: Sequence[Claim], findings: Iterable[Finding]) -> list[Judged]:
    """In the claims' order. Where several figures answer a claim, the first comparable one counts."""
    answers: dict[str, Finding] = {}
    for finding in findings:
        if finding.claim not in answers or (finding.comparable and not answers[finding.claim].comparable):
            answers[finding.claim] = finding
    known = {claim.id for claim in claims}
    if unknown := sorted(answers.keys() - known):
        raise ValueError(f"finding for unknown claim {unknown[0]!r}")
    return [judge(claim, answers.get(claim.id)) for claim in claims]


def count(judged: Iterable[Judged]) -> Mapping[Verdict, int]:
    counts: dict[Verdict, int] = {}
    for each in judged:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    return counts


def _verdict(claim: Claim, finding: Finding | None) -> Verdict:
    if claim.kind == "inconsistency":
        return "paper's inconsistency"
    if finding is None:
        return "not run"
    if not finding.comparable:
        return "not comparable"
    if claim.expected.value is None:
        if finding.holds is None:
            raise ValueError(f"claim {claim.id} states no number: its finding must say whether it holds")
        return "reproduced" if finding.holds else "not reproduced"
    if _meets(claim, finding):
        return "reproduced"
    return "partly (trend holds)" if _trend_holds(claim, finding) else "not reproduced"


def _meets(claim: Claim, finding: Finding) -> bool:
    expected, value = claim.expected.value, finding.value
    assert expected is not None
    if isinstance(expected, tuple):
        if isinstance(value, tuple):
            if len(value) != len(expected):
                raise ValueError(f"claim {claim.id} states {len(expected)} values, its finding has {len(value)}")
            return all(_within(claim, want, got) for want, got in zip(expected, value, strict=True))
        low, high = expected
        return low <= value <= high or _within(claim, low, value) or _within(claim, high, value)
    if isinstance(value, tuple):
        raise ValueError(f"claim {claim.id} states one value, its finding has {len(value)}")
    return _within(claim, expected, value)


def _within(claim: Claim, expected: float, value: float) -> bool:
    tolerance = claim.tolerance
    if tolerance.type == "one_sided":
        return value >= expected if claim.direction == "higher" else value <= expected
    if tolerance.type == "relative":
        return abs(value - expected) <= (tolerance.value or 0) * abs(expected)
    if tolerance.type == "absolute":
        return abs(value - expected) <= (tolerance.value or 0)
    return value == expected


def _trend_holds(claim: Claim, finding: Finding) -> bool:
    """Only comparisons have a trend: a ratio lies on the claimed side of 1, a reduction or gain is one."""
    if finding.holds is not None:
        return finding.holds
    values = finding.value if isinstance(finding.value, tuple) else (finding.value,)
    if claim.direction == "equal":
        return False
    if claim.expected.unit == "x":
        return all(value > 1 for value in values)
    if claim.expected.unit in ("%", "pp"):
        return all(value > 0 for value in values)
    return False


def _error_percent(claim: Claim, finding: Finding) -> float | None:
    expected, value = claim.expected.value, finding.value
    if isinstance(expected, tuple) or expected is None or isinstance(value, tuple) or not expected:
        return None
    return None if claim.tolerance.type in ("one_sided", "ordering") else 100 * (value / expected - 1)
