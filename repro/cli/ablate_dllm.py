"""``repro ablate`` of dLLM-Serve's components."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engines.dllm.method import PRESETS
from engines.errors import require
from repro.cli.output import number, ratio
from repro.cli.study import Row, Runs, Study, difference, difference_text, paired_notes

if TYPE_CHECKING:
    from repro.cli.ablate import Asked
    from repro.reports.ablation import Variant
    from repro.reports.figures import View
    from repro.runs.cell import Cell
    from repro.runs.store import StoredRun
    from repro.systems.platforms import Platform

NUM_PROBLEMS = 200
"""Problems of a task, where no limit is given."""

MEASURED_RUNS = 5
"""Repeats where none are asked for: of three an interval is 2.5 times as wide as the spread of its ratios (t = 4.3), of five 1.2 times."""
WORDS = ("slower", "faster")

COLUMNS = {
    "tok/s": lambda row: _speed(row),
    "relative": lambda row: _ratio(row, "relative"),
    "difference": difference_text,
    "tok/CPU s": lambda row: number(row["tokens_per_processor_s"]),
    "relative, CPU s": lambda row: _ratio(row, "relative_processor"),
    "mean s": lambda row: number(row["mean_latency_s"], 2),
    "p99 s": lambda row: number(row["p99_latency_s"], 2),
    "running": lambda row: number(row["mean_running"]),
    "KV rows": lambda row: "-" if row["kv_rows"] is None else f"{row['kv_rows']:,}",
    "accuracy": lambda row: "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %",
    "obtained": lambda row: row["obtained"],
}


def study(asked: Asked, knobs: Mapping[str, Any]) -> Study:
    from repro.reports.ablation import BASE, variants_of
    from repro.reports.figures import View, default_reading
    from repro.systems.platforms import DllmPart
    from repro.systems.platforms import platform as platform_of

    asked.refuse("model")
    where = platform_of(asked.platform or "cpu-tiny")
    part = where.part(DllmPart)
    view = View(
        platform=where,
        reading=default_reading(where) if asked.reading is None else asked.reading,  # type: ignore[arg-type]
        num_runs=len(asked.seeds(MEASURED_RUNS if where.executor != "roofline" else 1)),
        knobs=tuple(knobs.items()),
    )
    _check_varied(asked.component, variants_of(asked.component, view), knobs)
    variants = (*variants_of(asked.component, view), *asked.own())
    has_baseline = any(variant.system == BASE for variant in variants)
    if not has_baseline:
        asked.refuse("reading", why=", which compares with no baseline")
    rate = asked.rate(max(part.rates))
    tasks = _tasks(asked, where)
    datasets = dict.fromkeys([*(asked.dataset or part.num_requests), *tasks])
    problems = NUM_PROBLEMS if asked.limit is None else asked.limit
    return Study(
        component=asked.component,
        platform=where,
        title=where.title,
        cells={
            (name, variant): _cells(variant, view, name, rate, asked.component, problems)
            for name in datasets
            for variant in variants
        },
        said=("all at once" if rate is None else f"{rate:g} req/s")
        + (f", Sparse-dLLM as {view.reading}" if has_baseline else ""),
        about={"reading": view.reading if has_baseline else None},
        row=_row,
        columns=COLUMNS,
        notes=_notes,
        plotted={
            "throughput_tok_s": "throughput (tok/s)",
            "relative": "relative throughput",
            "relative_processor": "relative, per processor second",
            "mean_latency_s": "mean latency (s)",
        },
        halves={"throughput_tok_s": "throughput_half_width"},
        guides={"relative": 1, "relative_processor": 1},
    )


def _check_varied(component: str, variants: Sequence[Variant], knobs: Mapping[str, Any]) -> None:
    """Refuse a knob, or a preset of one, that a component varies: a variant that is without it would be labelled so and have it."""
    varied = {name for variant in variants for name, _ in variant.knobs}
    for name, value in knobs.items():
        sets = [name] if name != "preset" else [each for each in PRESETS.get(str(value), {}) if each in varied]
        for each in sets:
            said = f"{name}={value!r}" + ("" if each == name else f" sets {each}, which")
            require(
                each not in varied,
                f"{said} is what component={component!r} varies: leave it out"
                + ("" if each == name else ", or give its other knobs one by one"),
            )


def _tasks(asked: Asked, where: Platform) -> Sequence[str]:
    """The generated tasks, where variants commit other tokens and are measured."""
    from repro.reports.ablation import changes_tokens
    from repro.tasks.registry import TASKS

    has_tasks = changes_tokens(asked.component) and where.executor == "torch"
    if not has_tasks:
        asked.refuse("limit", why=f" of platform={where.name!r}, where nothing is graded")
    return [entry.name for entry in TASKS.values() if entry.is_generated and has_tasks and asked.limit != 0]


def _cells(variant: Variant, view: View, name: str, rate: float | None, component: str, problems: int) -> list[Cell]:
    from repro.tasks.registry import TASKS

    if name in TASKS and TASKS[name].is_generated:
        cells = [variant.cell(view, name, None, seed) for seed in view.seeds]
        cells = [replace(cell, knobs=(*cell.knobs, ("num_prompts", problems))) for cell in cells]
    else:
        cells = [variant.cell(view, name, rate, seed, f"ablate-{component}") for seed in view.seeds]
    return [view.applied(cell) for cell in cells]


def _row(runs: Runs, base: Runs) -> Row:
    from repro.runs.statistics import mean_interval
    from repro.runs.store import over_repeats

    throughput = over_repeats(runs, "throughput_tok_s")
    speeds, first = (_by_seed(each, lambda run: run.summary["throughput_tok_s"]) for each in (runs, base))
    per_processor_s, first_s = (_by_seed(each, lambda run: run.tokens_per_processor_s) for each in (runs, base))
    return {
        "throughput_tok_s": throughput.mean,
        "throughput_half_width": throughput.half_width,
        "throughput_by_seed": speeds,
        **_against(speeds, first, "relative", "difference"),
        "tokens_per_processor_s": mean_interval(list(per_processor_s.values())).mean,
        **_against(per_processor_s, first_s, "relative_processor", "difference_processor"),
        "mean_latency_s": over_repeats(runs, "e2el_s", "mean").mean,
        "p99_latency_s": over_repeats(runs, "e2el_s", "p99").mean,
        "std_latency_s": over_repeats(runs, "e2el_s", "std").mean,
        "mean_running": over_repeats(runs, "mean_running").mean,
        "kv_rows": runs[0].record.manifest.get("facts", {}).get("kv_rows"),
        "accuracy": over_repeats(runs, "accuracy", "value").mean,
    }


def _by_seed(runs: Runs, of: Callable[[StoredRun], float | None]) -> dict[int, float]:
    return {run.cell.seed: value for run in runs if run.validity.valid and (value := of(run)) is not None}


def _against(ours: Mapping[int, float], first: Mapping[int, float], name: str, which: str) -> Row:
    """How many times the first variant's, pair by pair."""
    from repro.runs.statistics import paired_ratio

    found = paired_ratio(ours, first)
    return {
        name: found.mean,
        f"{name}_low": found.low,
        f"{name}_high": found.high,
        which: difference(found.low, found.high, 1, WORDS),
    }


def _speed(row: Row) -> str:
    """An interval that holds nothing and less is none: then the slowest and the fastest repeat."""
    mean, half = row["throughput_tok_s"], row["throughput_half_width"]
    if half is None or half < mean:
        return number(mean, half_width=half)
    speeds = row["throughput_by_seed"].values()
    return f"{number(mean)} ({number(min(speeds))} to {number(max(speeds))})"


def _ratio(row: Row, name: str) -> str:
    return "-" if row["against"] is None else ratio(row[name], row[f"{name}_low"], row[f"{name}_high"])


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    yield from paired_notes(rows, "relative", 1)
    if any(row["tokens_per_processor_s"] is not None for row in rows):
        yield "tok/CPU s: tokens for each second of a processor, which other work on the machine changes less than tokens a second"
    apart = [
        f"{row['variant']} on {row['dataset']} ({row['difference_processor']})"
        for row in rows
        if row["against"] is not None and row["difference_processor"] not in (None, row["difference"])
    ]
    if apart:
        yield f"by processor seconds it is otherwise: {', '.join(apart)}"
