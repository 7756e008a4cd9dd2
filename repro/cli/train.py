"""``repro train-tiny``: make the embedded checkpoint again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.cli import options as opt
from repro.cli.output import print_json


def train_tiny(
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    steps: Annotated[
        int | None, typer.Option(help="Optimiser steps [default: those of the embedded checkpoint].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the training texts.")] = 0,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")] = True,
) -> None:
    """Train the tiny LLaDA on generated word problems and functions, and evaluate it on held-out ones."""
    from repro.training.config import TrainConfig
    from repro.training.loop import train_tiny as train

    print_json(train(TrainConfig(seed=seed, **opt.given(steps=steps)), out, resume=resume))
