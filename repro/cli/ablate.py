"""``repro ablate``: one component on and off, all else equal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.option_groups import Placement, spread
from repro.cli.output import number, print_json, print_table, say
from repro.cli.said import lengths_json, lengths_line
from repro.systems.dllm.part import DllmPart

if TYPE_CHECKING:
    from repro.reports.ablation import Variant
    from repro.reports.figures import View
    from repro.runs.cell import Cell
    from repro.runs.store import StoredRun

NUM_PROBLEMS = 200
"""Of a task, where no limit is given."""


@spread
def ablate(
    *,
    component: Annotated[
        str,
        typer.Option(
            help="engine, scheduler, budgeting, sparsity or refresh; ladder for all, one by one. Of AMPD: routing or reordering. "
            "Of LAPS: graphs, disaggregation, awd or reserve."
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Several times [default: livebench, burst, osc; dureader, gaia of AMPD, lmsys-chat-1m of LAPS]."
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(help="Where ('repro list' shows platforms) [default: cpu-tiny, h20x32 for AMPD, h200 for LAPS]."),
    ] = None,
    reading: Annotated[
        str | None,
        typer.Option(
            help="Of Sparse-dLLM: published, efficient or policy [default: published where simulated, else efficient]."
        ),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Requests/s, or inf [default: the platform's highest; 2 of AMPD, 60 of LAPS].")
    ] = None,
    num_runs: Annotated[
        int | None,
        typer.Option(help="Repeats with seeds 0, 1, ... [default: 3 where measured, 10 on clusters, else 1]."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Problems per task, where variants commit other tokens and are measured; 0 for no accuracy [default: 200]."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of AMPD and LAPS [default: Llama-3.1-70B, Qwen2.5-14B].")] = None,
    result_dir: opt.ResultDir = None,
    placement: Placement,
    force: opt.Force = False,
    accept_other_code: opt.OtherCode = False,
    plot: opt.Plot = None,
    json: opt.Json = False,
) -> None:
    """Throughput, latency, memory, concurrency and accuracy with a component switched."""
    from engines.bounds import check_most
    from engines.errors import require
    from repro.cli.ablate_cluster import of_cluster
    from repro.cli.ablate_paired import ablate_paired
    from repro.cli.ablate_prefill import of_prefill
    from repro.cli.plots import check_plot, save_plot
    from repro.cli.sweep import require_alike, run_sweep, say_what_ran, sweep_of
    from repro.paths import LOCAL
    from repro.reports.ablation import BASE, CLUSTER_COMPONENTS, LADDER, PREFILL_COMPONENTS
    from repro.reports.ablation import component as component_of
    from repro.reports.figures import MEASURED_RUNS, View, default_reading
    from repro.runs.store import Store
    from repro.systems.platforms import platform as platform_of
    from repro.tasks.registry import TASKS

    check_most("limit", limit)
    require(limit is None or limit >= 0, f"limit={limit} must not be negative")
    if component in (*CLUSTER_COMPONENTS, *PREFILL_COMPONENTS):
        require(
            reading is None, f"reading={reading!r} is of Sparse-dLLM and has no effect on {component}: leave it out"
        )
        require(limit is None, f"limit={limit} has no effect on {component}, which changes no tokens: leave it out")
        family = (
            of_prefill(component, platform or "h200", request_rate)
            if component in PREFILL_COMPONENTS
            else of_cluster(component, platform or "h20x32", request_rate)
        )
        return ablate_paired(
            component,
            family,
            datasets=dataset,
            num_runs=num_runs,
            model=model,
            result_dir=result_dir,
            placement=placement,
            force=force,
            accept_other_code=accept_other_code,
            plot=plot,
            json=json,
        )
    opened = placement.opened()
    require(model is None, f"model={model!r} has no effect on component={component!r}: leave it out")
    where = platform_of(platform or "cpu-tiny")
    if plot is not None:
        check_plot(plot)
    if num_runs is None:
        num_runs = MEASURED_RUNS if where.executor != "roofline" else 1
    view = View(platform=where, reading=default_reading(where) if reading is None else reading, num_runs=num_runs)  # type: ignore[arg-type]
    comparison = f"ablate-{component}"
    variants: Sequence[Variant] = LADDER if component == "ladder" else component_of(component).variants
    has_baseline = any(variant.system == BASE for variant in variants)
    stands_for = f", Sparse-dLLM as {view.reading}" if has_baseline else ""
    require(
        reading is None or has_baseline,
        f"reading={reading!r} has no effect on component={component!r}, which compares with no baseline: leave it out",
    )
    changes_tokens = component != "ladder" and component_of(component).changes_tokens
    has_tasks = changes_tokens and where.executor == "torch"
    require(
        limit is None or has_tasks,
        f"limit={limit} has no effect on component={component!r} of platform={where.name!r}, where nothing is graded: leave it out",
    )
    num_problems = NUM_PROBLEMS if limit is None else limit
    rate = max(where.part(DllmPart).rates) if request_rate is None else opt.parse_rate(request_rate)
    names = dataset or list(where.part(DllmPart).num_requests)
    generated = [entry.name for entry in TASKS.values() if entry.is_generated]
    keys = [(name, variant) for name in names for variant in variants]
    if has_tasks and num_problems > 0:
        keys += [(task, variant) for task in generated for variant in variants]
    grid = {
        (name, variant): [
            _task_cell(variant, view, name, seed, num_problems)
            if name in generated
            else variant.cell(view, name, rate, seed, comparison)
            for seed in view.seeds
        ]
        for name, variant in keys
    }
    store = Store(result_dir or LOCAL, accept_other_code=accept_other_code)
    with opened as pool:
        sweep = sweep_of([cell for cells in grid.values() for cell in cells], store, force=force, pool=pool)
        outcomes = run_sweep(sweep, jobs=placement.jobs)
    runs = iter(sweep.runs)
    require_alike(sweep.runs, f"ablate --component {component}")
    rows = [_row(name, variant, [next(runs) for _ in cells]) for (name, variant), cells in grid.items()]
    _relate(rows)
    if json:
        lengths = lengths_json(sweep.runs)
        print_json(
            {
                "component": component,
                "platform": where.name,
                "reading": view.reading if has_baseline else None,
                "lengths": lengths,
                "rows": rows,
            }
        )
    else:
        print_table(
            f"Ablation of {component} on {where.title}, {'all at once' if rate is None else f'{rate:g} req/s'}{stands_for}",
            (
                "dataset",
                "variant",
                "tok/s",
                "relative",
                "mean s",
                "p99 s",
                "running",
                "KV rows",
                "accuracy",
                "obtained",
                "verdict",
            ),
            [_as_text(row) for row in rows],
        )
        say(lengths_line(sweep.runs))
    if plot is not None:
        plotted = [{"label": f"{row['dataset']}: {row['variant']}", **row} for row in rows]
        drawn = save_plot(plot, f"Ablation of {component} on {where.title}", plotted)
        say(f"files: {', '.join(map(str, drawn))}", file=sys.stderr)
    say_what_ran(outcomes, sweep.store.root)
    return None


def _task_cell(variant: Variant, view: View, task: str, seed: int, limit: int) -> Cell:
    from dataclasses import replace

    cell = variant.cell(view, task, None, seed)
    return replace(cell, knobs=(*cell.knobs, ("num_prompts", limit)))


def _row(name: str, variant: Variant, runs: Sequence[StoredRun]) -> dict[str, Any]:
    from repro.runs.store import over_repeats

    throughput = over_repeats(runs, "throughput_tok_s")
    return {
        "dataset": name,
        "variant": variant.label,
        "system": variant.system,
        "ours": variant.is_ours,
        "throughput_tok_s": throughput.mean,
        "throughput_half_width": throughput.half_width,
        "relative": None,
        "mean_latency_s": over_repeats(runs, "e2el_s", "mean").mean,
        "p99_latency_s": over_repeats(runs, "e2el_s", "p99").mean,
        "std_latency_s": over_repeats(runs, "e2el_s", "std").mean,
        "mean_running": over_repeats(runs, "mean_running").mean,
        "kv_rows": runs[0].record.manifest.get("facts", {}).get("kv_rows"),
        "accuracy": over_repeats(runs, "accuracy", "value").mean,
        "obtained": "; ".join(sorted({run.obtained for run in runs})),
        "valid": all(run.validity.valid for run in runs),
        "run_folders": [run.cell.folder_name for run in runs],
    }


def _relate(rows: Sequence[dict[str, Any]]) -> None:
    """Throughput over the first variant's, per data set."""
    base: dict[str, float | None] = {}
    for row in rows:
        first = base.setdefault(row["dataset"], row["throughput_tok_s"])
        row["relative"] = row["throughput_tok_s"] / first if first and row["throughput_tok_s"] is not None else None


def _as_text(row: dict[str, Any]) -> tuple[str, ...]:
    relative, accuracy = row["relative"], row["accuracy"]
    return (
        row["dataset"],
        row["variant"] + (" (ours)" if row["ours"] else ""),
        number(row["throughput_tok_s"])
        + (f" ± {row['throughput_half_width']:.1f}" if row["throughput_half_width"] is not None else ""),
        "-" if relative is None else f"{relative:.2f}x",
        number(row["mean_latency_s"], 2),
        number(row["p99_latency_s"], 2),
        number(row["mean_running"]),
        "-" if row["kv_rows"] is None else f"{row['kv_rows']:,}",
        "-" if accuracy is None else f"{100 * accuracy:.1f} %",
        row["obtained"],
        "VALID" if row["valid"] else "INVALID",
    )
