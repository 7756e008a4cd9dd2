"""``repro bench`` and ``repro sweep``: run any system on any workload and platform, given by options or by a file."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from engines.errors import UserError, require
from engines.knobs import Checked, Needs, Range, knobs_of
from engines.runtime.step_timer import STEP_PARTS
from repro.cli import options as opt
from repro.cli.options import Given, Knobs, engine_knobs, platform_defaults
from repro.cli.output import number, percent, print_json, print_table, say
from repro.cli.plots import check_plot, save_plot
from repro.cli.run_table import by_setting, print_runs, rate_of, run_json
from repro.cli.sweep import (
    check_regular,
    data_of,
    is_failure,
    readable,
    run_sweep,
    say_what_ran,
    say_what_runs,
    sweep_of,
    with_common_search,
)
from repro.families.dllm.settings import default_profile_every
from repro.families.platforms import DllmPart, Platform
from repro.families.platforms import platform as platform_of
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS, settings_of
from repro.workbench.grid import Grid, grid_of_file, in_turns

if TYPE_CHECKING:
    from repro.runs.pool import Pool
    from repro.runs.store import Store, StoredRun

CPU = "cpu-tiny"
PROFILE_COLUMNS = {"with a Refresh": ("refresh", "mixed"), "Reuse only": ("reuse",), "all": ("all",)}
"""Column title -> the kinds of steps that it sums, as the metric ``profile`` names them."""
NEEDED = "needed"
LATENCIES = {"mean": "mean", "longest": "max", "p50": "p50", "p99": "p99"}
"""Name in a plot's CSV -> the statistic of the latency."""


@dataclass(frozen=True, kw_only=True)
class OwnPolicies:
    """Policies that systems of autoregressive models take. The scheduler and refresh rule of diffusion LLMs are settings of their own."""

    router: str | None = None
    """Your own router as module:NAME, for ampd, ampd-live and laps; for dynamo, how a request finds its worker."""
    batcher: str | None = None
    """Your own batching policy as module:NAME, for laps."""
    queue: str | None = None
    """Your own order of waiting prefills as module:NAME, for ampd and ampd-live, and for laps beside a batcher."""
    binder: str | None = None
    """Your own rule that binds a session to a worker, as module:NAME, for ampd and ampd-live."""


