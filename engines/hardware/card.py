"""A card of a user's own: a datasheet, and what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass

from engines.hardware.catalogue import Gpu
from engines.hardware.roofline import Calibration
from engines.hardware.silicon.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Card(Gpu):
    calibration: Calibration | None = None
    """Constants fitted to its steps; None: its steps are charged by the datasheet."""
    tables: Tables | None = None
    """Times of its kernels, which steps are then composed of."""
