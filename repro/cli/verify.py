"""``repro verify-baselines``: replay golden cases, pass or fail per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import counting, print_json, print_table, say

if TYPE_CHECKING:
    from repro.checks.blocks import BlockResult
    from repro.checks.goldens import CaseResult


def verify_baselines(
    golden: Annotated[
        Path | None,
        typer.Option(help="Folder with cases.json and the checkpoints it names; by default the one that is embedded."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: opt.Json = False,
) -> None:
    """Replay recorded cases of every sampler, and of block diffusion a plain loop's. Exit code 1 if a case fails.

    Where REPRO_BLOCK_GOLDENS names the folder of block diffusion's authors' cases, those are replayed instead of the loop's.
    """
    from repro.checks.goldens import GOLDEN_DIR, one_thread, read_cases, verify

    folder = GOLDEN_DIR if golden is None else golden
    cases = read_cases(folder)
    results: list[CaseResult | BlockResult] = []
    where = str(folder)
    with one_thread(), counting("replaying", len(cases)) as advance:
        results += verify(cases, advance, device=device)
        if golden is None:
            from repro.checks.blocks import block_cases, verify_blocks

            where_blocks, blocks = block_cases()
            where = f"{where}, and {where_blocks}"
            results += verify_blocks(blocks, device=device)
    rows = [
        _row(method, [result for result in results if result.case.method == method])
        for method in sorted({result.case.method for result in results})
    ]
    if json:
        print_json({"methods": rows})
    else:
        print_table(
            f"Golden cases of {where}",
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


def _row(method: str, results: Sequence[CaseResult | BlockResult]) -> dict[str, Any]:
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


def _print_notes(results: Sequence[CaseResult | BlockResult]) -> None:
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
