"""The family of block-diffusion systems: what their runs record, and what is read off it."""

from __future__ import annotations

from collections.abc import Iterator

from repro.runs.family import WAITS, Family, Shown, late_submissions
from repro.runs.metrics import Metric, column
from repro.runs.record import Column, RunRecord
from repro.systems.dllm.record import DLLM_METRICS
from repro.systems.dllm.record import REQUEST_COLUMNS as DLLM_COLUMNS

STEPS = "steps"
GRADES = ("correct", "correct_strict")
REQUEST_COLUMNS = (
    Column("gen_length", "int", "tokens asked for"),
    Column("denoised", "int", "forwards that denoised one of its blocks; null while it is open", nullable=True),
    Column("committed", "int", "generated blocks whose K/V was made; null while it is open", nullable=True),
    Column("prefilled", "int", "blocks of its prompt that were computed; null while it is open", nullable=True),
    *(each for each in DLLM_COLUMNS if each.name in GRADES),
)
STEP_COLUMNS = (
    Column("step", "int", "the engine's step number"),
    Column("start_s", "float", "start on the driver's clock"),
    Column("end_s", "float", "end on the driver's clock"),
    Column("duration_s", "float", "the step's forward and what was read of it"),
    Column("num_rows", "int", "rows of requests that the forward computed"),
    Column("num_denoised", "int", "blocks that were denoised"),
    Column("num_committed", "int", "generated blocks whose K/V was made"),
    Column("num_prefilled", "int", "blocks of prompts"),
    Column("num_taken", "int", "tokens that were written, edits included"),
    Column("num_preempted", "int", "requests whose K/V was dropped for others"),
    Column("num_running", "int", "requests admitted and not finished"),
    Column("num_waiting", "int", "requests submitted and not admitted"),
)


def tokens_per_forward(record: RunRecord) -> float | None:
    forwards = column(record, "num_denoised", STEPS).sum() + column(record, "num_committed", STEPS).sum()
    tokens = sum(length for length in record.requests["output_len"] if length is not None)
    return float(tokens / forwards) if forwards else None


def rows_per_step(record: RunRecord) -> float | None:
    rows = column(record, "num_rows", STEPS)
    return float(rows.mean()) if rows.size else None


def commit_share(record: RunRecord) -> float | None:
    made = column(record, "num_committed", STEPS).sum()
    forwards = made + column(record, "num_denoised", STEPS).sum()
    return float(made / forwards) if forwards else None


def steps_in_turn(record: RunRecord) -> Iterator[str]:
    start, end = column(record, "start_s", STEPS), column(record, "end_s", STEPS)
    if (end < start).any() or (start[1:] < end[:-1]).any():
        yield "steps overlap"
    denoised = [value for value in record.requests["denoised"] if value is not None]
    if None not in record.requests["denoised"] and sum(denoised) != sum(record.tables[STEPS]["num_denoised"]):
        yield "requests and steps disagree on the forwards that denoised"


BLOCK = Family(
    name="block",
    request_columns=REQUEST_COLUMNS,
    tables={STEPS: STEP_COLUMNS},
    metrics=(
        Metric(
            "tokens_per_forward",
            "tokens",
            "output tokens / (blocks denoised + blocks committed), over all steps",
            "no block was denoised",
            tokens_per_forward,
        ),
        Metric("commit_share", "share", "committed / (denoised + committed)", "no block was denoised", commit_share),
        Metric("rows_per_step", "rows", "mean of num_rows over steps", "no steps", rows_per_step),
        *(each for each in DLLM_METRICS if each.name in ("num_steps", "accuracy", "accuracy_strict")),
    ),
    checks=(steps_in_turn, late_submissions),
    shown=(Shown("tokens/forward", "tokens_per_forward"), *WAITS),
)
