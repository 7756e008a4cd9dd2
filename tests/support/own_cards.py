"""A card of a user's own, as the file that docs/cards.md shows, and steps that were timed on it."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.tables import data_beside

from engines.cost.fit import TimedStep
from engines.cost.roofline import Calibration, Gpu, Roofline, StepWork
from engines.models.shape import LLADA_8B
from repro.families.dllm.replay import shape_of
from repro.files import csv_text, replace_text

CARD = """\
name: l4
bf16_tflops: 121
memory_bandwidth_gb_s: 300
memory_gb: 24
pcie_gb_s: 64
source: NVIDIA L4 datasheet, dense
"""
PLANTED = data_beside(__file__, "own_cards")["planted"]
WORKS = [
    StepWork(rows * batch, rows * batch * length, min(rows, 32) * batch, length * batch, rows * batch, batch)
    for batch in (1, 8, 64)
    for rows, length in ((1, 512), (32, 512), (512, 512), (1, 8192))
]
"""Bound by memory and by arithmetic, their attention too."""


def write_card(folder: Path, text: str = CARD, *, name: str = "mine.yaml", **added: object) -> Path:
    path = folder / name
    path.write_text(text + "".join(f"{field}: {value}\n" for field, value in added.items()), encoding="utf-8")
    return path


def timed_steps(card: Gpu, noise: float = 0.0, constants: Mapping[str, float] = PLANTED) -> list[TimedStep]:
    """Steps that take what these constants say, but for noise."""
    calibration = Calibration(gpu=card.name, fitted_on=("planted",), note="", **constants)
    draw, shape = random.Random(0), shape_of("llada-8b")
    assert shape.linear_flops_per_token == LLADA_8B.linear_flops_per_token
    roofline = Roofline(shape, card, calibration)
    return [
        TimedStep(
            name=f"row {number}",
            shape=shape,
            work=work,
            seconds=roofline.step_time(work).total_s * (1 + draw.gauss(0, noise)),
        )
        for number, work in enumerate(WORKS, start=1)
    ]


def write_steps(path: Path, steps: Sequence[TimedStep]) -> Path:
    columns = StepWork._fields[:6]
    rows = ((*step.work[:6], step.seconds) for step in steps)
    return replace_text(path, csv_text((*columns, "seconds"), rows))
