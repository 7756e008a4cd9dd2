"""The same from Python: ``repro.run``, ``repro.sweep`` and ``repro.load``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro.paths import LOCAL
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare, prepare_all
from repro.runs.pools import pool_of
from repro.runs.progress import sweep_progress
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.systems.platforms import platform as platform_of


def run(
    system: str,
    dataset: str,
    *,
    platform: str = "cpu-tiny",
    executor: str | None = None,
    rate: float | None = None,
    seed: int = 0,
    result_dir: str | Path = LOCAL,
    force: bool = False,
    **knobs: Scalar,
) -> StoredRun:
    """One cell's run, made unless it is stored. ``knobs`` have the names of the options of ``repro bench``."""
    cell = Cell(
        system=system,
        dataset=dataset,
        platform=platform,
        executor=executor or platform_of(platform).executor,
        rate=rate,
        seed=seed,
        knobs=tuple(knobs.items()),
    )
    return sweep([cell], result_dir=result_dir, force=force)[0]


def sweep(
    cells: Sequence[Cell],
    *,
    result_dir: str | Path = LOCAL,
    force: bool = False,
    jobs: int | None = None,
    pool: str = "local",
    address: str | None = None,
) -> list[StoredRun]:
    """The runs of the cells, in their order; missing ones are made, simulated ones ``jobs`` at once, on this machine or in the
    ``pool`` ray: a cluster started for the call, or the one at ``address``."""
    with pool_of(pool, address) as where:
        found = Sweep(prepare_all(cells), Store(Path(result_dir)), force=force, pool=where)
        found.check()
        with sweep_progress(found.num_cells) as progress:
            found.run(on_event=progress.on_event, on_step=progress.on_step, jobs=jobs)
    return found.runs


def load(cell: Cell, *, result_dir: str | Path = LOCAL) -> StoredRun:
    """A run that is stored, by this code; raises StoreError where there is none."""
    return Store(Path(result_dir)).load(prepare(cell))
