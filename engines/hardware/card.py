"""A card of a user's own: a datasheet, and what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from engines.hardware.catalogue import Gpu
from engines.hardware.roofline import Calibration, StepWork
from engines.hardware.silicon.tables import Tables
from engines.knobs import Range


@dataclass(frozen=True, kw_only=True)
class CardCalibration(Calibration):
    """What two kinds of steps take besides, where the host is the slower part: both are of a diffusion LLM's steps."""

    layout_s: Annotated[float, Range(0)] = 0.0
    """Taken by a step whose rows lie otherwise than those of the step before: what says where they lie is made anew."""
    build_s: Annotated[float, Range(0)] = 0.0
    """Taken by a step in which a sequence chooses the rows that it keeps."""

    notes_steps: ClassVar[bool] = True

    def overhead_s(self, work: StepWork) -> float:
        return super().overhead_s(work) + self.layout_s * work.new_layout + self.build_s * work.builds


@dataclass(frozen=True, kw_only=True)
class Card(Gpu):
    calibration: CardCalibration | None = None
    """Constants fitted to its steps; None: its steps are charged by the datasheet."""
    tables: Tables | None = None
    """Times of its kernels, which steps are then composed of."""
