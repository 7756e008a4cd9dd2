"""``repro sweep``: a grid of runs, from a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.errors import require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import print_json, say
from repro.cli.run_table import by_setting, print_runs, run_json

if TYPE_CHECKING:
    from repro.runs.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class Repeated(Checked):
    panel: ClassVar[str] = opt.RUNS
    repeats: Annotated[int, Range(1, 1000)] | None = None
    """Runs of each setting, with seeds from 0 on [default: the grid's seed, which is 0]."""
    interleave: bool = False
    """Make them repeat by repeat, so that what the machine does meanwhile falls on all settings."""
    max_cells: Annotated[int, Range(1, 10**8)] = 20_000
    """The most runs that a grid may have."""
    keep_other_code: bool = False
    """Keep runs that other code made, and put this code's beside them, for 'repro compare'."""


def sweep(
    *,
    grid: Annotated[
        Path,
        typer.Argument(
            help="YAML with system, dataset, platform, executor, rate, seed and knobs, each a value or a list of them."
        ),
    ],
    repeated: Repeated,
    stored: opt.Stored,
    placement: opt.Placement,
    dry_run: opt.DryRun = False,
    continue_on_error: opt.ContinueOnError = False,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Run every combination of a grid's values; the same command again continues, and reuses what is done."""
    from dataclasses import replace

    from repro.cli.data_file import check_regular
    from repro.cli.making import make_and_show
    from repro.cli.plots import check_plot, save_plot, titles_of
    from repro.runs.progress import MANY_CELLS
    from repro.workbench.grid import grid_of_file, in_turns

    opened = placement.opened()
    check_regular("grid", grid)
    asked = grid_of_file(grid).repeated(repeated.repeats)
    _check_options(repeated, stored, num_seeds=len(asked.seed))
    if plot is not None:
        check_plot(plot, grid, *asked.files)
    if MANY_CELLS <= asked.num_cells <= repeated.max_cells:
        say(f"{asked.num_cells:,} cells", file=sys.stderr)
    cells = asked.cells(repeated.max_cells)

    def show(runs: Sequence[StoredRun]) -> None:
        if json:
            print_json({"runs": [run_json(run) for run in runs]})
        else:
            print_runs(by_setting(runs), asked.varied)
        if plot is not None and runs:
            rows = [_as_plotted(row, asked.varied) for row in by_setting(runs)]
            drawn = save_plot(plot, f"repro sweep {grid.name}", rows, titles_of(runs, PLOTTED))
            say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)

    make_and_show(
        in_turns(cells) if repeated.interleave else cells,
        store=replace(stored.store, beside_other_code=repeated.keep_other_code),
        opened=opened,
        show=show,
        force=stored.force,
        jobs=placement.jobs,
        dry_run=dry_run,
        continue_on_error=continue_on_error,
        json=json,
    )


def _check_options(repeated: Repeated, stored: opt.Stored, *, num_seeds: int) -> None:
    require(
        not (repeated.keep_other_code and stored.accept_other_code),
        "keep_other_code makes runs anew that accept_other_code reuses: leave one out",
    )
    require(
        num_seeds > 1 or not repeated.interleave,
        "interleave has no effect with one run of each setting: add --repeats, or leave it out",
    )


PLOTTED = {
    "throughput_tok_s": "throughput (tok/s)",
    "mean_latency_s": "mean latency (s)",
    "longest_latency_s": "longest latency (s)",
}


def _as_plotted(row: Sequence[StoredRun], varied: Sequence[str]) -> dict[str, Any]:
    """Means over the repeats of a setting, with their intervals."""
    from repro.runs.store import over_repeats

    cell = row[0].cell
    knobs = [f"{name}={cell.knob_values.get(name, 'default')}" for name in varied]
    parts = (("throughput_tok_s", None), ("e2el_s", "mean"), ("e2el_s", "max"))
    found = [over_repeats(row, metric, part) for metric, part in parts]
    values = dict(zip(PLOTTED, (each.mean for each in found), strict=True))
    halves = {f"{name}_half": each.half_width for name, each in zip(PLOTTED, found, strict=True)}
    return {
        "label": ", ".join([row[0].title, cell.dataset, cell.platform, *knobs]),
        **values,
        **halves,
        "runs": len(row),
        "obtained": "; ".join(sorted({run.obtained for run in row})),
        "valid": all(run.validity.valid for run in row),
    }