KNOBS = Knobs(
    lambda: engine_knobs(OwnPolicies),
    several=True,
    without=("dataset_path", "profile_every", "num_fewshot", "chat", "allow_code_execution", "length_scale"),
    defaults=platform_defaults,
)


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Which cells to run, besides their knobs: each system on each data set at each rate."""

    panel: ClassVar[str] = opt.WHAT
    system: list[str] | None = None
    """A system of 'repro list', or module:NAME; several times [default: dllm-serve, or ampd on clusters]."""
    dataset_name: list[str] | None = None
    """livebench, burst or osc, a session trace or conversations; several times [default: what the system serves: osc, dureader or
    lmsys-chat-1m]."""
    platform: list[str] | None = None
    """cpu-tiny, rtx4090, l40s, a100, h100, h200 or b200. Also h20x32 or h200x32 for clusters; h200-sdar-8b and others for block diffusion
    ('repro list'); your card's YAML file (docs/cards.md), or module:NAME; several times [default: cpu-tiny]."""
    executor: list[str] | None = None
    """torch (measured) or roofline (simulated); several times [default: the platform's]."""
    request_rate: list[str] | None = None
    """Requests/s or 'inf'; several times [default: inf]."""
    seed: opt.Seeds = None

    @property
    def platform_names(self) -> tuple[str, ...]:
        return tuple(self.platform or (CPU,))

    def grid(self, options: Mapping[str, Any]) -> Grid:
        """``options`` are the knobs."""
        return Grid(
            system=tuple(self.system or ()),
            dataset=tuple(self.dataset_name or ()),
            platform=self.platform_names,
            executor=tuple(self.executor or ()),
            rate=tuple(map(opt.parse_rate, self.request_rate or ["inf"])),
            seed=tuple(self.seed or (0,)),
            knobs={name: value if isinstance(value, tuple) else (value,) for name, value in options.items()},
        )


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    panel: ClassVar[str] = opt.SERVER
    url: str | None = None
    """Base URL of an OpenAI-compatible server to drive. Use it in place of a system here, or with --system vllm, dynamo or sglang."""
    max_concurrency: int | None = None
    """With --url, the most requests in flight at once."""
    goodput: str | None = None
    """With --url, the limits in ms that a good request meets, like 'ttft:200 tpot:50 e2el:5000'."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Checked):
    panel: ClassVar[str] = opt.RUNS
    profile: bool = False
    """Show where a step's time goes and how near it is to the hardware's limits. Profiling disturbs the run, so its results are stored
    apart from plain runs."""
    profile_every: Annotated[int, Range(1, 10**9), Needs(profile=True)] | None = None
    """With --profile, take apart one step in this many. Choose a number prime to a block's steps, or it meets the same ones in each block
    [default: 7 on CUDA, else 1]."""

    def knobs(self, device: str | None, platform: Platform, executor: str | None) -> dict[str, int]:
        if not self.profile:
            return {}
        require(
            (executor or platform.executor) == "torch",
            "profile: a simulated step has no parts to take apart: leave --profile out, or use --executor torch",
        )
        return {"profile_every": self.profile_every or default_profile_every(device or platform.part(DllmPart).device)}


@dataclass(frozen=True, kw_only=True)
class Audited:
    panel: ClassVar[str] = opt.RUNS
    audit: bool = False
    """Run each simulated cell again without each of its options in turn, and list the options that changed no number."""

    def without_each(self, cells: Sequence[Cell], options: Mapping[str, Any]) -> Mapping[tuple[Cell, str], Cell | str]:
        """Return, for each cell of the first seed and each option, the cell without that option, or why there is none."""
        others: dict[tuple[Cell, str], Cell | str] = {}
        for cell in cells if self.audit else ():
            require(
                cell.executor == "roofline",
                f"audit compares numbers exactly, and executor={cell.executor!r} measures: use --executor roofline",
            )
            for name in options if cell.seed == cells[0].seed else ():
                others[cell, name] = _cell_without(cell, name)
        return others


def _cell_without(cell: Cell, name: str) -> Cell | str:
    from repro.runs.experiment import prepare

    value = cell.knob_values.get(name)
    if value is None:
        return "not read by this system"
    defaults = [knobs_of(kind)[name].default for kind in settings_of(cell.system) if name in knobs_of(kind)]
    if value in (*defaults, *(getattr(part, name, None) for part in platform_of(cell.platform).parts)):
        return "equal to the default"
    implied = getattr(SYSTEMS.get(cell.system), "implied", dict)({name: value})
    for knob in (name, *implied):
        cell = cell.without(knob)
    try:
        return prepare(cell).cell
    except UserError as error:
        return f"{NEEDED}: {error}"


def _audit_rows(runs: "Sequence[StoredRun]", reduced: Mapping[tuple[Cell, str], Cell | str]) -> list[dict[str, str]]:
    """Return a row, with the reason, for each option that changed no number in any of a system's cells."""
    from repro.runs.experiment import prepare

    summaries = {run.cell.key: run.summary for run in runs}
    reasons: dict[tuple[str, str], list[str]] = {}
    for (cell, name), other in reduced.items():
        if isinstance(other, Cell):
            with_option, without_option = (summaries.get(run_cell.key) for run_cell in (prepare(cell).cell, other))
            other = "same numbers without it" if with_option is not None and with_option == without_option else NEEDED
        reasons.setdefault((name, cell.system), []).append(other)
    idle = {key: texts[0] for key, texts in reasons.items() if not any(reason.startswith(NEEDED) for reason in texts)}
    return [{"option": name, "system": system, "why": reason} for (name, system), reason in idle.items()]


@dataclass(frozen=True, kw_only=True)
class Repeated(Checked):
    panel: ClassVar[str] = opt.RUNS
    repeats: Annotated[int, Range(1, 1000)] | None = None
    """Runs of each setting, with seeds from 0 on [default: the grid's own seeds, or seed 0]."""
    interleave: bool = False
    """Run one repeat of every setting before the next repeat, so that a busy machine slows all settings alike."""
    max_cells: Annotated[int, Range(1, 10**8)] = 20_000
    """The most runs that a grid may have."""


