"""``repro calibrate``: fit a card's constants and report what they predict."""

from __future__ import annotations

from typing import Annotated

import typer

from repro.cli import options as opt


def calibrate(platform: Annotated[str, typer.Option(help="rtx4090 or l40s.")] = "rtx4090", json: opt.Json = False) -> None:
    """Fit the roofline's constants on the named cells, and compare every other stated cell."""
