"""Fitted constants of each simulated card, stored with the cells they were fitted on."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from engines.hardware.catalogue import gpu
from engines.hardware.roofline import Calibration
from repro.files import replace_text
from repro.paths import CALIBRATION


@lru_cache
def load_calibration(card: str) -> Calibration:
    """The stored fit, or datasheet peaks (which say that they are not fitted)."""
    path = CALIBRATION / f"{card}.json"
    return Calibration.load(path) if path.is_file() else Calibration.datasheet(gpu(card))


def save_calibration(calibration: Calibration, path: Path) -> None:
    replace_text(path, json.dumps(asdict(calibration), indent=2, allow_nan=False) + "\n")


def describe_calibration(calibration: Calibration) -> str:
    """One sentence for manifests and captions."""
    if not calibration.fitted_on:
        return f"{calibration.gpu}, {calibration.note}"
    return f"{calibration.gpu}, fitted on {'; '.join(calibration.fitted_on)}"
