"""The Python interface: ``repro.run``, ``sweep``, ``load`` and ``compare``. Bad input raises UserError, as on the command line."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from engines.errors import UserError, require
from repro.families.platforms import platform as platform_of
from repro.files import forget
from repro.paths import LOCAL
from repro.runs.cell import WORKLOAD, Cell, Scalar, knob_value, plain
from repro.runs.experiment import prepare, prepare_all
from repro.runs.progress import sweep_progress
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep, pool_of
from repro.workbench.comparison import TOLERANCE, Comparison, compare_sides, folder_of, sides_of
from repro.workbench.grid import MOST_CELLS, Grid, in_turns
from repro.workloads.knobs import named_after

if TYPE_CHECKING:
    import pandas as pd


def run(
    system: str,
    dataset: str | None = None,
    *,
    platform: str = "cpu-tiny",
    executor: str | None = None,
    rate: float | None = None,
    seed: int = 0,
    result_dir: str | Path = LOCAL,
    force: bool = False,
    **knobs: Scalar,
) -> StoredRun:
    """Return the run of one cell; it is computed unless it is already stored. ``knobs`` have the names of the options of ``repro bench``.
    The knob ``workload``, a file or a workload class of yours, replaces the data set."""
    forget()
    chosen = platform_of(plain(platform))
    if dataset is None:
        workload = knob_value(knobs.get(WORKLOAD))
        require(
            isinstance(workload, str), "dataset is missing: name one, or give a file, or a class of yours, as workload"
        )
        dataset = named_after(workload)
    cell = Cell(
        system=system,
        dataset=dataset,
        platform=chosen.name,
        executor=chosen.executor if executor is None else executor,
        rate=rate,
        seed=seed,
        knobs=tuple(knobs.items()),
    )
    return sweep([cell], result_dir=result_dir, force=force)[0]


def sweep(
    cells: Sequence[Cell] | Mapping[str, Any],
    *,
    repeats: int | None = None,
    max_cells: int = MOST_CELLS,
    interleave: bool = False,
    result_dir: str | Path = LOCAL,
    force: bool = False,
    jobs: int | None = None,
    pool: str = "local",
    address: str | None = None,
) -> list[StoredRun]:
    """Return the runs of the cells, in their order. Missing runs are computed, simulated ones ``jobs`` at once. They run on this machine,
    or in the ``pool`` ray: a cluster started for the call, or the one at ``address``.

    ``cells`` may be a grid, a mapping as in a file of ``repro sweep``. ``repeats`` gives it the seeds 0, 1, ..., and ``max_cells`` bounds
    its cells. ``interleave`` runs repeat after repeat."""
    root = _folder(result_dir)
    flags = {"force": force, "interleave": interleave}
    for name, flag in flags.items():
        require(isinstance(plain(flag), bool), f"{name}={plain(flag)!r} must be true or false")
    forget()
    if isinstance(cells, Mapping):
        requested = Grid.from_dict(cells).repeated(repeats).cells(plain(max_cells))
    else:
        require(repeats is None, f"repeats={plain(repeats)!r} is of a grid, and cells have their seeds: leave it out")
        requested = _cells(cells)
    ordered = in_turns(requested) if interleave else requested
    with pool_of(pool, address, jobs) as workers:
        job = Sweep(prepare_all(ordered), Store(root), force=force, pool=workers)
        job.check()
        with sweep_progress(job.num_cells) as progress:
            job.run(on_event=progress.on_event, on_step=progress.on_step, jobs=jobs)
    runs = dict(zip(ordered, job.runs, strict=True))
    return [runs[cell] for cell in requested]


@overload
def load(cell: Cell, *, result_dir: str | Path = LOCAL) -> StoredRun: ...


@overload
def load(cell: str | Path, *, result_dir: str | Path = LOCAL) -> "pd.DataFrame": ...


def load(cell: Cell | str | Path, *, result_dir: str | Path = LOCAL) -> "StoredRun | pd.DataFrame":
    """Load the stored run of a cell, as this code made it; raises StoreError if there is none. For a folder, return all its runs as a tidy
    table with a row per run, whatever code made them."""
    if isinstance(plain(cell), str):
        from repro.workbench.comparison import frame_of

        folder = folder_of(_folder(cell))
        if folder.warning is not None:
            warnings.warn(folder.warning, stacklevel=2)
        return frame_of(folder.runs)
    root = _folder(result_dir)
    if not isinstance(cell, Cell):
        raise UserError(f"cell={plain(cell)!r} must be a repro.runs.cell.Cell, or a folder of runs")
    forget()
    return Store(root).load(prepare(cell))


def compare(
    a: str | Path | Sequence[StoredRun],
    b: str | Path | Sequence[StoredRun],
    *,
    metric: str = "throughput_tok_s",
    tolerance: float = TOLERANCE,
    result_dir: str | Path = LOCAL,
) -> Comparison:
    """Return the ratio of a metric, ``b`` over ``a``, over pairs of runs that differ only in what tells the sides apart. A side is a folder
    of runs, a list of runs, or a selector among the runs in ``result_dir`` (repro.workbench.comparison)."""
    first, second = sides_of(plain(a), plain(b), _folder(result_dir))
    return compare_sides(first, second, plain(metric), tolerance)


def _folder(result_dir: object) -> Path:
    """Raises UserError unless ``result_dir`` is a path. An empty path is refused, because it would be the working directory."""
    text = plain(result_dir)
    try:
        # A lone surrogate cannot be encoded. A file name whose bytes are no valid text can be.
        is_path = isinstance(text, str) and bool(text.strip()) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    require(is_path, f"result_dir={text!r} is no path of a folder: give one, or leave it out")
    return Path(text)


def _cells(cells: object) -> list[Cell]:
    if isinstance(cells, Cell):
        raise UserError("cells is one Cell and must be a list of them: write [cell]")
    items = plain(cells)
    if isinstance(items, str | bytes | type) or not isinstance(items, Iterable):
        raise UserError(f"cells={items!r} must be a list of repro.runs.cell.Cell")
    result = list(items)
    for cell in result:
        if not isinstance(cell, Cell):
            raise UserError(f"cell={plain(cell)!r} must be a repro.runs.cell.Cell")
    return result
