"""What a run of a diffusion-LLM engine records: columns of its requests, and the table of its steps."""

from __future__ import annotations

from engines.runtime.step_timer import STEP_PARTS
from repro.runs.record import Column

STEPS = "steps"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="gen_length", kind="int", meaning="tokens to generate"),
    Column(
        name="correct",
        kind="bool",
        nullable=True,
        meaning="whether its answer solves the problem; null where nothing is graded",
    ),
    Column(
        name="correct_strict",
        kind="bool",
        nullable=True,
        meaning="the same by the task's stricter criterion; null where it has none",
    ),
)

PART_COLUMNS = {f"{part}_s": part for part in STEP_PARTS}
"""Column of a profiled step -> part of the step."""

STEP_COLUMNS: tuple[Column, ...] = (
    Column(name="step", kind="int", meaning="the engine's step number"),
    Column(name="start_s", kind="float", meaning="start on the driver's clock"),
    Column(name="end_s", kind="float", meaning="end on the driver's clock; start + duration on a virtual one"),
    Column(name="duration_s", kind="float", meaning="the step as the engine measured or charged it"),
    Column(
        name="forward_s",
        kind="float",
        nullable=True,
        meaning="the part inside the model's forward, by the device's time where there is one; null if never known",
    ),
    Column(name="num_refresh", kind="int", meaning="sequences in their Refresh phase"),
    Column(name="num_reuse", kind="int", meaning="sequences in their Reuse phase"),
    Column(name="query_tokens", kind="int", meaning="rows the forward computed, padding included"),
    Column(name="scheduled_tokens", kind="int", meaning="query tokens charged against the step's budget"),
    Column(name="logit_rows", kind="int", meaning="rows projected onto the vocabulary"),
    Column(name="committed_tokens", kind="int", meaning="tokens committed"),
    Column(name="kv_rows_used", kind="int", meaning="rows of the KV pool in use"),
    Column(name="kv_rows_total", kind="int", meaning="rows of the KV pool; 0 where there is no pool"),
    Column(name="num_running", kind="int", meaning="requests admitted and not finished"),
    Column(name="num_waiting", kind="int", meaning="requests submitted and not admitted"),
    Column(name="num_admitted", kind="int", meaning="requests admitted in this step"),
    Column(name="num_first_block", kind="int", meaning="requests whose first block completed in this step"),
    Column(name="num_finished", kind="int", meaning="requests finished in this step"),
    Column(name="num_failed", kind="int", meaning="requests given up in this step"),
    Column(name="graph", kind="bool", meaning="whether a captured CUDA graph ran the forward"),
    *(
        Column(name=name, kind="float", nullable=True, meaning=f"time in this part; null unless profiled: {part}")
        for name, part in PART_COLUMNS.items()
    ),
    Column(
        name="bound_s",
        kind="float",
        nullable=True,
        meaning="the roofline's lower bound of the step at the card's peaks; null where the card is unknown",
    ),
)
