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
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell, Scalar
from repro.runs.store import StoredRun, over_repeats

NAME = "baselines"
TITLE = "dLLM-Serve baselines: every sampler alone and batched"
SOURCE = "this project"
PLATFORMS = ("cpu-tiny",)

DATASET = "burst"
NUM_REQUESTS = 12

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

Knobs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    label: str
    system: str
    options: Knobs = ()

    @property
    def alone(self) -> Knobs:
        return (("max_num_seqs" if self.system == "dllm-serve" else "batch_size", 1),)


SAMPLERS = (
    Sampler(label="dLLM-Serve", system="dllm-serve"),
    Sampler(label="Fast-dLLM, dual cache", system="fast-dllm"),
    Sampler(label="Fast-dLLM, prefix cache", system="fast-dllm", options=(("cache", "prefix"),)),
    Sampler(label="Fast-dLLM, no cache", system="fast-dllm", options=(("cache", "none"),)),
    Sampler(label="dLLM-Cache", system="dllm-cache"),
    Sampler(label="Sparse-dLLM", system="sparse-dllm"),
    Sampler(label="LLaDA, no cache", system="llada"),
)


def cells(view: View) -> list[Cell]:
    """All requests at once; batched is the largest static batch, or dLLM-Serve's own packing."""
    where = view.platform
    return [
        Cell(
            figure=NAME,
            system=sampler.system,
            dataset=DATASET,
            platform=where.name,
            executor=where.executor,
            rate=None,
            seed=seed,
            knobs=(("num_requests", NUM_REQUESTS), *sampler.options, *batching),
        )
        for sampler in SAMPLERS
        for batching in (sampler.alone, ())
        for seed in view.seeds
    ]


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    found = {
        (sampler, name): runs_of(runs, sampler, name, view) for sampler in SAMPLERS for name in ("alone", "batched")
    }
    rows = [_table_row(sampler, found[sampler, "alone"], found[sampler, "batched"]) for sampler in SAMPLERS]
    csv_rows = [_csv_row(sampler, name, run, view) for (sampler, name), own in found.items() for run in own]
    missing = [f"{sampler.label} {name}" for (sampler, name), own in found.items() if not own]
    notes = [
        *invalid_notes(runs),
        *missing_note(missing, len(found)),
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


def runs_of(runs: Sequence[StoredRun], sampler: Sampler, name: str, view: View) -> list[StoredRun]:
    own_knobs = (("num_requests", NUM_REQUESTS), *sampler.options, *(sampler.alone if name == "alone" else ()))
    asked = {**dict(view.knobs), **dict(own_knobs)}.items()
    own = [
        run
        for run in runs
        if run.cell.system == sampler.system and {knob for knob in run.cell.knobs if knob[0] != "basis"} == asked
    ]
    return sorted(own, key=lambda run: run.cell.seed)


def _csv_row(sampler: Sampler, name: str, run: StoredRun, view: View) -> tuple[object, ...]:
    return (
        view.platform.name,
        sampler.system,
        " ".join(f"{key}={value}" for key, value in sampler.options),
        name,
        run.record.manifest.get("facts", {}).get("batch_size"),
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


def _table_row(sampler: Sampler, alone: Sequence[StoredRun], batched: Sequence[StoredRun]) -> tuple[str, ...]:
    single, several = (over_repeats(own, "throughput_tok_s").mean for own in (alone, batched))
    sizes = {run.record.manifest.get("facts", {}).get("batch_size") for run in batched} - {None}
    shares = [over_repeats(own, "outside_forward_share").mean for own in (alone, batched)]
    return (
        sampler.label,
        _text(single),
        _text(several),
        ", ".join(map(str, sorted(sizes))) or "packed",
        f"{several / single:.2f}x" if single and several else "-",
        *("-" if share is None else f"{100 * share:.1f} %" for share in shares),
        obtained_text([*alone, *batched]),
        validity_text([*alone, *batched]),
    )


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
