"""``repro calibrate``: fit a card's constants and say what they predict."""

from __future__ import annotations

import json as jsonlib
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table


def calibrate(
    platform: Annotated[str, typer.Option(help="rtx4090 or l40s.")] = "rtx4090",
    dry_run: Annotated[bool, typer.Option(help="Show the fit without storing it.")] = False,
    json: opt.Json = False,
) -> None:
    """Fit a card's constants on its named cell, and compare every other stated number with its prediction."""
    from repro.fitting import fit, protocol_of
    from repro.paths import CALIBRATION

    protocol = protocol_of(platform)
    calibration, comparisons = fit(protocol)
    report: dict[str, Any] = {
        "schema_version": 1,
        "card": platform,
        "obtained": "simulated",
        "calibration": asdict(calibration),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    if not dry_run:
        calibration.save(CALIBRATION / f"{platform}.json")
        path = CALIBRATION / f"{platform}-report.json"
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(jsonlib.dumps(report, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, path)
    if json:
        print_json(report)
        return
    print(f"{platform}: matmul = attention share of peak {calibration.matmul_efficiency:.4f}; {calibration.note}")
    print(f"fitted on {'; '.join(calibration.fitted_on)}")
    print_table(
        "Stated numbers and their simulated prediction",
        ("what", "stated", "predicted", "error", "role", "note"),
        [
            (c.what, _text(c.stated), number(c.predicted, 3), "-" if c.error_percent is None else f"{c.error_percent:+.1f} %",
             c.role, c.note)
            for c in comparisons
        ],
    )  # fmt: skip


def _text(value: float | tuple[float, ...] | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{v:g}" for v in value)
    return "-" if value is None else f"{value:g}"
