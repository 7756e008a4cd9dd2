"""``repro claims``: every claim of a paper, what our runs say, what the comparison is worth, and a verdict."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repro.cli import options as opt
from repro.cli.output import counting, print_json, print_table, say

if TYPE_CHECKING:
    from repro.reports.claims import Flips, Judged
    from repro.reports.figures import Paper
    from repro.reports.paper import Claim
    from repro.runs.store import Store

TITLES = {
    "prediction": "predictions",
    "implied by the fit": "implied by the fit (no evidence for it)",
    "fitted": "fitted (no evidence)",
    "by construction": "by construction (no run can change them)",
    None: "nothing compared",
}
"""Headings of the counts, by role."""
IN_BRACKETS = (
    "in brackets: from the least to the most over the kernels of vLLM, SGLang and TensorRT-LLM that runs are stored of"
)
WITH_REASON = ("not reproduced", "undecided by reading", "not testable here")


def claims(
    *,
    paper: Annotated[str, typer.Option(help="dllm-serve, ampd, laps or block, or module:NAME.")] = "dllm-serve",
    reused: opt.Reused,
    out_dir: Annotated[
        Path | None, typer.Option(help="Where the CSV goes [default: results/figures, or figures in --result-dir].")
    ] = None,
    asked: opt.Charged,
    json: opt.Json = False,
) -> None:
    """Hold stored runs against every claim of a paper; runs nothing ('repro reproduce' does). What no stored runs answer is
    shown as it is committed, and marked; the CSV has your own runs alone."""
    from repro.files import readable_folder, writable_folder
    from repro.paths import figures_beside
    from repro.reports.claims import count, count_by_role, count_facts, judge_all
    from repro.reports.claims_file import as_row, read_flips, save
    from repro.reports.evidence import stored_findings
    from repro.reports.figures import paper as paper_of
    from repro.reports.paper import read_claims
    from repro.runs.store import Store

    chosen = paper_of(paper)
    stated = read_claims(chosen.claims, chosen.name)
    root = readable_folder("result_dir", reused.root)
    out = writable_folder("out_dir", out_dir or figures_beside(reused.result_dir))
    store = Store(root, accept_other_code=reused.accept_other_code, accept_other_machine=True)
    with counting("looking at stored runs, figures:") as advance:
        charged = tuple(asked.charged.items())
        findings = stored_findings(chosen.entries, store, advance, charged)
    flips = {} if charged else read_flips(chosen.name)
    judged = judge_all(stated, findings, flips)
    ranges = _over_kernels(chosen, stated, judged, store) if charged == (("cost", "composed"),) else {}
    # Committed verdicts are of steps as they are charged by default.
    committed = {} if charged else _committed(chosen, stated, flips)
    shown = [committed.get(each.claim.id, each) if each.verdict == "not run" else each for each in judged]
    borrowed = frozenset(each.claim.id for each, own in zip(shown, judged, strict=True) if each is not own)
    name = "-".join([f"claims-{chosen.name}", *(str(value) for _, value in charged)])
    path = save(out / f"{name}.csv", judged)
    if json:
        counts = {"verdicts": count(shown), "roles": count_by_role(shown), "facts": count_facts(shown)}
        rows = [{**as_row(each), "committed": each.claim.id in borrowed} for each in shown]
        for row in rows if charged else ():
            row["over_kernels"] = ranges.get(row["id"])
        print_json({"paper": chosen.name, **counts, "claims": rows})
        return
    _print(chosen.name, shown, borrowed, ranges)
    if ranges:
        say(IN_BRACKETS)
    say(f"file: {path}")
    if borrowed:
        say(
            f"committed: {len(borrowed)} verdicts of no run here, from results/{path.name}; 'make reproduce-all' makes your own"
        )
    if any(each.verdict == "not run" for each in shown):
        say("claims that were not run become answerable with 'make reproduce-all'")


def _committed(paper: Paper, stated: Sequence[Claim], flips: Flips) -> dict[str, Judged]:
    """What the repository has judged; nothing in an installed package, or of a paper of one's own."""
    from engines.errors import UserError
    from repro.paths import IS_INSTALLED, RESULTS
    from repro.reports.claims_file import judged_again, read

    path = RESULTS / f"claims-{paper.name}.csv"
    if IS_INSTALLED or not path.is_file():
        return {}
    try:
        rows = read(path)
    except UserError as error:
        say(f"committed verdicts are not shown: {error}", file=sys.stderr)
        return {}
    known = {row["id"] for row in rows}
    return {each.claim.id: each for each in judged_again([claim for claim in stated if claim.id in known], rows, flips)}


