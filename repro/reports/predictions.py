"""Predictions of a card's calibration: its comparisons with stated numbers, and medians over the predictions alone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from engines.cost.roofline import Calibration
from engines.errors import UserError
from repro import paths
from repro.files import replace_text, sealed
from repro.reports.claims import Judged
from repro.reports.claims_file import as_row

SCHEMA_VERSION = 4
KINDS: Mapping[str, str] = MappingProxyType({"tok/s": "throughputs", "x": "ratios", "%": "ratios", "s": "latencies"})
"""Unit of a stated number -> the median it enters. % is a reduction or a gain. An overloaded run's latencies follow from its throughput."""
_ONE = {"throughputs": "throughput", "ratios": "ratio", "latencies": "latency", "steps": "step"}

_KEPT = ("role", "verdict", "expected", "unit", "ours", "of", "error_percent", "obtained", "how")


def report_path(card: str) -> Path:
    return paths.CALIBRATION / f"{card}-report.json"


def report(calibration: Calibration, judged: Iterable[Judged]) -> dict[str, Any]:
    """``judged`` are the simulated comparisons on the card."""
    rows = [as_row(each) for each in judged]
    comparisons = [
        {"claim": row["id"], "what": row["statement"], "kind": row["kind"], **{name: row[name] for name in _KEPT}}
        for row in rows
        if row["role"] is not None
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "card": calibration.gpu,
        "calibration": asdict(calibration),
        "medians": medians(comparisons),
        "comparisons": comparisons,
    }


def medians(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Median absolute error of predictions of stated numbers, by kind. A number that is stated twice counts once."""
    errors: dict[str, list[float]] = {name: [] for name in KINDS.values()}
    seen: set[tuple[Any, ...]] = set()
    for row in comparisons:
        name, error = KINDS.get(row["unit"]), row["error_percent"]
        key = (row["unit"], row["expected"], row["ours"])
        if row["role"] != "prediction" or row["kind"] != "stated" or name is None or error is None or key in seen:
            continue
        seen.add(key)
        errors[name].append(abs(error))
    return {name: {"count": len(own), "median_percent": round(median(own), 2)} for name, own in errors.items() if own}


def write_report(value: Mapping[str, Any]) -> Path:
    text = json.dumps(sealed(value), indent=2, ensure_ascii=False, allow_nan=False)
    return replace_text(report_path(value["card"]), text + "\n")


def read_report(card: str) -> dict[str, Any] | None:
    """The stored report of a card, or None."""
    path = report_path(card)
    if not path.is_file():
        return None
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version={value['schema_version']}, not {SCHEMA_VERSION}")
        medians_sentence(value["medians"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path.name} cannot be used ({type(error).__name__}: {error}): run 'repro calibrate' again"
        ) from error
    return value


def predictions_note(card: str) -> str:
    """A sentence on the errors of the card's predictions, without numbers that were fitted or follow from fitted ones."""
    report = read_report(card)
    if report is None:
        return f"No comparison of the {card} calibration with stated numbers is stored: run 'repro calibrate --platform {card} --keep'."
    errors = {
        row["claim"]: row["error_percent"]
        for row in report["comparisons"]
        if row["role"] == "prediction" and row["error_percent"] is not None
    }
    if not errors:
        return f"No stated number but those that {card} was fitted on, or that follow from them, can be compared with."
    worst = max(errors, key=lambda claim: abs(errors[claim]))
    return (
        f"Predictions of {card} against {report.get('against', 'stated numbers')}, median absolute error: {medians_sentence(report['medians'])}; "
        f"worst {worst} {errors[worst]:+.0f} % (results/calibration/{report_path(card).name})."
    )


def medians_sentence(errors: Mapping[str, Mapping[str, Any]]) -> str:
    """The medians in words, the same in captions and on the terminal."""
    parts = [
        f"{row['median_percent']:.1f} % over {row['count']} {_ONE.get(name, name) if row['count'] == 1 else name}"
        for name, row in errors.items()
    ]
    return ", ".join(parts) if parts else "no prediction to compare with"
