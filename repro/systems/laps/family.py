"""The family of prefill systems: turns of conversations on prefill instances."""

from __future__ import annotations

from repro.runs.family import WAITS, Family, Shown
from repro.systems.laps.columns import (
    INSTANCE_COLUMNS,
    INSTANCES,
    MOVE_COLUMNS,
    MOVES,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    STEPS,
)
from repro.systems.laps.metrics import PREFILL_METRICS
from repro.systems.laps.validity import PREFILL_CHECKS

PREFILL = Family(
    name="prefill",
    request_columns=REQUEST_COLUMNS,
    tables={STEPS: STEP_COLUMNS, MOVES: MOVE_COLUMNS, INSTANCES: INSTANCE_COLUMNS},
    metrics=PREFILL_METRICS,
    checks=PREFILL_CHECKS,
    shown=(
        *WAITS,
        Shown("turns/s", "rps"),
        Shown("late", "slo_violations", is_share=True),
        Shown("late, long", "slo_violations_long", is_share=True),
        Shown("graphs", "graph_share", is_share=True),
    ),
)
