"""Facts of a paper: claims that follow from no other one, counted by role and verdict. ``python -m repro.reports.facts`` prints the table
of all papers from the committed files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from repro.paths import RESULTS
from repro.reports.claims import COMPARED, ROLES, Judged, Role, Verdict
from repro.reports.claims_file import judged_again, read
from repro.reports.flipped import read_flips
from repro.reports.paper import FOLDERS, load_claims

VERDICTS: tuple[Verdict, ...] = ("reproduced", "not reproduced", "undecided by reading")
"""Those of a fact that could come out otherwise."""


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


def facts_table(by_paper: Mapping[str, Sequence[Judged]]) -> str:
    """Markdown: a row a paper and role."""
    lines = [f"| paper | role | {' | '.join(VERDICTS)} |", "|---|---|" + "---|" * len(VERDICTS)]
    for paper, judged in by_paper.items():
        for role, counts in count_facts(judged).items():
            lines.append(f"| {paper} | {role} | {' | '.join(str(counts.get(verdict, 0)) for verdict in VERDICTS)} |")
    return "\n".join(lines)


def committed_facts(root: Path = RESULTS) -> dict[str, list[Judged]]:
    """Every paper's committed claims, judged as they are stated now."""
    return {
        paper: judged_again(load_claims(paper), read(root / f"claims-{paper}.csv"), read_flips(paper, root))
        for paper in FOLDERS
    }


if __name__ == "__main__":
    print(facts_table(committed_facts()))
