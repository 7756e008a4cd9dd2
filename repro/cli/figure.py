"""``repro reproduce`` and ``repro figure``: run a figure's grid and draw it, or only draw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repro.cli import options as opt
from repro.cli.output import print_json, print_table

Figure = Annotated[str, typer.Argument(help="Name of the figure ('repro list' shows them).")]
Platforms = Annotated[list[str] | None, typer.Option("--platform", help="Several times [default: the figure's own].")]
ResultDir = Annotated[Path | None, typer.Option(help="Where run folders are [default: results/local].")]
Reading = Annotated[list[str] | None, typer.Option("--reading", help="Of the baselines: published, efficient or policy; several times [default: published where simulated, else efficient].")]  # fmt: skip
NumRuns = Annotated[int, typer.Option(help="Repeats with seeds 0, 1, ...; figures show 95 % intervals.")]
OutDir = Annotated[Path | None, typer.Option(help="Where figures go [default: results/figures].")]


def reproduce(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    reading: Reading = None,
    num_runs: NumRuns = 1,
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    json: opt.Json = False,
) -> None:
    """Run everything behind a figure (stored runs are reused) and draw it: PNG, PDF and CSV."""
    _make(name, platform, result_dir, out_dir, reading, num_runs, force=force, json=json, draw_only=False)


def figure(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    reading: Reading = None,
    num_runs: NumRuns = 1,
    json: opt.Json = False,
) -> None:
    """Redraw a figure from stored runs; runs nothing."""
    _make(name, platform, result_dir, out_dir, reading, num_runs, force=False, json=json, draw_only=True)


def _make(
    name: str, platforms: list[str] | None, result_dir: Path | None, out_dir: Path | None,
    readings: list[str] | None, num_runs: int, *, force: bool, json: bool, draw_only: bool,
) -> None:  # fmt: skip
    from repro.cli.sweep import load_all, prepare_all, run_sweep, say_what_ran
    from repro.figures import View, default_reading
    from repro.figures import figure as figure_of
    from repro.paths import FIGURES, LOCAL
    from repro.platforms import platform as platform_of
    from repro.store import Store

    entry = figure_of(name)
    module = entry.load()
    views = [
        View(platform=where, reading=reading, num_runs=num_runs)
        for where in map(platform_of, platforms or module.PLATFORMS)
        for reading in readings or [default_reading(where)]
    ]
    store = Store(result_dir or LOCAL)
    grids = [(view, prepare_all(module.cells(view))) for view in views]
    outcomes = []
    if not draw_only:
        # Readings share the runs of dLLM-Serve.
        everything = list({e.cell.key: e for _, grid in grids for e in grid}.values())
        outcomes = run_sweep(everything, store, force=force, continue_on_error=False)
    drawn = []
    for view, grid in grids:
        rendered = module.render(load_all(grid, store, only_stored=draw_only), view, out_dir or FIGURES)
        drawn.append((view, rendered))
        if not json:
            print_table(f"{module.TITLE} - {view.platform.title}", rendered.columns, rendered.rows)
            for note in rendered.notes:
                print(f"  {note}")
            print("  files: " + ", ".join(_relative(path) for path in rendered.files))
    if json:
        print_json(
            [
                {
                    "figure": entry.name, "platform": view.platform.name, "reading": view.reading, "files": [str(path) for path in rendered.files],
                    "columns": rendered.columns, "rows": rendered.rows, "notes": rendered.notes,
                }
                for view, rendered in drawn
            ]
        )  # fmt: skip
    if outcomes:
        say_what_ran(outcomes, store.root)
        if all(outcome.status == "reused" for outcome in outcomes):
            print(
                "nothing new to run: every run behind this figure is stored; the figure was drawn from them",
                file=sys.stderr,
            )


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