def bench(
    *,
    cells: CellOptions,
    dataset_path: opt.DatasetPath = None,
    knobs: Annotated[Given, KNOBS],
    endpoint: EndpointOptions,
    knob: opt.KnobTexts = None,
    stored: opt.Stored,
    placement: opt.Placement,
    profiled: Profiled,
    audited: Audited,
    output: opt.Output,
) -> None:
    """Run systems on a workload. The same command again continues, and reuses finished runs."""
    opened = placement.opened()
    if endpoint.url is not None and cells.platform_names == (CPU,):
        cells = replace(cells, platform=["endpoint"])
    if endpoint.url is not None and not cells.system:
        cells = replace(cells, system=["openai-http"])
    platforms = [platform_of(name) for name in cells.platform_names]
    options = {**knobs, **opt.given_options(**asdict(endpoint)), **opt.data_file_knobs(dataset_path, knobs)}
    options |= profiled.knobs(knobs.get("device"), platforms[0], next(iter(cells.executor or ()), None))
    options |= opt.parse_knobs(knob or (), options, several=True)
    grid = cells.grid(options)
    if output.plot is not None:
        check_plot(output.plot, *grid.files)

    requested = grid.cells()
    reduced = audited.without_each(requested, options)

    def show(all_runs: "Sequence[StoredRun]") -> list[Path]:
        audit_keys = {cell.key for cell in reduced.values() if isinstance(cell, Cell)}
        runs = [run for run in all_runs if run.cell.key not in audit_keys] if reduced else all_runs
        _print_or_json(runs, grid.varied, _audit_rows(all_runs, reduced) if audited.audit else None, json=output.json)
        for run in runs if profiled.profile and not output.json else ():
            _print_profile(run)
        if output.plot is None:
            return []
        title = f"repro bench on {', '.join(platform.title for platform in platforms)}"
        return _save_plot(output.plot, title, runs, grid.varied)

    cells_to_run = [*requested, *(cell for cell in reduced.values() if isinstance(cell, Cell))]
    varied = () if audited.audit else grid.varied
    make_and_show(cells_to_run, stored.store, show, opened, stored, placement, output, varied)


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
    output: opt.Output,
) -> None:
    """Run every combination of a grid's values. The same command again continues, and reuses finished runs."""
    from repro.runs.progress import MANY_CELLS

    opened = placement.opened()
    check_regular("grid", grid)
    expanded = grid_of_file(grid).repeated(repeated.repeats)
    require(
        len(expanded.seed) > 1 or not repeated.interleave,
        "interleave has no effect with one run of each setting: add --repeats, or leave it out",
    )
    if output.plot is not None:
        check_plot(output.plot, grid, *expanded.files)
    if MANY_CELLS <= expanded.num_cells <= repeated.max_cells:
        say(f"{expanded.num_cells:,} cells", file=sys.stderr)
    cells = expanded.cells(repeated.max_cells)

    def show(runs: "Sequence[StoredRun]") -> list[Path]:
        _print_or_json(runs, expanded.varied, json=output.json)
        if output.plot is None:
            return []
        return _save_plot(output.plot, f"repro sweep {grid.name}", runs, expanded.varied)

    ordered = in_turns(cells) if repeated.interleave else cells
    make_and_show(ordered, stored.store, show, opened, stored, placement, output, expanded.varied)


# -- runs of a grid ---------------------------------------------------------------------------------------


def make_and_show(
    cells: Sequence[Cell],
    store: "Store",
    show: "Callable[[Sequence[StoredRun]], list[Path]]",
    opened: "AbstractContextManager[Pool]",
    stored: opt.Stored,
    placement: opt.Placement,
    output: opt.Output,
    varied: Sequence[str] = (),
) -> None:
    """Run the cells, whose table compares ``varied`` knobs; a dry run only lists them. ``show`` returns the files that it draws. Exits
    with code 1 if a run failed or is INVALID."""
    with opened as pool:
        with _readable_data(cells):
            if varied and not output.dry_run:
                cells = with_common_search(cells, varied)
            sweep = sweep_of(cells, store, force=stored.force, pool=pool)
        if output.dry_run:
            pool.check(sweep.experiments)
            reasons = [(experiment.cell.folder_name, sweep.why(experiment.cell)) for experiment in sweep.experiments]
            if output.json:
                print_json({"runs": [{"run": name, "why": reason} for name, reason in reasons]})
            else:
                print_table("What would run, or be reused", ("run", "why"), reasons)
            return
        for line in data_of(sweep.experiments):
            say(line, file=sys.stderr)
        say_what_runs(sweep)
        outcomes = run_sweep(sweep, continue_on_error=output.continue_on_error, jobs=placement.jobs)
    if files := show(sweep.runs):
        say(f"files: {', '.join(map(str, files))}", file=sys.stderr)
    say_what_ran(outcomes, store.root)
    if any(map(is_failure, outcomes)):
        raise typer.Exit(1)


