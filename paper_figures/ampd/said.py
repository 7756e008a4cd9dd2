"""Findings about AMPD's claims: the number, how it came about, and where it misses, why."""

from __future__ import annotations

from functools import cache

from repro.reports.claims import Finding, How
from repro.reports.paper import Claim, load_claims

DEFAULT = "reading round/every/p95, 99 sessions a run"


@cache
def _claims() -> dict[str, Claim]:
    return {claim.id: claim for claim in load_claims("ampd")}


def finding(
    claim: str,
    value: float | tuple[float, ...],
    how: str,
    *,
    because: str,
    holds: bool | None = None,
    obtained: How = "simulated",
    comparable: bool = True,
) -> Finding:
    """``because`` is said where the claim is missed."""
    met = not comparable or _is_met(_claims()[claim], value, holds)
    text = how if met else f"{how}. Missed because {because}"
    return Finding(claim=claim, value=value, obtained=obtained, how=text, holds=holds, comparable=comparable)


def _is_met(claim: Claim, value: float | tuple[float, ...], holds: bool | None) -> bool:
    """Roughly: the verdict itself is not given here."""
    expected, tolerance = claim.expected.value, claim.tolerance
    if holds is not None and (expected is None or tolerance.type == "ordering"):
        return holds
    if expected is None:
        return True
    wanted = expected if isinstance(expected, tuple) else (expected,)
    got = value if isinstance(value, tuple) else (value,)
    if tolerance.type == "one_sided":
        return all(g >= w if claim.direction == "higher" else g <= w for g, w in zip(got, wanted, strict=False))
    slack = [
        (tolerance.value or 0) * (abs(w) if tolerance.type == "relative" else 1) if tolerance.value is not None else 0
        for w in wanted
    ]
    if len(got) != len(wanted):
        return min(wanted) - slack[0] <= got[0] <= max(wanted) + slack[-1]
    return all(abs(g - w) <= s for g, w, s in zip(got, wanted, slack, strict=True))
