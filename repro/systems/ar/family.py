"""The family of autoregressive systems on a cluster."""

from __future__ import annotations

from repro.runs.family import Family, Shown
from repro.systems.ar.columns import (
    REQUEST_COLUMNS,
    ROUND_COLUMNS,
    ROUNDS,
    TASK_COLUMNS,
    TASKS,
    TRANSFER_COLUMNS,
    TRANSFERS,
    WORKER_COLUMNS,
    WORKERS,
)
from repro.systems.ar.metrics import AR_METRICS
from repro.systems.ar.validity import AR_CHECKS

AR = Family(
    name="ar",
    request_columns=REQUEST_COLUMNS,
    tables={ROUNDS: ROUND_COLUMNS, TASKS: TASK_COLUMNS, TRANSFERS: TRANSFER_COLUMNS, WORKERS: WORKER_COLUMNS},
    metrics=AR_METRICS,
    checks=AR_CHECKS,
    shown=(
        Shown("longest TTFT s", "ttft_longest_s"),
        Shown("attainment", "slo_attainment", is_share=True),
        Shown("local", "local_share", is_share=True),
        Shown("load", "prefill_load", is_share=True),
    ),
)
