"""Fitted constants of each simulated card, stored with the cells they were fitted on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from engines.cost.cards import Gpu, gpu
from engines.cost.roofline import Calibration
from engines.cost.tables import Card
from repro.files import replace_text
from repro.paths import CALIBRATION

Constants = TypeVar("Constants", bound=Any)


@lru_cache
def load_calibration(card: str | Gpu) -> Calibration:
    """The stored fit, of a card of a file its own, or datasheet peaks (which say that they are not fitted)."""
    if isinstance(card, Gpu):
        return fit_of(card) or Calibration.datasheet(card)
    path = CALIBRATION / f"{card}.json"
    return Calibration.load(path) if path.is_file() else Calibration.datasheet(gpu(card))


def fit_of(card: str | Gpu | None) -> Calibration | None:
    """What is fitted to the steps of a card of a user's own."""
    return card.calibration if isinstance(card, Card) else None


def fitted_to(card: str | Gpu | None, constants: Constants) -> Constants:
    """A family's assumed constants, those that are fitted to the card in their places."""
    own = fit_of(card)
    if own is None:
        return constants
    names = "matmul_efficiency", "attention_efficiency", "bandwidth_efficiency", "step_overhead_s"
    return replace(constants, **{name: getattr(own, name) for name in names})


def save_calibration(calibration: Calibration, path: Path) -> None:
    replace_text(path, json.dumps(asdict(calibration), indent=2, allow_nan=False) + "\n")


def describe_calibration(calibration: Calibration) -> str:
    """One sentence for manifests and captions."""
    return f"{calibration.gpu}, {calibration.text}"
