"""The same from Python: ``repro.run``, ``repro.sweep`` and ``repro.load``. Bad input is a UserError, as on the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from engines.errors import UserError, require
from repro.files import forget
from repro.paths import LOCAL
from repro.runs.cell import Cell, Scalar, plain
from repro.runs.experiment import prepare, prepare_all
from repro.runs.progress import sweep_progress
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep, pool_of
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
        executor=platform_of(plain(platform)).executor if executor is None else executor,
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
    root = _folder(result_dir)
    asked = _cells(cells)
    require(isinstance(plain(force), bool), f"force={plain(force)!r} must be true or false")
    forget()
    with pool_of(pool, address, jobs) as where:
        found = Sweep(prepare_all(asked), Store(root), force=force, pool=where)
        found.check()
        with sweep_progress(found.num_cells) as progress:
            found.run(on_event=progress.on_event, on_step=progress.on_step, jobs=jobs)
    return found.runs


def load(cell: Cell, *, result_dir: str | Path = LOCAL) -> StoredRun:
    """A run that is stored, by this code; raises StoreError where there is none."""
    root = _folder(result_dir)
    (asked,) = _cells((cell,))
    forget()
    return Store(root).load(prepare(asked))


def _folder(result_dir: object) -> Path:
    """Refuses what is no path; an empty one would be the working directory."""
    text = plain(result_dir)
    try:
        # Half a character cannot be encoded; bytes of a name that are no text have a way of their own.
        is_path = isinstance(text, str) and bool(text.strip()) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    require(is_path, f"result_dir={text!r} is no path of a folder: give one, or leave it out")
    return Path(text)


def _cells(cells: object) -> list[Cell]:
    if isinstance(cells, Cell):
        raise UserError("cells is one Cell and must be a list of them: write [cell]")
    given = plain(cells)
    if isinstance(given, str | bytes | type) or not isinstance(given, Iterable):
        raise UserError(f"cells={given!r} must be a list of repro.runs.cell.Cell")
    found = list(given)
    for each in found:
        if not isinstance(each, Cell):
            raise UserError(f"cell={plain(each)!r} must be a repro.runs.cell.Cell")
    return found
