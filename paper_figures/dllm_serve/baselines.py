"""Every sampler alone and batched, beside dLLM-Serve, in one run; no figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paper_figures.common.caption import (
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    require_runs,
    validity_text,
)
from paper_figures.common.repeats import Repeats
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun, over_repeats

NAME = "baselines"
TITLE = "dLLM-Serve baselines: every sampler alone and batched"
SOURCE = "this project"
PLATFORMS = ("cpu-tiny",)
DECIDES_ON: tuple[str, ...] = ()

DATASET = "burst"
NUM_REQUESTS = 8

CSV_COLUMNS = (
    "platform",
    "system",
    "options",
    "batching",
    "batch_size",
    "seed",
    "throughput_tok_s",
    "mean_latency_s",
    "mean_running",
    "outside_forward_share",
    "num_steps",
    "obtained",
    "valid",
    "run_folder",
)
TABLE_COLUMNS = (
    "sampler",
    "alone tok/s",
    "batched tok/s",
    "batch",
    "gain",
    "outside forward, alone",
    "batched",
    "obtained",
    "valid",
)

BATCHING = ("alone", "batched")


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    system: str
    options: Knobs = ()

    @property
    def alone(self) -> Knobs:
        return (("max_num_seqs" if self.system == "dllm-serve" else "batch_size", 1),)


ROWS = (
    Row(label="dLLM-Serve", system="dllm-serve"),
    Row(label="Fast-dLLM, dual cache", system="fast-dllm"),
    Row(label="Fast-dLLM, prefix cache", system="fast-dllm", options=(("cache", "prefix"),)),
    Row(label="Fast-dLLM, no cache", system="fast-dllm", options=(("cache", "none"),)),
    Row(label="dLLM-Cache", system="dllm-cache"),
    Row(label="Sparse-dLLM", system="sparse-dllm"),
    Row(label="LLaDA, no cache", system="llada"),
)


def cells(view: View) -> list[Cell]:
    """All requests at once; batched is the largest static batch, or dLLM-Serve's own packing."""
    return [_cell(view, row, batching, seed) for row in ROWS for batching in BATCHING for seed in view.seeds]


def _cell(view: View, row: Row, batching: str, seed: int) -> Cell:
    alone = row.alone if batching == "alone" else ()
    knobs = (("num_prompts", NUM_REQUESTS), *row.options, *alone, *view.together(NAME))
    if row.system != "dllm-serve":
        knobs += view.baseline_knobs()
    return view.cell(NAME, row.system, DATASET, seed=seed, knobs=knobs)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    repeats = Repeats(runs, view)
    found = {(row, batching): repeats.of(_cell(view, row, batching, 0)) for row in ROWS for batching in BATCHING}
    rows = [_table_row(row, found[row, "alone"], found[row, "batched"]) for row in ROWS]
    csv_rows = [_csv_row(row, name, run, view) for (row, name), own in found.items() for run in own]
    missing = [f"{row.label} {name}" for (row, name), own in found.items() if not own]
    notes = [
        *invalid_notes(runs),
        *missing_note(missing, len(found)),
        f"Seeds {', '.join(map(str, view.seeds))}; ± is the 95 % interval of their mean (Student's t).",
        *how_obtained(runs, ["runs"] * len(runs)),
        f"{NUM_REQUESTS} requests of {DATASET} at once. Outside forward: share of step time that is not the model, its head "
        "and the softmax over it: schedule, metadata, selection and bookkeeping.",
    ]
    stem = f"{NAME}-{view.stem}"
    title = f"{TITLE} - {view.platform.title}"
    return save_table(
        out,
        stem,
        title=title,
        columns=TABLE_COLUMNS,
        rows=rows,
        notes=notes,
        csv_columns=CSV_COLUMNS,
        csv_rows=csv_rows,
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """No claim of the paper rests on it."""
    return []


def _csv_row(row: Row, name: str, run: StoredRun, view: View) -> tuple[object, ...]:
    return (
        view.platform.name,
        row.system,
        " ".join(f"{key}={value}" for key, value in row.options),
        name,
        run.facts.get("batch_size"),
        run.cell.seed,
        run.summary["throughput_tok_s"],
        run.summary["e2el_s"]["mean"],
        run.summary["mean_running"],
        run.summary["outside_forward_share"],
        run.summary["num_steps"],
        run.obtained,
        run.validity.valid,
        run.cell.folder_name,
    )


def _table_row(row: Row, alone: Sequence[StoredRun], batched: Sequence[StoredRun]) -> tuple[str, ...]:
    speeds = [over_repeats(own, "throughput_tok_s") for own in (alone, batched)]
    single, several = (speed.mean for speed in speeds)
    sizes = {size for run in batched if (size := run.facts.get("batch_size")) is not None}
    shares = [over_repeats(own, "outside_forward_share").mean for own in (alone, batched)]
    return (
        row.label,
        *map(_text, speeds),
        ", ".join(map(str, sorted(sizes))) or "packed",
        f"{several / single:.2f}x" if single and several else "-",
        *("-" if share is None else f"{100 * share:.1f} %" for share in shares),
        obtained_text([*alone, *batched]),
        validity_text([*alone, *batched]),
    )


def _text(value: Interval) -> str:
    if value.mean is None:
        return "-"
    return f"{value.mean:.1f}" + (f" ± {value.half_width:.1f}" if value.half_width is not None else "")
