"""Cells that are run and shown: what ``bench`` and ``sweep`` do once they know theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from repro.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from repro.runs.cell import Cell
    from repro.runs.pool import Pool
    from repro.runs.store import Store, StoredRun
    from repro.runs.sweep import Sweep


def make_and_show(
    cells: Sequence[Cell],
    *,
    store: Store,
    opened: AbstractContextManager[Pool],
    show: Callable[[Sequence[StoredRun]], None],
    force: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    continue_on_error: bool = False,
    json: bool = False,
) -> None:
    """Ends with code 1 where a run failed, or is INVALID. ``dry_run`` tells what would run instead."""
    from repro.cli.data_file import data_of
    from repro.cli.sweep import is_failure, run_sweep, say_what_ran, sweep_of

    with opened as pool:
        with _readable_data(cells):
            sweep = sweep_of(cells, store, force=force, pool=pool)
        if dry_run:
            pool.check(sweep.experiments)
            _say_what_would_run(sweep, json=json)
            return
        for line in data_of(sweep.experiments):
            say(line, file=sys.stderr)
        outcomes = run_sweep(sweep, continue_on_error=continue_on_error, jobs=jobs)
    show(sweep.runs)
    say_what_ran(outcomes, store.root)
    if any(map(is_failure, outcomes)):
        raise typer.Exit(1)


@contextmanager
def _readable_data(cells: Sequence[Cell]) -> Iterator[None]:
    """Around what reads the cells' data files."""
    from repro.cli.data_file import check_regular, readable

    datasets: dict[str, dict[str, None]] = {}
    for cell in cells:
        if (path := cell.knob_values.get("dataset_path")) is not None:
            datasets.setdefault(str(path), {})[cell.dataset] = None
        if (path := cell.knob_values.get("workload")) is not None:
            check_regular("workload", Path(str(path)))
    with ExitStack() as stack:
        for path, of in datasets.items():
            stack.enter_context(readable("dataset_path", Path(path), of))
        yield


def _say_what_would_run(sweep: Sweep, *, json: bool) -> None:
    reasons = [(each.cell.folder_name, sweep.why(each.cell)) for each in sweep.experiments]
    if json:
        print_json({"runs": [{"run": name, "why": reason} for name, reason in reasons]})
    else:
        print_table("What would run, or be reused", ("run", "why"), reasons)
