"""``repro reproduce`` and ``repro figure``: run a figure's grid and draw it, or only draw."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import print_json, print_table

if TYPE_CHECKING:
    from repro.reports.figures import View

Figure = Annotated[str, typer.Argument(help="Name of the figure ('repro list' shows them).")]
Platforms = Annotated[list[str] | None, typer.Option("--platform", help="Several times [default: the figure's own].")]
ResultDir = Annotated[Path | None, typer.Option(help="Where run folders are [default: results/local].")]
Reading = Annotated[
    list[str] | None,
    typer.Option(
        "--reading",
        help="Of the baselines: published, efficient or policy; several times [default: published where simulated, else efficient].",
    ),
]
NumRuns = Annotated[int, typer.Option(help="Repeats with seeds 0, 1, ...; figures show 95 % intervals.")]
Executor = Annotated[
    str | None, typer.Option(help="torch (measured) or roofline (simulated) [default: the platform's].")
]
Rates = Annotated[
    list[str] | None, typer.Option("--request-rate", help="Instead of the platform's rates, requests/s; several times.")
]
NumPrompts = Annotated[int | None, typer.Option(help="Requests per run, where the figure does not fix them.")]
OutDir = Annotated[Path | None, typer.Option(help="Where figures go [default: results/figures].")]


def reproduce(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    reading: Reading = None,
    num_runs: NumRuns = 1,
    executor: Executor = None,
    request_rate: Rates = None,
    num_prompts: NumPrompts = None,
    weights: opt.Weights = None,
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    json: opt.Json = False,
) -> None:
    """Run everything behind a figure (stored runs are reused) and draw it: PNG, PDF and CSV."""
    views = _views(name, platform, reading, num_runs, executor, request_rate, num_prompts, weights)
    _make(name, views, result_dir, out_dir, force=force, json=json, draw_only=False)


def figure(
    name: Figure,
    platform: Platforms = None,
    result_dir: ResultDir = None,
    out_dir: OutDir = None,
    reading: Reading = None,
    num_runs: NumRuns = 1,
    executor: Executor = None,
    request_rate: Rates = None,
    num_prompts: NumPrompts = None,
    weights: opt.Weights = None,
    json: opt.Json = False,
) -> None:
    """Redraw a figure from stored runs; runs nothing."""
    views = _views(name, platform, reading, num_runs, executor, request_rate, num_prompts, weights)
    _make(name, views, result_dir, out_dir, force=False, json=json, draw_only=True)


def _views(
    name: str,
    platforms: list[str] | None,
    readings: list[str] | None,
    num_runs: int,
    executor: str | None,
    rates: list[str] | None,
    num_prompts: int | None,
    weights: str | None,
) -> list[View]:
    from repro.reports.figures import View, default_reading
    from repro.reports.figures import figure as figure_of
    from repro.systems.platforms import platform as platform_of

    if executor not in (None, "torch", "roofline"):
        raise UserError(f"executor={executor!r} is unknown: use torch or roofline")
    parsed = [opt.parse_rate(rate) for rate in rates or []]
    if None in parsed:
        raise UserError("request_rate='inf' has no place on an axis of rates: give numbers of requests/s")
    changes = opt.given(executor=executor, rates=tuple(sorted({rate for rate in parsed if rate is not None})) or None)
    places = [replace(platform_of(each), **changes) for each in platforms or figure_of(name).load().PLATFORMS]
    knobs = tuple(opt.given(num_requests=num_prompts, weights=weights).items())
    return [
        View(platform=where, reading=reading, num_runs=num_runs, knobs=knobs)
        for where in places
        for reading in readings or [default_reading(where)]
    ]


def _make(
    name: str,
    views: Sequence[View],
    result_dir: Path | None,
    out_dir: Path | None,
    *,
    force: bool,
    json: bool,
    draw_only: bool,
) -> None:
    from repro.cli.sweep import load_all, prepare_all, run_sweep, say_what_ran
    from repro.folders import readable_folder, writable_folder
    from repro.paths import FIGURES, LOCAL
    from repro.reports.figures import figure as figure_of
    from repro.runs.store import Store

    entry = figure_of(name)
    module = entry.load()
    store, out = Store(result_dir or LOCAL), out_dir or FIGURES
    grids = [(view, prepare_all([view.applied(cell) for cell in module.cells(view)])) for view in views]
    outcomes = []
    if draw_only:
        readable_folder("result_dir", store.root)
    else:
        # Readings share the runs of dLLM-Serve.
        everything = list({e.cell.key: e for _, grid in grids for e in grid}.values())
        outcomes = run_sweep(everything, store, force=force, continue_on_error=False, out_dir=out)
    loaded = [(view, load_all(grid, store, only_stored=draw_only)) for view, grid in grids]
    writable_folder("out_dir", out)
    drawn = []
    for view, runs in loaded:
        rendered = module.render(runs, view, out)
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
                    "figure": entry.name,
                    "platform": view.platform.name,
                    "reading": view.reading,
                    "files": [str(path) for path in rendered.files],
                    "columns": rendered.columns,
                    "rows": rendered.rows,
                    "notes": rendered.notes,
                }
                for view, rendered in drawn
            ]
        )
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
