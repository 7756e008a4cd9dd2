"""``repro verify-baselines``: replay golden cases, pass or fail per method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import counting, print_json, print_table, say

if TYPE_CHECKING:
    from repro.checks.goldens import CaseResult


def verify_baselines(
    golden: Annotated[
        Path | None,
        typer.Option(help="Folder with cases.json and the checkpoints it names; by default the one that is embedded."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: opt.Json = False,
) -> None:
    """Replay recorded cases of every sampler, token by token. Exit code 1 if a case fails."""
    from repro.checks.goldens import GOLDEN_DIR, read_cases, verify

    folder = GOLDEN_DIR if golden is None else golden
    cases = read_cases(folder)
    if json:
        results = verify(cases, device=device)
    else:
        with counting("replaying", len(cases)) as advance:
            results = verify(cases, advance, device=device)
    rows = [
        _row(method, [result for result in results if result.case.method == method])
        for method in sorted({case.method for case in cases})
    ]
    if json:
        print_json({"methods": rows})
    else:
        print_table(
            f"Golden cases of {folder}",
            ("method", "verdict", "passed", "tie-sensitive passed"),
            [
                (row["method"], row["verdict"], f"{row['passed']} of {row['cases']}", ties)
                for row in rows
                for num in [row["tie_sensitive_cases"]]
                for ties in [f"{row['tie_sensitive_passed']} of {num}" if num else "-"]
            ],
        )
        _print_notes(results)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _row(method: str, results: list[CaseResult]) -> dict[str, Any]:
    firm = [result for result in results if result.case.required and not result.case.tie_sensitive]
    ties = [result for result in results if result.case.tie_sensitive]
    failed = {result.case.id: result.difference for result in results if result.case.required and not result.passed}
    return {
        "method": method,
        "verdict": "FAIL" if failed else "pass",
        "passed": sum(result.passed for result in firm),
        "cases": len(firm),
        "tie_sensitive_passed": sum(result.passed for result in ties),
        "tie_sensitive_cases": len(ties),
        "not_required": sum(not result.case.required for result in results),
        "failed": failed,
    }


def _print_notes(results: list[CaseResult]) -> None:
    for result in results:
        if result.case.required and not result.passed:
            say(f"  failed: {result.case.id}: {result.difference}")
    required = [result for result in results if result.case.required]
    say(f"{sum(result.passed for result in required)} of {len(required)} required cases pass.")
    if len(required) < len(results):
        say(
            f"{len(results) - len(required)} are not required: a library's order of equal values, or a defect of the "
            f"recorded code, decides their ids."
        )
