"""``repro reproduce`` and ``repro figure``: run a figure's grid and draw it, or only draw."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from engines.errors import UserError, require
from engines.knobs import Checked, Range
from repro.cli import options as opt
from repro.cli.output import print_json, print_table, say
from repro.reports.accuracy import Accuracy

if TYPE_CHECKING:
    from repro.reports.figures import Figure, Rendered, View
    from repro.runs.cell import Cell
    from repro.runs.store import StoredRun


@dataclass(frozen=True, kw_only=True)
class FigureOptions(opt.Reused, opt.Charged, Checked):
    """Which views of a figure, from which runs."""

    panel: ClassVar[str] = opt.WHAT
    platform: list[str] | None = None
    """Several times [default: the figure's own]."""
    reading: list[str] | None = None
    """Reading of the baselines: published, efficient or policy; several times [default: published where simulated, else
    efficient]."""
    accuracy: Accuracy = "usual"
    """Each system at its usual retention; or dense: at the least with which it answers as the model without a cache does
    ('repro figure accuracy')."""
    num_runs: Annotated[int, Range(1, 1000)] | None = None
    """Repeats with seeds 0, 1, ...; figures show 95 % intervals [default: 3 where times are measured, else what the figure's claims
    take, 1 to 10]."""
    executor: Literal["torch", "roofline"] | None = None
    """torch (measured) or roofline (simulated) [default: the platform's]."""
    request_rate: list[str] | None = None
    """Instead of the platform's rates, requests/s; several times."""
    num_prompts: Annotated[int, Range(most=10**5)] | None = None
    """Requests per run, where the figure does not fix them."""
    weights: str | None = None
    """checkpoint, or random for a shape without a download."""
    out_dir: Annotated[Path | None, typer.Option(rich_help_panel=opt.RUNS)] = None
    """Where figures go [default: results/figures/PAPER, or figures/PAPER in --result-dir]."""

    def views(self, name: str) -> list[View]:
        from repro.reports.figures import View, default_reading
        from repro.reports.figures import figure as figure_of
        from repro.systems.platforms import DllmPart
        from repro.systems.platforms import platform as platform_of

        parsed = [opt.parse_rate(rate) for rate in self.request_rate or []]
        if None in parsed:
            raise UserError("request_rate='inf' has no place on an axis of rates: give numbers of requests/s")
        rates = tuple(sorted({rate for rate in parsed if rate is not None}))
        figure = figure_of(name).load()
        names = self.platform or figure.platforms
        places = [replace(platform_of(each), **opt.given(executor=self.executor)) for each in names]
        for where in places:
            # A platform of another family than the one whose baselines have readings.
            if self.reading and where.parts and not any(isinstance(part, DllmPart) for part in where.parts):
                raise UserError(f"reading={self.reading[0]!r} has no effect on platform={where.name!r}: leave it out")
        asked = opt.given(num_prompts=self.num_prompts, weights=self.weights) | self.charged
        knobs = tuple(asked.items())
        return [
            View(
                platform=where,
                reading=reading,  # type: ignore[arg-type]
                num_runs=figure.default_num_runs(where) if self.num_runs is None else self.num_runs,
                knobs=knobs,
                rates=rates,
                accuracy=self.accuracy,
            )
            for where in places
            for reading in self.reading or [default_reading(where)]
        ]

    def command(self, name: str) -> str:
        """What makes the runs of these views, whole."""
        words = ["repro", "reproduce", name]
        for each in fields(self):
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value is True:
                words.append(option)
            elif value not in (None, False, "usual"):
                words += [
                    word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))
                ]
        return shlex.join(words)

    def out(self, name: str) -> Path:
        """Folder of the figure ``PAPER/NAME``: papers have figures of one name, on one platform too."""
        from repro.paths import figures_beside

        return self.out_dir or figures_beside(self.result_dir) / name.rpartition("/")[0]


Name = Annotated[
    str, typer.Argument(help="Name of the figure ('repro list' shows them), or a module of your own and a colon.")
]

Force = Annotated[bool, typer.Option("--force", help="Run again what is already stored.", rich_help_panel=opt.RUNS)]


def reproduce(
    *, name: Name, asked: FigureOptions, placement: opt.Placement, force: Force = False, json: opt.Json = False
) -> None:
    """Run what is not stored of the runs behind a figure, and draw it: PNG, PDF, CSV and a table of the runs."""
    _make(name, asked, placement, force=force, draw_only=False, json=json)


def figure(*, name: Name, asked: FigureOptions, json: opt.Json = False) -> None:
    """Redraw a figure from stored runs; runs nothing."""
    _make(name, asked, opt.Placement(), force=False, draw_only=True, json=json)


def check_rates(name: str, views: Sequence[View], cells: Sequence[Cell]) -> None:
    """Refuse rates that are asked for where a figure has its own, or none."""
    asked = {rate for view in views for rate in view.rates}
    used = {cell.rate for cell in cells if cell.rate is not None}
    if asked and not (used and used <= asked):
        own = f"its own rates ({', '.join(f'{rate:g}' for rate in sorted(used))})" if used else "no axis of rates"
        raise UserError(f"request_rate has no effect on {name}, which has {own}: leave it out")


def check_knobs(name: str, views: Sequence[View], cells: Sequence[Cell]) -> None:
    """Refuse settings that are asked for where every run of a figure has its own, or there is none."""
    for option, value in {knob for view in views for knob in view.knobs}:
        if all(cell.knob_values[option] != value for cell in cells):
            own = "has its own" if cells else "has no runs behind it"
            raise UserError(f"{option}={value!r} has no effect on {name}, which {own}: leave it out")


