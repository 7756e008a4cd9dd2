"""A run whose model is divided among the devices of this machine: rank 0 is this process, and leads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engines.dllm.executor.ranks import LeadingExecutor, follow
from engines.parallel.group import TensorParallel
from engines.parallel.launch import local_ranks
from repro.runs.cell import Cell
from repro.systems import Assembled

if TYPE_CHECKING:
    from repro.runs.experiment import Experiment


@contextmanager
def leading(experiment: Experiment) -> Iterator[Assembled]:
    """The run's engine, whose steps all ranks take until the body is over."""
    settings = experiment.settings
    with local_ranks(settings.tensor_parallel, settings.device, _follow, experiment.cell) as group:
        assembled = experiment.system.assemble(settings, experiment.resources, group)
        leader = LeadingExecutor(assembled.engine.executor, group)
        assembled.engine.executor = leader
        try:
            yield assembled
            # Not after an error, where the others may be anywhere: then they are ended.
            leader.stop()
        finally:
            leader.close()


def _follow(group: TensorParallel, cell: Cell) -> None:
    """What the other ranks run: they make the same of the cell as rank 0 does."""
    from repro.runs.experiment import prepare

    experiment = prepare(cell)
    assembled = experiment.system.assemble(experiment.settings, experiment.resources, group)
    follow(assembled.engine.executor, group)
