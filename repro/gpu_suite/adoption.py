"""Makes what a suite fitted on its card the calibration of every simulation of that card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.cost.roofline import Calibration, gpu_of_device
from engines.errors import UserError, require
from repro.gpu_suite.calibration import CALIBRATION, SCHEMA_VERSION
from repro.reports import predictions
from repro.reports.predictions import medians_sentence

KINDS = {"tok/s": "throughputs", "ms": "steps"}
"""Unit of a measured number -> what its median is of."""


def read_fit(folder: Path, card: str) -> dict[str, Any]:
    """What the suite left in its folder. Refused where it does not show that it was measured on the card, and where."""
    path = folder / CALIBRATION
    if not path.is_file():
        raise UserError(f"platform={card!r} has no calibration in {folder}: run 'make gpu-first' on such a card")
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, machine, commit = value["schema_version"], value["machine"], value["commit"]
        calibration = constants(value)
        medians_sentence(report(value)["medians"])
        json.dumps(report(value), allow_nan=False)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}): run gpu-suite again") from error
    require(version == SCHEMA_VERSION, f"{path} has schema_version={version}: run gpu-suite again")
    known = gpu_of_device(machine) if isinstance(machine, str) else None
    require(
        known is not None and known.name == card == calibration.gpu,
        f"{path} was fitted on {machine or 'an unnamed machine'}, which is no {card}: give the folder of a suite that ran "
        f"on one",
    )
    require(
        isinstance(commit, str),
        f"{path} does not say of which commit its runs are: set REPRO_COMMIT where there is no .git, and run them again",
    )
    return value


def constants(value: Mapping[str, Any]) -> Calibration:
    return Calibration.from_dict(value["calibration"])


def report(value: Mapping[str, Any]) -> dict[str, Any]:
    """As that of a card fitted to stated numbers, of measured ones."""
    calibration = constants(value)
    return {
        "schema_version": predictions.SCHEMA_VERSION,
        "card": calibration.gpu,
        "calibration": asdict(calibration),
        "against": f"numbers measured on {value['machine']} at commit {value['commit']}",
        "medians": {KINDS[unit]: found for unit, found in value["medians"].items()},
        "comparisons": [
            {
                "claim": each["name"],
                "kind": "measured",
                "role": each["role"],
                "unit": each["unit"],
                "expected": each["measured"],
                "ours": each["predicted"],
                "error_percent": each["error_percent"],
            }
            for each in value["comparisons"]
        ],
    }
