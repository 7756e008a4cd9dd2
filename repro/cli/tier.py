"""``repro reproduce --tier``: run commands of the artifact guide one after the other, and compare the results with the committed ones."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from engines.errors import RunError, UserError
from repro.cli.output import print_json, print_table, say
from repro.files import replace_text, writable_folder
from repro.paths import IS_INSTALLED, LOCAL, RESULTS, figures_beside
from repro.reports.artifact import (
    Cost,
    TierName,
    commands,
    committed,
    costs_csv,
    output_of,
    read_costs,
    spend,
    time_text,
)
from repro.reports.claims import Judged, judge_all, read_claims
from repro.reports.claims_file import our_text, read_flips
from repro.reports.evidence import stored_findings
from repro.reports.figures import PAPERS, figure
from repro.runs.store import Store

SAME = 1e-6
"""Relative difference up to which numbers count as the same, as processors differ in the last digits."""


def run_tier(tier: TierName, result_dir: Path | None, jobs: int | None, *, force: bool, json: bool) -> None:
    if IS_INSTALLED:
        raise UserError(
            f"tier={tier!r} compares with the committed results of a checkout: clone the repository, and run it there"
        )
    folder = writable_folder("result_dir", figures_beside(result_dir))
    known_costs, selected = read_costs(RESULTS / "costs.csv"), [*commands(tier)]
    total_s = sum(known_costs[command].processor_s for command in selected if command in known_costs)
    say(f"tier {tier}: {len(selected)} commands, {time_text(total_s)} of one core", file=sys.stderr)
    costs, failed = [], {}
    for index, command in enumerate(selected, start=1):
        say(f"{index} of {len(selected)}: {command}", file=sys.stderr)
        try:
            costs.append(spend(command, *_command_options(command, result_dir, jobs, force=force)))
        except RunError as error:
            failed[command] = str(error)
    file = replace_text(folder / f"tier-{tier}.csv", costs_csv(costs))
    rows = _claim_rows(selected, Store(result_dir or LOCAL, accept_other_machine=True))
    differing = [row for row in rows if not row["same"]]
    if json:
        print_json(
            {
                "tier": tier,
                "costs": [asdict(cost) for cost in costs],
                "failed": failed,
                "claims": rows,
                "file": str(file),
            }
        )
    else:
        _print(costs, failed, rows)
        say(f"file: {file}")
    if failed or any(not row["measured"] for row in differing):
        raise typer.Exit(1)


def _command_options(command: str, result_dir: Path | None, jobs: int | None, *, force: bool) -> list[str]:
    """The user's options that this command takes."""
    name, *words = command.split()[1:]
    folder = [] if result_dir is None else ["--result-dir", str(result_dir)]
    if name not in ("reproduce", "claims"):
        return []
    if name == "claims" or words[0] == "truth":
        return folder
    return [*folder, *([] if jobs is None else ["--jobs", str(jobs)]), *(["--force"] if force else [])]


def _claim_rows(chosen: Sequence[str], store: Store) -> list[dict[str, Any]]:
    """Return a row for each claim that the commands answer, with our verdict and the committed one."""
    wanted = {each.claim.id: each for command, each in committed() if command and {*command.split(" && ")} <= {*chosen}}
    figures = {
        figure(words[2]).name
        for command in chosen
        if (words := command.split())[1] == "reproduce" and words[2] != "truth"
    }
    rows = []
    for paper in PAPERS.values():
        entries = [
            entry for entry in paper.entries if entry.name in figures or f"repro claims --paper {paper.name}" in chosen
        ]
        findings = stored_findings(entries, store)
        for result in judge_all(read_claims(paper.claims, paper.name), findings, read_flips(paper.name)):
            if (reference := wanted.get(result.claim.id)) is not None:
                rows.append(_row(paper.name, result, reference))
    return rows


def _row(paper: str, ours: Judged, theirs: Judged) -> dict[str, Any]:
    is_measured = theirs.finding is not None and theirs.finding.obtained == "measured"
    pairs = [side.finding.values if side.finding is not None else () for side in (ours, theirs)]
    is_same = len(pairs[0]) == len(pairs[1]) and all(
        math.isclose(*pair, rel_tol=SAME, abs_tol=1e-12) for pair in zip(*pairs, strict=True)
    )
    return {
        "paper": paper,
        "claim": ours.claim.id,
        "ours": our_text(ours),
        "committed": our_text(theirs),
        "verdict": ours.verdict,
        "committed_verdict": theirs.verdict,
        "measured": is_measured,
        "same": ours.verdict == theirs.verdict and (is_same or is_measured),
    }


def _print(costs: Sequence[Cost], failed: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "What ran",
        ("command", "took", "one core", "MB", "writes"),
        [
            (
                cost.command,
                time_text(cost.wall_s),
                time_text(cost.processor_s),
                f"{cost.memory_bytes / 1e6:.0f}",
                output_of(cost.command)[1] or "-",
            )
            for cost in costs
        ],
    )
    for error in failed.values():
        say(f"failed: {error}")
    if differing := [row for row in rows if not row["same"]]:
        columns = ("claim", "ours", "committed", "verdict", "committed_verdict")
        print_table(
            "Claims that came out otherwise", columns, [tuple(str(row[name]) for name in columns) for row in differing]
        )
    say(
        f"claims: {len(rows)} compared, {len(rows) - len(differing)} as committed, {len(differing)} otherwise (of these {sum(row['measured'] for row in differing)} measured)"
    )
