"""Facts of a paper: claims that follow from no other one, counted by role and verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from repro.reports.claims import COMPARED, ROLES, Judged, Role, Verdict


def facts(judged: Iterable[Judged]) -> list[Judged]:
    """One claim each of those that say the same number: the one that the others follow from."""
    return [each for each in judged if not each.claim.follows and each.claim.kind != "inconsistency"]


def count_facts(judged: Sequence[Judged]) -> Mapping[Role, Mapping[Verdict, int]]:
    """Compared facts by role and verdict; what agrees by construction counts as reproduced there."""
    counts: dict[Role, dict[Verdict, int]] = {}
    for each in facts(judged):
        if each.role is not None and each.verdict in COMPARED:
            own = counts.setdefault(each.role, {})
            verdict: Verdict = "reproduced" if each.verdict == "by construction" else each.verdict
            own[verdict] = own.get(verdict, 0) + 1
    return {role: counts[role] for role in reversed(ROLES) if role in counts}
