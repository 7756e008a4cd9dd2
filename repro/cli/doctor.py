"""``repro doctor``: what this machine can run, and why not the rest."""

from __future__ import annotations

from dataclasses import asdict

from repro.cli import options as opt
from repro.cli.output import print_json, print_table


def doctor(json: opt.Json = False) -> None:
    """What this machine can run, and why not."""
    from repro.checks.doctor import examine

    report = examine()
    if json:
        print_json({"items": [asdict(row) for row in report]})
    else:
        print_table("This machine", ("item", "status", "detail"), [(r.item, r.status, r.detail) for r in report])
