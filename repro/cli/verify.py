"""``repro verify-baselines``: replay golden cases, pass or fail per method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import print_json, print_table


def verify_baselines(
    golden: Annotated[Path, typer.Option(help="Folder with cases.json and the checkpoints it names.")],
    json: opt.Json = False,
) -> None:
    """Replay recorded cases of every sampler, token by token. Exit code 1 if a case fails."""
    from repro.verification import read_cases, verify

    _, cases = read_cases(golden)
    if json:
        results = verify(golden)
    else:
        from rich.console import Console
        from rich.progress import track

        bar = iter(track(range(len(cases)), description="replaying", console=Console(stderr=True), transient=True))
        results = verify(golden, lambda: next(bar, None))
    methods = sorted({result.method for result in results})
    rows: list[dict[str, Any]] = []
    for name in methods:
        of_method = [result for result in results if result.method == name]
        firm = [result for result in of_method if not result.tie_sensitive]
        ties = [result for result in of_method if result.tie_sensitive]
        rows.append(
            {
                "method": name,
                "passed": sum(result.passed for result in firm),
                "cases": len(firm),
                "tie_sensitive_passed": sum(result.passed for result in ties),
                "tie_sensitive_cases": len(ties),
                "failed": [result.case for result in firm if not result.passed],
            }
        )
    if json:
        print_json(rows)
    else:
        print_table(
            "Golden cases",
            ("method", "verdict", "passed", "tie-sensitive passed"),
            [
                (row["method"], "pass" if not row["failed"] else "FAIL", f"{row['passed']} of {row['cases']}",
                 f"{row['tie_sensitive_passed']} of {row['tie_sensitive_cases']}")
                for row in rows
            ],
        )  # fmt: skip
        for row in rows:
            for case in row["failed"]:
                print(f"  failed: {case}")
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)
