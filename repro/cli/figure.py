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
OutDir = Annotated[Path | None, typer.Option(help="Where figures go [default: results/figures].")]


def reproduce(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    json: opt.Json = False,
) -> None:
    """Run everything behind a figure (stored runs are reused) and draw it: PNG, PDF and CSV."""
    _make(name, platform, result_dir, out_dir, force=force, json=json, draw_only=False)


def figure(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    json: opt.Json = False,
) -> None:
    """Redraw a figure from stored runs; runs nothing."""
    _make(name, platform, result_dir, out_dir, force=False, json=json, draw_only=True)


def _make(
    name: str, platforms: list[str] | None, result_dir: Path | None, out_dir: Path | None,
    *, force: bool, json: bool, draw_only: bool,
) -> None:  # fmt: skip
    from repro.cli.sweep import load_all, prepare_all, run_sweep, say_what_ran
    from repro.figures import figure as figure_of
    from repro.paths import FIGURES, LOCAL
    from repro.platforms import platform as platform_of
    from repro.store import Store

    entry = figure_of(name)
    module = entry.load()
    chosen = [platform_of(p) for p in platforms or module.PLATFORMS]
    store = Store(result_dir or LOCAL)
    grids = [(where, prepare_all(module.cells(where))) for where in chosen]
    outcomes = []
    if not draw_only:
        everything = [experiment for _, grid in grids for experiment in grid]
        outcomes = run_sweep(everything, store, force=force, continue_on_error=False)
    drawn = []
    for where, grid in grids:
        rendered = module.render(load_all(grid, store, only_stored=draw_only), where, out_dir or FIGURES)
        drawn.append((where, rendered))
        if not json:
            print_table(f"{module.TITLE} - {where.title}", rendered.columns, rendered.rows)
            for note in rendered.notes:
                print(f"  {note}")
            print("  files: " + ", ".join(_relative(path) for path in rendered.files))
    if json:
        print_json(
            [
                {
                    "figure": entry.name, "platform": where.name, "files": [str(path) for path in rendered.files],
                    "columns": rendered.columns, "rows": rendered.rows, "notes": rendered.notes,
                }
                for where, rendered in drawn
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