@contextmanager
def _readable_data(cells: Sequence[Cell]) -> Iterator[None]:
    """The body reads the cells' data files: failures that come from their content become UserErrors that name the file."""
    datasets: dict[str, dict[str, None]] = {}
    for cell in cells:
        if (path := cell.knob_values.get("dataset_path")) is not None:
            datasets.setdefault(str(path), {})[cell.dataset] = None
        if (path := cell.knob_values.get("workload")) is not None:
            check_regular("workload", Path(str(path)))
    with ExitStack() as stack:
        for path, names in datasets.items():
            stack.enter_context(readable("dataset_path", Path(path), names))
        yield


def _print_or_json(
    runs: "Sequence[StoredRun]", varied: Sequence[str], idle: Sequence[Mapping[str, str]] | None = None, *, json: bool
) -> None:
    """``idle`` are the options that changed no number, or None if nobody asked."""
    if json:
        print_json({"runs": [run_json(run) for run in runs]} | ({} if idle is None else {"audit": idle}))
        return
    print_runs(by_setting(runs), varied)
    if idle:
        print_table("Options that changed no number", tuple(idle[0]), [tuple(row.values()) for row in idle])
    elif idle is not None:
        say("every option changed some number")


def _save_plot(path: Path, title: str, runs: "Sequence[StoredRun]", varied: Sequence[str]) -> list[Path]:
    """Draw means over the repeats of each setting, with their intervals. The CSV also holds P50 and P99 of latencies."""
    from repro.runs.store import over_repeats

    metrics = {
        "throughput_tok_s": ("throughput_tok_s", None),
        **{f"{name}_latency_s": ("e2el_s", part) for name, part in LATENCIES.items()},
    }
    rows = []
    for row in by_setting(runs):
        cell = row[0].cell
        knobs = [f"{name}={cell.knob_values.get(name, 'default')}" for name in varied]
        means = {name: over_repeats(row, *metric) for name, metric in metrics.items()}
        rows.append(
            {
                "label": ", ".join([row[0].title, cell.dataset, cell.platform, _rate_text(row[0]), *knobs]),
                **{name: mean.mean for name, mean in means.items()},
                **{f"{name}_half": mean.half_width for name, mean in means.items()},
                "runs": len(row),
                "obtained": "; ".join(sorted({run.obtained for run in row})),
                "valid": all(run.validity.valid for run in row),
            }
        )
    unit, latency = "tok/s", "latency"
    if all(run.family.ends_at_first_token for run in runs):
        unit, latency = "turns/s", "TTFT"
    titles = {
        "throughput_tok_s": f"throughput ({unit})",
        "mean_latency_s": f"mean {latency} (s)",
        "longest_latency_s": f"longest {latency} (s)",
    }
    return [*save_plot(path, title, rows, titles)]


def _print_profile(run: "StoredRun") -> None:
    summary, facts = run.summary, run.facts
    name = f"{run.record.manifest['system']}, {run.cell.dataset}, {_rate_text(run)}"
    if summary["profile"] is None:
        say(f"{name}: no step was taken apart")
    else:
        _print_parts(name, summary["profile"])
    card = f" of {facts['bound']['card']}" if "bound" in facts else ""
    say(
        f"share of roofline{card}: {percent(summary['roofline_share'])}; CUDA graph hit rate: "
        f"{percent(summary['graph_hit_rate'])}; outside the forward: {percent(summary['outside_forward_share'])}"
    )


def _print_parts(name: str, profile: Mapping[str, Any]) -> None:
    parts = (*STEP_PARTS, "whole step")
    table: dict[str, Sequence[str]] = {"ms, share": parts}
    for title, kinds in PROFILE_COLUMNS.items():
        count = sum(profile[kind]["num_steps"] for kind in kinds)
        seconds = [sum(profile[kind]["seconds"][part] for kind in kinds) for part in STEP_PARTS]
        total = sum(seconds)
        table[f"{title} ({count})"] = [
            f"{number(1e3 * value / count, 3)}  {percent(value / total):>7}" if count and total else "-"
            for value in (*seconds, total)
        ]
    print_table(f"Where a step's time goes: {name}", tuple(table), list(zip(*table.values(), strict=True)))


def _rate_text(run: "StoredRun") -> str:
    rate = rate_of(run) if run.cell.rate is None else f"{run.cell.rate:g} req/s"
    return "all at once" if rate == "inf" else rate
