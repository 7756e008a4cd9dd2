"""The family of diffusion-LLM systems."""

from __future__ import annotations

from repro.runs.family import WAITS, Family, Shown
from repro.systems.dllm.columns import REQUEST_COLUMNS, STEP_COLUMNS, STEPS
from repro.systems.dllm.metrics import DLLM_METRICS
from repro.systems.dllm.validity import DLLM_CHECKS

DLLM = Family(
    name="dllm",
    request_columns=REQUEST_COLUMNS,
    tables={STEPS: STEP_COLUMNS},
    metrics=DLLM_METRICS,
    checks=DLLM_CHECKS,
    shown=(
        *WAITS,
        Shown("batch", "step_requests", stat="mean"),
        Shown("largest batch", "step_requests", stat="max"),
        Shown("running", "mean_running"),
        Shown("outside fwd", "outside_forward_share", is_share=True),
    ),
)