def check_accuracy(name: str, drawing: Figure, views: Sequence[View], grids: Sequence[Sequence[Cell]]) -> None:
    """Refuse an accuracy where every run of a figure has its own retention."""
    for view, cells in zip(views, grids, strict=True):
        if view.accuracy != "usual" and _asks(cells) == _asks(_cells(drawing, replace(view, accuracy="usual"))):
            raise UserError(
                f"accuracy={view.accuracy!r} has no effect on {name}, whose runs keep the same at either: leave it out"
            )


def check_baselines(
    name: str, asked: FigureOptions, drawing: Figure, views: Sequence[View], cells: Sequence[Cell]
) -> None:
    """Refuse readings where no run of a figure is of a baseline that has any, or each has its own."""
    from repro.runs.system import SYSTEMS
    from repro.systems.dllm.knobs import READINGS

    if not asked.reading:
        return
    families = {SYSTEMS.get(system).family.name for system in {cell.system for cell in cells}}
    ignored = f"reading={asked.reading[0]!r} has no effect on {name}, "
    require("dllm" in families, f"{ignored}which has no runs of such baselines: leave it out")
    grids = [[_asks(_cells(drawing, replace(view, reading=reading))) for reading in READINGS] for view in views]
    is_heeded = any(grid != other for grid, *others in grids for other in others)
    require(is_heeded, f"{ignored}whose runs have their own: leave it out")


def _cells(drawing: Figure, view: View) -> list[Cell]:
    return [view.applied(cell) for cell in drawing.cells(view)]


def _asks(cells: Sequence[Cell]) -> set[str]:
    """What a figure's runs are asked, whatever comparison they are measured in."""
    from repro.runs.cell import COMPARISON

    return {cell.without(COMPARISON).key for cell in cells}


def _make(
    name: str, asked: FigureOptions, placement: opt.Placement, *, force: bool, draw_only: bool, json: bool
) -> None:
    from repro.cli.sweep import require_alike, require_folders, require_runs, run_sweep, sweep_of, what_ran
    from repro.files import readable_folder, writable_folder
    from repro.reports.figures import figure as figure_of
    from repro.reports.run_table import draw
    from repro.runs.store import Store

    opened = placement.opened()
    entry = figure_of(name)
    drawing, views = entry.load(), asked.views(name)
    out = asked.out(entry.name)
    store = Store(asked.root, accept_other_code=asked.accept_other_code, accept_other_machine=draw_only)
    if draw_only:
        readable_folder("result_dir", store.root)
    # One sweep for all views: readings share the runs of dLLM-Serve.
    grids = [_cells(drawing, view) for view in views]
    cells = [cell for grid in grids for cell in grid]
    check_rates(name, views, cells)
    check_knobs(name, views, cells)
    check_baselines(name, asked, drawing, views, cells)
    check_accuracy(name, drawing, views, grids)
    if not cells and asked.num_runs is not None:
        raise UserError(f"num_runs={asked.num_runs} has no effect on {name}, which has no runs behind it: leave it out")
    if draw_only:
        require_folders(cells, store, name, asked.command(name))
    with opened as pool:
        sweep = sweep_of(cells, store, force=force, will_run=not draw_only, pool=pool)
        outcomes = [] if draw_only else run_sweep(sweep, out_dir=out, jobs=placement.jobs)
    require_runs(sweep, name, asked.command(name))
    writable_folder("out_dir", out)
    figures = []
    for view, runs in zip(views, sweep.by_grid(grids), strict=True):
        assert runs is not None
        require_alike(runs, name)
        figures.append(_said_of(entry.name, drawing, view, runs, draw(entry, view, runs, out)))
    lines = [*what_ran(outcomes, store.root)] if outcomes else []
    if outcomes and all(outcome.status == "reused" for outcome in outcomes):
        lines.append("nothing new to run: every run behind this figure is stored; the figure was drawn from them")
    _say(figures, lines, json=json)


def _said_of(
    name: str, drawing: Figure, view: View, runs: Sequence[StoredRun], rendered: Rendered
) -> Mapping[str, Any]:
    """All that is said of a drawn figure."""
    from repro.cli.run_table import lengths_json, lengths_line

    return {
        "title": f"{drawing.title} - {drawing.place(view.platform)}",
        "lengths": lengths_line(runs) if runs else None,
        "json": {
            "figure": name,
            "platform": view.platform.name,
            "reading": view.reading,
            "accuracy": view.accuracy,
            "lengths": lengths_json(runs),
            "files": [str(path) for path in rendered.files],
            "columns": rendered.columns,
            "rows": rendered.rows,
            "notes": rendered.notes,
        },
    }


def _say(figures: Sequence[Mapping[str, Any]], lines: Sequence[str], *, json: bool) -> None:
    """``lines`` are of the runs, and go to stderr."""
    if json:
        print_json({"figures": [figure["json"] for figure in figures]})
    else:
        here = Path.cwd()
        for figure in figures:
            page = figure["json"]
            print_table(figure["title"], page["columns"], page["rows"])
            for note in filter(None, (figure["lengths"], *page["notes"])):
                say(note, "  ")
            files = map(Path, page["files"])
            shown = (file.relative_to(here) if file.is_relative_to(here) else file for file in files)
            say(f"files: {', '.join(map(str, shown))}", "  ")
    for line in lines:
        say(line, file=sys.stderr)
