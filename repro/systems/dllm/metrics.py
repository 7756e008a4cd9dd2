"""What is read off the steps of a diffusion-LLM engine, and off graded answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import UserError
from repro.runs.metrics import Floats, Metric, distribution, floats, metric
from repro.runs.record import RunRecord, Table
from repro.runs.statistics import wilson_interval
from repro.systems.dllm.columns import PART_COLUMNS, STEPS

_NO_TIME = "no steps, or they took no time"


def _steps(record: RunRecord) -> Table:
    return record.tables[STEPS]


@metric("steps", "engine iterations")
def num_steps(record: RunRecord) -> int:
    return len(_steps(record)["step"])


@metric("s", "sum of duration over steps")
def busy_s(record: RunRecord) -> float:
    return float(np.sum(floats(_steps(record)["duration_s"])))


@metric("requests", "distribution over steps of num_refresh + num_reuse", "no steps")
def step_requests(record: RunRecord) -> dict[str, Any]:
    return distribution(floats(_steps(record)["num_refresh"]) + floats(_steps(record)["num_reuse"]))


@metric("requests", "sum of num_running * duration / sum of duration", _NO_TIME)
def mean_running(record: RunRecord) -> float | None:
    return _time_weighted(record, floats(_steps(record)["num_running"]))


@metric(
    "share",
    "of non-empty steps: Refresh only, Reuse only, mixed; num_refresh / (num_refresh + num_reuse) summed over steps",
    "no step with a sequence",
)
def phase_mix(record: RunRecord) -> dict[str, float | None]:
    """Shares of non-empty steps that are pure Refresh, pure Reuse and mixed, and the Refresh share of sequences."""
    refresh, reuse = floats(_steps(record)["num_refresh"]), floats(_steps(record)["num_reuse"])
    num_steps, num_sequences = int(((refresh + reuse) > 0).sum()), float((refresh + reuse).sum())
    kinds = _kinds(record)

    def share(selected: npt.NDArray[np.bool_]) -> float | None:
        return int(selected.sum()) / num_steps if num_steps else None

    return {
        "refresh_only_steps": share(kinds["refresh"]),
        "reuse_only_steps": share(kinds["reuse"]),
        "mixed_steps": share(kinds["mixed"]),
        "refresh_sequences": float(refresh.sum()) / num_sequences if num_sequences else None,
    }


@metric(
    "share", "mean over steps of scheduled_tokens / max_num_batched_tokens", "no steps, or the run states no budget"
)
def budget_occupancy(record: RunRecord) -> float | None:
    cap = record.manifest.get("max_num_batched_tokens")
    if cap is None or num_steps(record) == 0:
        return None
    if cap < 1:
        raise UserError(f"max_num_batched_tokens={cap} must be at least 1")
    return float(floats(_steps(record)["scheduled_tokens"]).mean()) / cap


@metric(
    "share",
    "kv_rows_used / kv_rows_total weighted by duration, over steps with a pool",
    "no step with a pool, or they took no time",
)
def kv_occupancy(record: RunRecord) -> float | None:
    used, total, duration = _kv(record)
    busy = float(duration.sum())
    return float((used / total * duration).sum()) / busy if busy > 0 else None


@metric("share", "largest kv_rows_used / kv_rows_total of a step", "no step with a pool")
def kv_occupancy_peak(record: RunRecord) -> float | None:
    used, total, _ = _kv(record)
    return float((used / total).max()) if used.size else None


@metric("share", "1 - sum of forward / sum of duration", _NO_TIME)
def outside_forward_share(record: RunRecord) -> float | None:
    inside = _share_of_time(record, "forward_s")
    return None if inside is None else 1.0 - inside


@metric(
    "share", "sum of bound / sum of duration, over steps with a bound", "no card is known, or its steps took no time"
)
def roofline_share(record: RunRecord) -> float | None:
    return _share_of_time(record, "bound_s")


@metric(
    "share",
    "steps that ran as a CUDA graph / steps, of those that are Reuse only and not profiled",
    "there is no such step",
)
def graph_hit_rate(record: RunRecord) -> float | None:
    """Profiled steps do not count: taking them apart leaves no graph to run."""
    could_hit = _kinds(record)["reuse"] & np.isnan(floats(_steps(record)["idle_s"]))
    hits = np.asarray(_steps(record)["graph"], dtype=np.bool_)[could_hit]
    return float(hits.mean()) if hits.size else None


@metric(
    "s, share",
    "of profiled steps (refresh, reuse, mixed, all): num_steps; seconds and share by part",
    "no step was profiled; share: such steps took no time",
)
def profile(record: RunRecord) -> dict[str, Any] | None:
    """The profiled steps that are pure Refresh, pure Reuse, mixed, and all of them: how many, and seconds and share by
    part (``STEP_PARTS``)."""
    taken = {part: floats(_steps(record)[name]) for name, part in PART_COLUMNS.items()}
    profiled = ~np.isnan(taken["idle"])
    if not profiled.any():
        return None
    kinds = {name: profiled & of_kind for name, of_kind in _kinds(record).items()}
    return {name: _breakdown(taken, steps) for name, steps in (*kinds.items(), ("all", profiled))}


def _breakdown(taken: Mapping[str, Floats], steps: npt.NDArray[np.bool_]) -> dict[str, Any]:
    seconds = {part: float(values[steps].sum()) for part, values in taken.items()}
    total = sum(seconds.values())
    return {
        "num_steps": int(steps.sum()),
        "seconds": seconds,
        "share": {part: value / total if total > 0 else None for part, value in seconds.items()},
    }


@metric("share", "sum of idle / sum of all parts, over profiled steps", "no step was profiled, or they took no time")
def host_share(record: RunRecord) -> float | None:
    found = profile(record)
    return None if found is None else found["all"]["share"]["idle"]


@metric("share", "correct / all requests, failed ones included; Wilson's 95 % interval", "nothing is graded")
def accuracy(record: RunRecord) -> dict[str, Any] | None:
    return _solved(record, "correct")


@metric(
    "share", "as accuracy, by the task's stricter criterion", "nothing is graded, or the task has one criterion only"
)
def accuracy_strict(record: RunRecord) -> dict[str, Any] | None:
    return _solved(record, "correct_strict")


def _solved(record: RunRecord, column: str) -> dict[str, Any] | None:
    """value, low, high and n of ``correct`` or ``correct_strict``."""
    verdicts = record.requests[column]
    if not verdicts or None in verdicts:
        return None
    n, solved = len(verdicts), sum(verdicts)
    low, high = wilson_interval(solved, n)
    return {"value": solved / n, "low": low, "high": high, "n": n}


def _kinds(record: RunRecord) -> dict[str, npt.NDArray[np.bool_]]:
    """Which steps are pure Refresh, pure Reuse and mixed; empty ones are neither."""
    refreshes, reuses = (np.asarray(_steps(record)[name]) > 0 for name in ("num_refresh", "num_reuse"))
    return {"refresh": refreshes & ~reuses, "reuse": reuses & ~refreshes, "mixed": refreshes & reuses}


def _share_of_time(record: RunRecord, column: str) -> float | None:
    """Sum of the column over sum of duration, over the steps that have it."""
    values, duration = floats(_steps(record)[column]), floats(_steps(record)["duration_s"])
    known = ~np.isnan(values)
    busy = float(duration[known].sum())
    return float(values[known].sum()) / busy if busy > 0 else None


def _time_weighted(record: RunRecord, values: Floats) -> float | None:
    duration = floats(_steps(record)["duration_s"])
    busy = float(duration.sum())
    return float((values * duration).sum()) / busy if busy > 0 else None


def _kv(record: RunRecord) -> tuple[Floats, Floats, Floats]:
    total = floats(_steps(record)["kv_rows_total"])
    has_pool = total > 0
    used, duration = floats(_steps(record)["kv_rows_used"]), floats(_steps(record)["duration_s"])
    return used[has_pool], total[has_pool], duration[has_pool]


DLLM_METRICS: tuple[Metric, ...] = (
    num_steps,
    busy_s,
    step_requests,
    mean_running,
    phase_mix,
    budget_occupancy,
    kv_occupancy,
    kv_occupancy_peak,
    outside_forward_share,
    roofline_share,
    graph_hit_rate,
    host_share,
    profile,
    accuracy,
    accuracy_strict,
)
