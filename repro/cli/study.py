"""An ablation on one platform: what is run, and the one way from its cells to a table, JSON and a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli import options as opt
from repro.cli.output import print_json, print_table, say
from repro.cli.said import lengths_json, lengths_line

if TYPE_CHECKING:
    from repro.reports.ablation import Variant
    from repro.runs.cell import Cell
    from repro.runs.store import StoredRun
    from repro.systems.platforms import Platform

Row = dict[str, Any]
Runs = Sequence["StoredRun"]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A component's variants on data sets, and what is shown of their runs."""

    component: str
    platform: Platform
    title: str
    """What the table calls the platform."""
    cells: Mapping[tuple[str, Variant], Sequence[Cell]]
    """By data set and variant; the first variant of a data set is the one that the others are held against."""
    dataset: str = "dataset"
    """What the family calls one."""
    said: str
    """The rate, and what baselines stand for."""
    about: Mapping[str, Any]
    """What JSON says besides the rows."""
    row: Callable[[Runs, Runs], Row]
    """Numbers of a variant's runs, with those of the first variant's beside them."""
    columns: Mapping[str, Callable[[Row], str]]
    plotted: Mapping[str, str] = field(
        default_factory=lambda: {"throughput_tok_s": "throughput (tok/s)", "mean_latency_s": "mean latency (s)"}
    )


def run_study(study: Study, *, stored: opt.Stored, placement: opt.Placement, plot: Path | None, json: bool) -> None:
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import require_alike, run_sweep, say_what_ran, sweep_of

    opened, store = placement.opened(), stored.store
    if plot is not None:
        check_plot(plot)
    with opened as pool:
        cells = [cell for cells in study.cells.values() for cell in cells]
        sweep = sweep_of(cells, store, force=stored.force, pool=pool)
        outcomes = run_sweep(sweep, jobs=placement.jobs)
    require_alike(sweep.runs, f"ablate --component {study.component}")
    rows = _rows(study, sweep.runs)
    title = f"Ablation of {study.component} on {study.title}"
    if json:
        about = {"component": study.component, "platform": study.platform.name, **study.about}
        print_json({**about, "lengths": lengths_json(sweep.runs), "rows": rows})
    else:
        columns = (study.dataset, "variant", *study.columns, "verdict")
        print_table(f"{title}, {study.said}", columns, [_as_text(row, study) for row in rows])
        say(lengths_line(sweep.runs))
        for row in rows:
            if row["reasons"]:
                say(f"{row['variant']}: {row['reasons'][0]}")
    if plot is not None:
        plotted = [{"label": f"{row[study.dataset]}: {row['variant']}", **row} for row in rows]
        drawn = save_plot(plot, title, plotted, study.plotted)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _rows(study: Study, runs: Runs) -> list[Row]:
    left, base = iter(runs), dict[str, Runs]()
    rows = []
    for (dataset, variant), cells in study.cells.items():
        own = [next(left) for _ in cells]
        asked = {study.dataset: dataset, "variant": variant.label, "system": variant.system, "ours": variant.is_ours}
        rows.append({**asked, **study.row(own, base.setdefault(dataset, own)), **_provenance(own)})
    return rows


def _provenance(runs: Runs) -> Row:
    return {
        "num_runs": len(runs),
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "reasons": sorted({reason for run in runs for reason in run.validity.reasons}),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _as_text(row: Row, study: Study) -> tuple[str, ...]:
    variant = row["variant"] + (" (ours)" if row["ours"] else "")
    cells = (said(row) for said in study.columns.values())
    return row[study.dataset], variant, *cells, "VALID" if row["valid"] else "INVALID"
