"""``repro check-results``: are the committed figures those of today's code, calibration and data?"""

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
    accept: Annotated[
        bool, typer.Option("--accept", help="With --again: note which code gives the same numbers.")
    ] = False,
    again: Annotated[
        int | None,
        typer.Option(
            help="Make this many simulated runs again for each code that made them, and from stored runs what other code drew; compare.",
            min=1,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the runs of --again [default: 0].", min=0)] = None,
    result_dir: opt.ResultDir = None,
    json: opt.Json = False,
) -> None:
    """Compare every committed figure, calibration report and claim with what they would be made from today. That is data,
    settings, code, also the code that draws, and the papers' numbers; tables in documents are held against it. About a minute of
    processor time, said before and at the end; no run is made without --again. Exit code 1 if one has to be made again."""
    from repro.checks.again import make_again
    from repro.checks.answers import check_claims, check_flips, check_reports
    from repro.checks.documents import stale_tables
    from repro.checks.held import Held, read_held, save_held
    from repro.checks.results import Today
    from repro.checks.results import check_results as check_figures
    from repro.files import readable_folder
    from repro.paths import IS_INSTALLED, LOCAL, REPO, RESULTS

    if results is None and IS_INSTALLED:
        raise UserError("results: an installed package brings no figures: name a folder of them with --results")
    root = readable_folder("results", results or RESULTS)
    _check_options(root, again, seed=seed, result_dir=result_dir)
    is_anew = accept
    require(not accept or again is not None, "accept=True has no effect without --again: add it, or leave this out")
    _say_what_is_compared(root, again)
    with counting("comparing, runs:") as advance:
        today = Today(advance, Held() if is_anew else read_held(root))
        differing = [] if again is None else make_again(root, today, result_dir or LOCAL, again, seed or 0, advance)
        found = [*check_figures(root, today), *check_claims(root, today), *check_flips(root, today.held)]
        if root == RESULTS:
            found += [*check_reports(today), *(_stale(each) for each in stale_tables(REPO, root))]
    found = [*differing, *(each for each in found if each.path not in {other.path for other in differing})]
    if is_anew:
        save_held(root, today.held)
    if json:
        print_json({"figures": [_as_json(each, root) for each in found]})
    else:
        _print_found(found, root)
    if any(each.is_fault for each in found):
        raise typer.Exit(1)


def _stale(table: StaleTable) -> Checked:
    from repro.checks.documents import COMMAND
    from repro.checks.results import Checked

    return Checked(
        figure="documents", path=table.document, status="stale", is_measured=False, reason=table.reason, command=COMMAND
    )


def _check_options(root: Path, again: int | None, **others: int | Path | None) -> None:
    require(root.is_dir(), f"results={str(root)!r} does not exist: check the path")
    for name, value in others.items():
        require(
            value is None or again is not None,
            f"{name}={str(value)!r} has no effect without --again: add it, or leave this out",
        )


def _say_what_is_compared(root: Path, again: int | None) -> None:
    from repro.checks.results import figures as figures_of

    figures = sum(1 for _ in figures_of(root))
    require(
        figures > 0 or any(root.glob("claims-*.csv")),
        f"results={str(root)!r} holds no figure and no claims: give a folder like the repository's results",
    )
    more = "" if again is None else ", and more for runs that are made again"
    what = f"{counted(figures, 'figure')} and the claims"
    say(f"comparing {what}: about a minute of processor time{more}", file=sys.stderr)


def _as_json(each: Checked, root: Path) -> dict[str, Any]:
    return {
        "figure": each.figure,
        "file": _name(each.path, root),
        "status": each.status,
        "measured": each.is_measured,
        "fault": each.is_fault,
        "reason": each.reason,
        "command": each.command,
    }


def _print_found(found: Sequence[Checked], root: Path) -> None:
    rows = [(_name(each.path, root), _obtained(each), each.status, each.reason) for each in found]
    print_table("Committed results", ("file", "obtained", "status", "why"), rows)
    commands = list(dict.fromkeys(each.command for each in found if each.is_fault and each.command != "-"))
    faults = sum(each.is_fault for each in found)
    say(f"{counted(len(found), 'result')}, {faults} to be made again; {process_time():.0f} s of processor time")
    for command in commands:
        say(command, "  ")


def _obtained(each: Checked) -> str:
    if each.status == "no stamp" or each.figure == "documents":
        return "-"
    return "measured" if each.is_measured else "simulated"


def _name(path: Path, root: Path) -> str:
    parent = next((each for each in (root, root.parent) if path.is_relative_to(each)), None)
    return str(path if parent is None else path.relative_to(parent))
