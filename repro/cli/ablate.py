"""``repro ablate``: one component on and off, all else equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table

if TYPE_CHECKING:
    from repro.ablation import Variant
    from repro.store import StoredRun

DATASETS = ("livebench", "burst", "osc")


def ablate(
    component: Annotated[str, typer.Option(help="engine, scheduler, budgeting, sparsity or refresh; ladder for all, one by one.")],
    dataset: Annotated[list[str] | None, typer.Option(help="Several times [default: livebench, burst, osc].")] = None,
    platform: Annotated[str, typer.Option(help="Where ('repro list' shows platforms).")] = "cpu-tiny",
    reading: Annotated[str | None, typer.Option(help="Of Sparse-dLLM: published, efficient or policy.")] = None,
    request_rate: Annotated[str | None, typer.Option(help="Requests/s, or inf [default: the platform's highest].")] = None,
    num_runs: Annotated[int, typer.Option(help="Repeats with seeds 0, 1, ...")] = 1,
    limit: Annotated[int, typer.Option(help="Problems per task, where variants commit other tokens; 0 for no accuracy.")] = 200,
    result_dir: Annotated[Path | None, typer.Option(help="Where run folders go [default: results/local].")] = None,
    force: Annotated[bool, typer.Option(help="Run again what is already stored.")] = False,
    json: opt.Json = False,
) -> None:  # fmt: skip
    """Throughput, latency, memory, concurrency and accuracy with a component switched."""
    from repro.ablation import LADDER, component as component_of  # isort: skip
    from repro.cli.sweep import load_all, prepare_all, run_sweep, say_what_ran
    from repro.figures import View, default_reading
    from repro.paths import LOCAL
    from repro.platforms import platform as platform_of
    from repro.store import Store

    where = platform_of(platform)
    view = View(platform=where, reading=reading or default_reading(where), num_runs=num_runs)
    variants: Sequence[Variant] = LADDER if component == "ladder" else component_of(component).variants
    changes_tokens = component != "ladder" and component_of(component).changes_tokens
    rate = max(where.rates) if request_rate is None else opt.parse_rate(request_rate)
    names = dataset or DATASETS
    keys = [(name, variant) for name in names for variant in variants]
    if changes_tokens and where.executor == "torch" and limit > 0:
        keys += [(task, variant) for task in TASKS for variant in variants]
    grid = {
        (name, variant): [_cell(variant, view, name, rate, seed, limit) for seed in view.seeds]
        for name, variant in keys
    }
    experiments = prepare_all([cell for cells in grid.values() for cell in cells])
    store = Store(result_dir or LOCAL)
    outcomes = run_sweep(experiments, store, force=force, continue_on_error=False)
    runs = iter(load_all(experiments, store))
    rows = [_row(name, variant, [next(runs) for _ in cells]) for (name, variant), cells in grid.items()]
    _relate(rows)
    if json:
        print_json({"component": component, "platform": where.name, "reading": view.reading, "rows": rows})
    else:
        print_table(
            f"Ablation of {component} on {where.title}, {'all at once' if rate is None else f'{rate:g} req/s'}",
            ("dataset", "variant", "tok/s", "relative", "mean s", "p99 s", "running", "KV rows", "accuracy", "obtained", "valid"),
            [_as_text(row) for row in rows],
        )  # fmt: skip
    say_what_ran(outcomes, store.root)


TASKS = ("mini-gsm", "mini-code")
"""Data sets whose answers are graded."""


def _cell(variant: Variant, view: Any, name: str, rate: float | None, seed: int, limit: int) -> Any:
    if name not in TASKS:
        return variant.cell(view, name, rate, seed)
    from dataclasses import replace

    cell = variant.cell(view, name, None, seed)
    return replace(cell, knobs=(*cell.knobs, ("num_requests", limit)))


def _row(name: str, variant: Variant, runs: Sequence[StoredRun]) -> dict[str, Any]:
    from repro.metrics import mean_interval

    valid = [run for run in runs if run.validity.valid]

    def over_runs(metric: str, part: str | None = None) -> float | None:
        values = [run.summary[metric] if part is None else (run.summary[metric] or {}).get(part) for run in valid]
        return mean_interval([value for value in values if value is not None]).mean

    throughput = mean_interval([v for run in valid if (v := run.summary["throughput_tok_s"]) is not None])
    return {
        "dataset": name, "variant": variant.label, "system": variant.system, "ours": variant.is_ours,
        "throughput_tok_s": throughput.mean, "throughput_half_width": throughput.half_width, "relative": None,
        "mean_latency_s": over_runs("e2el_s", "mean"), "p99_latency_s": over_runs("e2el_s", "p99"),
        "std_latency_s": over_runs("e2el_s", "std"), "mean_running": over_runs("mean_running"),
        "kv_rows": runs[0].record.manifest.get("facts", {}).get("kv_rows"),
        "accuracy": over_runs("accuracy", "value"), "obtained": runs[0].record.obtained,
        "valid": len(valid) == len(runs), "run_folders": [run.cell.folder_name for run in runs],
    }  # fmt: skip


def _relate(rows: Sequence[dict[str, Any]]) -> None:
    """Throughput over the first variant's, per data set."""
    base: dict[str, float | None] = {}
    for row in rows:
        first = base.setdefault(row["dataset"], row["throughput_tok_s"])
        row["relative"] = row["throughput_tok_s"] / first if first and row["throughput_tok_s"] is not None else None


def _as_text(row: dict[str, Any]) -> tuple[str, ...]:
    relative, accuracy = row["relative"], row["accuracy"]
    return (
        row["dataset"], row["variant"] + (" (ours)" if row["ours"] else ""), number(row["throughput_tok_s"]),
        "-" if relative is None else f"{relative:.2f}x", number(row["mean_latency_s"], 2), number(row["p99_latency_s"], 2),
        number(row["mean_running"]), "-" if row["kv_rows"] is None else f"{row['kv_rows']:,}",
        "-" if accuracy is None else f"{100 * accuracy:.1f} %", row["obtained"], "VALID" if row["valid"] else "INVALID",
    )  # fmt: skip
