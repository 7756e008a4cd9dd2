"""``repro check-results``: do the committed tables of runs give the committed figures and verdicts?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines.errors import UserError, require
from repro.cli import options as opt
from repro.cli.output import counted, counting, print_json, print_table, say

if TYPE_CHECKING:
    from repro.checks.documents import StaleTable
    from repro.checks.results import Checked


def check_results(
    results: Annotated[
        Path | None, typer.Option(help="Folder of reference figures by platform [default: results].")
    ] = None,
    again: Annotated[
        int | None,
        typer.Option(
            help="Instead: make this many simulated runs of the tables again, and compare their numbers.", min=1
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the runs of --again [default: 0].", min=0)] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Instead: write the verdicts on all claims as the tables give them.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Draw every committed figure from its table of runs, judge every claim, and compare each byte of numbers and words.
    Tables in documents are compared with the results.
    Takes under a minute of processor time, and makes no run without --again. Exit code 1 if anything differs."""
    from repro.checks.again import make_again
    from repro.checks.documents import stale_tables
    from repro.checks.results import check_reports
    from repro.checks.results import check_results as check_figures
    from repro.checks.results import judge as judge_claims
    from repro.files import readable_folder
    from repro.paths import IS_INSTALLED, REPO, RESULTS
    from repro.reports.run_table import tables_in

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    require(root.is_dir(), f"results={str(root)!r} does not exist: check the path")
    require(seed is None or again is not None, f"seed={seed} has no effect without --again: add it, or leave this out")
    require(not judge or again is None, "judge and again: give one of them")
    num_tables = len(tables_in(root))
    require(
        num_tables > 0, f"results={str(root)!r} holds no table of runs: give a folder like the repository's results"
    )
    if judge:
        for path in judge_claims(root):
            say(f"file: {path}")
        return
    what = f"{counted(num_tables, 'figure')} and the claims" if again is None else counted(again, "run")
    say(f"comparing {what}", file=sys.stderr)
    with counting("compared:") as advance:
        found = check_figures(root, advance) if again is None else make_again(root, again, seed or 0, advance)
        if again is None and root == RESULTS:
            found += [*check_reports(), *(_stale(each) for each in stale_tables(REPO, root))]
    if json:
        print_json({"results": [_as_json(each, root) for each in found]})
    else:
        _print_found(found, root)
    if any(each.is_fault for each in found):
        raise typer.Exit(1)


def _stale(table: StaleTable) -> Checked:
    from repro.checks.documents import COMMAND
    from repro.checks.results import Checked

    return Checked(figure="documents", path=table.document, status="differs", reason=table.reason, command=COMMAND)


def _as_json(each: Checked, root: Path) -> dict[str, Any]:
    return {
        "figure": each.figure,
        "file": _name(each.path, root),
        "status": each.status,
        "fault": each.is_fault,
        "reason": each.reason,
        "command": each.command,
    }


def _print_found(found: Sequence[Checked], root: Path) -> None:
    rows = [(each.figure, _name(each.path, root), each.status, each.reason) for each in found]
    print_table("Committed results", ("figure", "file", "status", "why"), rows)
    same, faults = (sum(each.status == status for each in found) for status in ("same", "differs"))
    say(f"{same} the same, {faults} different; {process_time():.0f} s of processor time")
    for command in dict.fromkeys(each.command for each in found if each.is_fault and each.command != "-"):
        say(command, "  ")


def _name(path: Path, root: Path) -> str:
    parent = next((each for each in (root, root.parent) if path.is_relative_to(each)), None)
    return str(path if parent is None else path.relative_to(parent))
