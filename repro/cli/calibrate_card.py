"""``repro calibrate --measured``: constants of a user's own card, fitted to steps that were timed on it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from engines.errors import require
from repro.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from engines.cost.fit import Fit, TimedStep
    from engines.cost.kernels import Card
    from engines.cost.roofline import Calibration


def calibrate_card(where: Path, measured: Path, out: Path | None, *, dry_run: bool, json: bool) -> None:
    """Fit, say how far each step is from what is fitted, and store both beside the card's file, or in ``out``."""
    from engines.cost.fit import fit_steps
    from repro.cli.data_file import check_regular
    from repro.files import replace_text, writable_file, writable_folder
    from repro.systems.card_file import card_of
    from repro.systems.cost import save_calibration
    from repro.systems.timed_steps import read_steps

    card, model = card_of(where)
    check_regular("measured", measured)
    steps = read_steps(measured, model)
    folder = where.parent if out is None else out
    files = []
    if not dry_run:
        writable_folder("out", folder)
        files = [folder / f"{where.stem}.calibration.json", folder / f"{where.stem}.residuals.csv"]
    for file in files:
        writable_file("out", file, measured, where)
    found = fit_steps(steps, card, measured.name)
    fitted = found.calibration
    rows = _rows(steps, card, fitted, found.left_out)
    if files:
        save_calibration(fitted, files[0])
        replace_text(files[1], _csv(rows))
    errors = {name: _errors(rows, name) for name in ("error_percent", "left_out_error_percent")}
    if json:
        print_json(
            {
                "card": card.name,
                "obtained": "fitted",
                "calibration": asdict(fitted),
                "untold": list(found.untold),
                "residuals": errors["error_percent"],
                "leave_one_out": errors["left_out_error_percent"],
                "rows": rows,
                "files": [str(file) for file in files],
            }
        )
        return
    print_table(
        f"{card.name}: constants fitted to {len(steps)} steps of {measured.name}",
        ("what", "value"),
        [
            ("matmul = attention share of peak", _share(fitted.matmul_efficiency, "arithmetic", found)),
            ("share of bandwidth", _share(fitted.bandwidth_efficiency, "memory", found)),
            ("overhead of a step", f"{1e3 * fitted.step_overhead_s:.4g} ms"),
            *(
                (f"of {what} besides", f"{1e3 * getattr(fitted, n):.4g} ms")
                for n, what in KINDS.items()
                if n in found.free.kinds
            ),
            ("residuals, absolute", _said(errors["error_percent"])),
            ("leave-one-out error, absolute", _said(errors["left_out_error_percent"])),
        ],
    )
    if files:
        say(f"files: {', '.join(map(str, files))}")
        say(f"runs rest on it once {where.name} says 'calibration: {files[0].name if out is None else files[0]}'")


KINDS = {"layout_s": "one whose rows lie otherwise than the last one's", "build_s": "one that builds a cache"}


def _share(share: float, bound: str, found: Fit) -> str:
    return "1, the datasheet's: the steps do not tell it" if bound in found.untold else f"{share:.4f}"


def check_asked(asked: Any, is_file: bool) -> None:
    """Refuse what has no effect on a card of a file, and its options elsewhere."""
    if not is_file:
        for name in ("measured", "out"):
            value = getattr(asked, name)
            require(
                value is None,
                f"{name}={str(value)!r} is for a card of a file: give --platform FILE.yaml, or leave it out",
            )
        return
    for name in ("keep", "write", "sensitivity"):
        require(
            not getattr(asked, name),
            f"{name} has no effect on platform={asked.platform!r}, a user's file: leave it out",
        )
    require(
        asked.measured is not None,
        f"platform={asked.platform!r} is a card of a file: give --measured, a CSV of steps that were timed on it",
    )


def _rows(
    steps: Sequence[TimedStep], card: Card, fitted: Calibration, others: Sequence[float | None]
) -> list[dict[str, Any]]:
    def error(seconds: float | None, measured: float) -> float | None:
        return None if seconds is None else 100 * (seconds / measured - 1)

    rows = []
    for step, other in zip(steps, others, strict=True):
        own = step.predicted_s(card, fitted)
        rows.append(
            {
                "name": step.name,
                "model": step.shape.name,
                "measured_s": step.seconds,
                "fitted_s": own,
                "error_percent": error(own, step.seconds),
                "left_out_s": other,
                "left_out_error_percent": error(other, step.seconds),
            }
        )
    return rows


def _errors(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | int | None]:
    found = [abs(row[name]) for row in rows if row[name] is not None]
    return {
        "median_percent": median(found) if found else None,
        "worst_percent": max(found, default=None),
        "not_told": len(rows) - len(found),
    }


def _said(errors: Mapping[str, float | int | None]) -> str:
    if errors["median_percent"] is None:
        return "not told: each step is needed"
    said = f"median {errors['median_percent']:.2f} %, worst {errors['worst_percent']:.2f} %"
    return said if not errors["not_told"] else f"{said}, {errors['not_told']} steps the others do not tell"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
