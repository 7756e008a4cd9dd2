"""``repro ablate`` of simulated families, whose variants are paired by seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli import options as opt
from repro.cli.option_groups import Placement
from repro.cli.output import print_json, print_table, say
from repro.cli.said import lengths_json, lengths_line

if TYPE_CHECKING:
    from repro.reports.ablation import Variant
    from repro.runs.store import StoredRun
    from repro.systems.platforms import Platform

NUM_RUNS = 10
"""Where none are asked for: one seed is an anecdote."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A family's ablation: what is run, and what is shown of the runs."""

    variants: Sequence[Variant]
    platform: Platform
    title: str
    datasets: Sequence[str]
    """Where none are asked for."""
    dataset: str
    """What the family calls one."""
    rate: float | None
    rate_said: str
    columns: Sequence[str]
    """Behind data set and variant, and before the verdict."""
    row: Callable[[Sequence[StoredRun], Sequence[StoredRun]], Row]
    """Of a variant's runs and of the first variant's."""
    as_text: Callable[[Row], tuple[str, ...]]
    """A cell of each of the columns."""
    plotted: Mapping[str, str]


def ablate_paired(
    component: str,
    family: Paired,
    *,
    datasets: Sequence[str] | None,
    num_runs: int | None,
    model: str | None,
    result_dir: Path | None,
    placement: Placement,
    force: bool,
    accept_other_code: bool,
    plot: Path | None,
    json: bool,
) -> None:
    from engines.bounds import check_most
    from engines.errors import require
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.runs.store import Store

    opened = placement.opened()
    check_most("num_runs", num_runs)
    require(num_runs is None or num_runs >= 1, f"num_runs={num_runs} must be at least 1")
    knobs = tuple(opt.given(model=model).items())
    seeds = range(NUM_RUNS if num_runs is None else num_runs)
    grid = {
        (dataset, variant): [variant.paired_cell(family.platform, dataset, family.rate, seed, knobs) for seed in seeds]
        for dataset in datasets or family.datasets
        for variant in family.variants
    }
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    if plot is not None:
        check_plot(plot)
    with opened as pool:
        sweep = sweep_of([cell for cells in grid.values() for cell in cells], store, force=force, pool=pool)
        outcomes = run_sweep(sweep, jobs=placement.jobs)
    runs = iter(sweep.runs)
    base: dict[str, list[StoredRun]] = {}
    rows = []
    for (dataset, variant), cells in grid.items():
        own = [next(runs) for _ in cells]
        row = family.row(own, base.setdefault(dataset, own)) | _provenance(own)
        rows.append({family.dataset: dataset, "variant": variant.label, "ours": variant.is_ours, **row})
    title = f"Ablation of {component} on {family.title}"
    if json:
        print_json(
            {
                "component": component,
                "platform": family.platform.name,
                "rate": family.rate,
                "lengths": lengths_json(sweep.runs),
                "rows": rows,
            }
        )
    else:
        print_table(
            f"{title}, {family.rate_said}",
            (family.dataset, "variant", *family.columns, "verdict"),
            [_as_text(row, family) for row in rows],
        )
        say(lengths_line(sweep.runs))
        for row in rows:
            if row["reasons"]:
                say(f"{row['variant']}: {row['reasons'][0]}")
    if plot is not None:
        plotted = [{"label": f"{row[family.dataset]}: {row['variant']}", **row} for row in rows]
        drawn = save_plot(plot, title, plotted, family.plotted)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _provenance(runs: Sequence[StoredRun]) -> Row:
    return {
        "num_runs": len(runs),
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "reasons": sorted({reason for run in runs for reason in run.validity.reasons}),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _as_text(row: Row, family: Paired) -> tuple[str, ...]:
    variant = row["variant"] + (" (ours)" if row["ours"] else "")
    return row[family.dataset], variant, *family.as_text(row), "VALID" if row["valid"] else "INVALID"
