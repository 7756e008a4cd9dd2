"""Cells and platforms that tests share."""

from typing import Any

from repro.families.platforms import platform
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.record import RunRecord


def a_cell(
    system: str = "dllm-serve",
    dataset: str = "osc",
    platform: str = "cpu-tiny",
    executor: str = "torch",
    *,
    rate: float | None = None,
    seed: int = 0,
    **knobs: Any,
) -> Cell:
    knobs_given = tuple(knobs.items())
    return Cell(
        system=system, dataset=dataset, platform=platform, executor=executor, rate=rate, seed=seed, knobs=knobs_given
    )


def ran(asked: Cell) -> tuple[Experiment, RunRecord]:
    experiment = prepare(asked)
    return experiment, experiment.run()


CPU_TINY = platform("cpu-tiny")
RTX4090 = platform("rtx4090")
L40S = platform("l40s")
H200 = platform("h200")
H20_LLADA2_MINI = platform("h20-llada2-mini")
H200_LLADA2_MINI = platform("h200-llada2-mini")
H200_SDAR_8B = platform("h200-sdar-8b")