def _over_kernels(
    paper: Paper, stated: Sequence[Claim], judged: Sequence[Judged], store: Store
) -> dict[str, tuple[float, float]]:
    """The least and the most of an answer over the frameworks' kernels, by claim; where runs of another framework are stored."""
    from engines.cost.kernels import FRAMEWORKS
    from repro.reports.claims import judge_all
    from repro.reports.evidence import stored_findings

    found: dict[str, list[float]] = {}
    others = [
        judge_all(stated, stored_findings(paper.entries, store, charged=(("cost", "composed"), ("kernels", name))))
        for name in FRAMEWORKS
    ]
    for each in (each for one in (judged, *others) for each in one):
        if each.finding is not None and isinstance(each.finding.value, float):
            found.setdefault(each.claim.id, []).append(each.finding.value)
    own = {each.claim.id for each in judged if each.finding is not None and each.finding.obtained == "composed"}
    return {name: (min(values), max(values)) for name, values in found.items() if name in own and len(set(values)) > 1}


def _print(paper: str, judged: Sequence[Judged], borrowed: Set[str], ranges: Mapping[str, tuple[float, float]]) -> None:
    from repro.reports.claims import count, count_facts, facts
    from repro.reports.paper import ROLES

    for role in (*reversed(ROLES), None):
        own = [each for each in judged if each.role == role and each.claim.kind != "inconsistency"]
        if own:
            print_table(
                f"Claims of {paper}: {TITLES[role]}",
                ("claim", "states", "ours", "verdict"),
                [
                    (
                        each.claim.id,
                        _value(each.claim.expected.value, each.claim.expected.unit),
                        _ours(each) + _range(ranges.get(each.claim.id), each.claim.expected.unit),
                        f"{each.verdict} (committed)" if each.claim.id in borrowed else each.verdict,
                    )
                    for each in own
                ],
            )
    if reasons := [each for each in judged if each.verdict in WITH_REASON]:
        print_table(
            "Why not reproduced, undecided by reading, or not testable here",
            ("claim", "reason"),
            [(each.claim.id, each.reason or "-") for each in reasons],
        )
    if own := [each for each in judged if each.claim.kind == "inconsistency"]:
        print_table(
            "The paper's own inconsistencies",
            ("claim", "what does not agree", "recomputed"),
            [
                (
                    each.claim.id,
                    each.claim.statement,
                    _words(each.claim.recomputed.verdict if each.claim.recomputed else "-"),
                )
                for each in own
            ],
        )
    num_facts = sum(each.role is not None for each in facts(judged))
    say(
        f"{num_facts} facts in {sum(each.role is not None for each in judged)} comparisons: what follows from one number counts once"
    )
    for role, counts in count_facts(judged).items():
        say(f"{role}: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}")
    others = {v: n for v, n in count(judged).items() if v in ("not testable here", "not run", "paper's inconsistency")}
    say("; ".join(f"{verdict}: {number}" for verdict, number in others.items()))


def _words(verdict: str) -> str:
    """``cannot_check`` and the like, as files name it."""
    return re.sub(r"(?<=[a-z])_(?=[a-z])", " ", verdict)


def _ours(each: Judged) -> str:
    if each.finding is None:
        return "-"
    if each.claim.expected.value is None and each.finding.holds is not None:
        return "holds" if each.finding.holds else "does not hold"
    return _value(each.finding.value, each.claim.expected.unit)


def _range(found: tuple[float, float] | None, unit: str | None) -> str:
    return "" if found is None else f" [{_value(found, unit)}]"


def _value(value: float | tuple[float, ...] | None, unit: str | None) -> str:
    """``unit`` may be one for each of several values, and say in brackets of what it is."""
    if value is None:
        return "ordering"
    values = value if isinstance(value, tuple) else (value,)
    units = [each.strip() for each in re.split("[,;]", (unit or "").partition(" (")[0])]
    if len(units) == len(values):
        return ", ".join(_number(one, each) for one, each in zip(values, units, strict=True))
    if len(set(values)) == 1:
        return _number(values[0], units[0])
    *first, last = (f"{one:.4g}" for one in values)
    return (" to " if len(values) == 2 else ", ").join([*first, f"{last} {units[0]}".strip()])


def _number(value: float, unit: str) -> str:
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "rank":
        return f"rank {value:.4g}"
    if unit == "bytes":
        return f"{value / 1e9:.4g} GB"
    return f"{value:.4g} {'' if unit == 'fraction' else unit}".strip()
