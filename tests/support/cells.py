"""Cells in few words."""

from typing import Any

from repro.runs.cell import Cell


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
