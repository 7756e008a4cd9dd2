"""What a run of a diffusion-LLM engine records: columns of its requests, and the table of its steps."""

from __future__ import annotations

from engines.runtime.step_timer import STEP_PARTS
from repro.runs.record import Column

STEPS = "steps"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("gen_length", "int", "tokens to generate"),
    Column("correct", "bool", "whether its answer solves the problem; null where nothing is graded", nullable=True),
    Column(
        "correct_strict", "bool", "the same by the task's stricter criterion; null where it has none", nullable=True
    ),
)

PART_COLUMNS = {f"{part}_s": part for part in STEP_PARTS}
"""Column of a profiled step -> part of the step."""

STEP_COLUMNS: tuple[Column, ...] = (
    Column("step", "int", "the engine's step number"),
    Column("start_s", "float", "start on the driver's clock"),
    Column("end_s", "float", "end on the driver's clock; start + duration on a virtual one"),
    Column("duration_s", "float", "the step as the engine measured or charged it"),
    Column(
        "forward_s",
        "float",
        "the part inside the model's forward, by the device's time where there is one; null if never known",
        nullable=True,
    ),
    Column("num_refresh", "int", "sequences in their Refresh phase"),
    Column("num_reuse", "int", "sequences in their Reuse phase"),
    Column("query_tokens", "int", "rows the forward computed, padding included"),
    Column("scheduled_tokens", "int", "query tokens charged against the step's budget"),
    Column("logit_rows", "int", "rows projected onto the vocabulary"),
    Column("committed_tokens", "int", "tokens committed"),
    Column("kv_rows_used", "int", "rows of the KV pool in use"),
    Column("kv_rows_total", "int", "rows of the KV pool; 0 where there is no pool"),
    Column("num_running", "int", "requests admitted and not finished"),
    Column("num_waiting", "int", "requests submitted and not admitted"),
    Column("num_admitted", "int", "requests admitted in this step"),
    Column("num_first_block", "int", "requests whose first block completed in this step"),
    Column("num_finished", "int", "requests finished in this step"),
    Column("num_failed", "int", "requests given up in this step"),
    Column("graph", "bool", "whether a captured CUDA graph ran the forward"),
    *(
        Column(name, "float", f"time in this part; null unless profiled: {part}", nullable=True)
        for name, part in PART_COLUMNS.items()
    ),
    Column(
        "bound_s",
        "float",
        "the roofline's lower bound of the step at the card's peaks; null where the card is unknown",
        nullable=True,
    ),
)
