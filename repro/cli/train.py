"""``repro train-tiny``: make an embedded checkpoint again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from repro.cli import options as opt
from repro.cli.output import print_json
from repro.cli.spread import Given, Knobs, Some


def _trained() -> dict[str, Sequence[type | Some]]:
    from repro.training.config import TrainConfig

    names = ("steps", "seed", "start", "gen_length", "tokens_per_batch", "block_diffusion")
    return {opt.WORKLOAD: (Some(TrainConfig, names),)}


KNOBS = Knobs(_trained)


def train_tiny(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    task: Annotated[
        list[str] | None, typer.Option(help="Tasks it is trained on. By default mini-gsm and mini-code.")
    ] = None,
    given: Annotated[Given, KNOBS],
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")] = True,
) -> None:
    """Train a tiny LLaDA, or block-diffusion model, on generated problems, and evaluate it on held-out ones."""
    from engines.knobs import given_to
    from repro.training.config import TrainConfig
    from repro.training.loop import train_tiny as train

    config = TrainConfig() if not task else TrainConfig(tasks=tuple(task))
    print_json(train(given_to(config, given), out, resume=resume))
