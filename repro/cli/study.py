"""An ablation on one platform: what is run, and the one way from its cells to a table, JSON and a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """One that no row has anything in is left out."""
    notes: Callable[[Sequence[Row]], Iterable[str]]
    """What a reader of the rows has to know."""
    plotted: Mapping[str, str]
    """Column -> its axis; a panel each."""
    halves: Mapping[str, str] = field(default_factory=dict)
    """Column that is plotted -> that of half its interval's width."""
    guides: Mapping[str, float] = field(default_factory=dict)
    """Column that is plotted -> where nothing differs."""


def run_study(study: Study, *, stored: opt.Stored, placement: opt.Placement, plot: Path | None, json: bool) -> None:
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import require_alike, run_sweep, say_what_ran, say_what_runs, sweep_of

    opened, store = placement.opened(), stored.store
    if plot is not None:
        check_plot(plot)
    with opened as pool:
        cells = [cell for cells in study.cells.values() for cell in cells]
        sweep = sweep_of(cells, store, force=stored.force, pool=pool)
        say_what_runs(sweep)
        outcomes = run_sweep(sweep, jobs=placement.jobs)
    require_alike(sweep.runs, f"ablate --component {study.component}")
    rows = _rows(study, sweep.runs)
    title = f"Ablation of {study.component} on {study.title}"
    if json:
        about = {"component": study.component, "platform": study.platform.name, **study.about}
        print_json({**about, "lengths": lengths_json(sweep.runs), "rows": rows})
    else:
        texts = {name: [said(row) for row in rows] for name, said in study.columns.items()}
        texts = {name: cells for name, cells in texts.items() if set(cells) != {"-"}}
        columns = (study.dataset, "variant", *texts, "verdict")
        print_table(
            f"{title}, {study.said}",
            columns,
            [_as_text(row, [cells[place] for cells in texts.values()], study) for place, row in enumerate(rows)],
        )
        say(lengths_line(sweep.runs))
        for note in study.notes(rows):
            say(note)
        for row in rows:
            if row["reasons"]:
                say(f"{row['variant']}: {row['reasons'][0]}")
    if plot is not None:
        plotted = [
            {
                "label": f"{row[study.dataset]}: {row['variant']}",
                **row,
                **{f"{name}_half": row[half] for name, half in study.halves.items()},
            }
            for row in rows
        ]
        titles = {name: axis for name, axis in study.plotted.items() if any(row[name] is not None for row in rows)}
        drawn = save_plot(plot, title, plotted, titles, study.guides)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)


def _rows(study: Study, runs: Runs) -> list[Row]:
    left, base, label = iter(runs), dict[str, Runs](), dict[str, str]()
    rows = []
    for (dataset, variant), cells in study.cells.items():
        own = [next(left) for _ in cells]
        against = label.get(dataset)
        label.setdefault(dataset, variant.label)
        asked = {study.dataset: dataset, "variant": variant.label, "system": variant.system, "ours": variant.is_ours}
        found = study.row(own, base.setdefault(dataset, own))
        rows.append({**asked, "against": against, **found, **_provenance(own)})
    return rows


NO_DIFFERENCE = "no difference shown"


def difference(low: float | None, high: float | None, at: float, words: tuple[str, str]) -> str | None:
    """Which of ``words``, for below and above, an interval says of what makes no difference ``at``; None where there is no
    interval."""
    if low is None or high is None:
        return None
    return words[0] if high < at else words[1] if low > at else NO_DIFFERENCE


def added(pairs: Sequence[float], words: tuple[str, str]) -> Row:
    """The mean of differences that are paired by seed, with its interval."""
    from repro.runs.statistics import mean_interval

    found = mean_interval(pairs)
    return {
        "added_points": found.mean,
        "added_half_width": found.half_width,
        "difference": difference(found.low, found.high, 0, words),
    }


def difference_text(row: Row) -> str:
    return "-" if row["against"] is None else row["difference"] or "one repeat"


def paired_notes(rows: Sequence[Row], what: str, at: int = 0) -> Iterator[str]:
    """How variants are held against the first: ``what`` names the column, and ``at`` is its value where nothing differs."""
    repeats = max(row["num_runs"] for row in rows)
    if repeats < 2:
        yield "one repeat has no interval, and says little of what another seed would give: add --num-runs 5"
        return
    first = ", ".join(dict.fromkeys(row["against"] for row in rows if row["against"] is not None))
    if first:
        yield (
            f"{what}: against {first}, paired by seed, with 95 % intervals over {repeats} repeats; an interval that holds {at} "
            "shows no difference"
        )


def _provenance(runs: Runs) -> Row:
    return {
        "num_runs": len(runs),
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "reasons": sorted({reason for run in runs for reason in run.validity.reasons}),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _as_text(row: Row, cells: Iterable[str], study: Study) -> tuple[str, ...]:
    variant = row["variant"] + (" (ours)" if row["ours"] else "")
    return row[study.dataset], variant, *cells, "VALID" if row["valid"] else "INVALID"
