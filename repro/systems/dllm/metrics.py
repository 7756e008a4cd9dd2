"""What is read off the steps of a diffusion-LLM engine, and off graded answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import UserError
from repro.runs.metrics import Floats, Metric, distribution, floats
from repro.runs.record import RunRecord, Table
from repro.runs.statistics import wilson_interval
from repro.systems.dllm.columns import PART_COLUMNS, STEPS


def _steps(record: RunRecord) -> Table:
    return record.tables[STEPS]


def num_steps(record: RunRecord) -> int:
    return len(_steps(record)["step"])


def busy_s(record: RunRecord) -> float:
    return float(np.sum(floats(_steps(record)["duration_s"])))


def step_requests(record: RunRecord) -> dict[str, Any]:
    return distribution(floats(_steps(record)["num_refresh"]) + floats(_steps(record)["num_reuse"]))


def mean_running(record: RunRecord) -> float | None:
    return _time_weighted(record, floats(_steps(record)["num_running"]))


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


def budget_occupancy(record: RunRecord, cap: int | None) -> float | None:
    if cap is None or num_steps(record) == 0:
        return None
    if cap < 1:
        raise UserError(f"max_num_batched_tokens={cap} must be at least 1")
    return float(floats(_steps(record)["scheduled_tokens"]).mean()) / cap


def kv_occupancy(record: RunRecord) -> float | None:
    used, total, duration = _kv(record)
    busy = float(duration.sum())
    return float((used / total * duration).sum()) / busy if busy > 0 else None


def kv_occupancy_peak(record: RunRecord) -> float | None:
    used, total, _ = _kv(record)
    return float((used / total).max()) if used.size else None


def outside_forward_share(record: RunRecord) -> float | None:
    inside = _share_of_time(record, "forward_s")
    return None if inside is None else 1.0 - inside


def roofline_share(record: RunRecord) -> float | None:
    return _share_of_time(record, "bound_s")


def graph_hit_rate(record: RunRecord) -> float | None:
    """Profiled steps do not count: taking them apart leaves no graph to run."""
    could_hit = _kinds(record)["reuse"] & np.isnan(floats(_steps(record)["idle_s"]))
    hits = np.asarray(_steps(record)["graph"], dtype=np.bool_)[could_hit]
    return float(hits.mean()) if hits.size else None


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


def host_share(record: RunRecord) -> float | None:
    found = profile(record)
    return None if found is None else found["all"]["share"]["idle"]


def accuracy(record: RunRecord, column: str) -> dict[str, Any] | None:
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


def _cap(record: RunRecord) -> int | None:
    return record.manifest.get("max_num_batched_tokens")


_NO_TIME = "no steps, or they took no time"

DLLM_METRICS: tuple[Metric, ...] = (
    Metric("num_steps", "steps", "engine iterations", "never", num_steps),
    Metric("busy_s", "s", "sum of duration over steps", "never", busy_s),
    Metric(
        "step_requests", "requests", "distribution over steps of num_refresh + num_reuse", "no steps", step_requests
    ),
    Metric("mean_running", "requests", "sum of num_running * duration / sum of duration", _NO_TIME, mean_running),
    Metric(
        "phase_mix",
        "share",
        "of non-empty steps: Refresh only, Reuse only, mixed; num_refresh / (num_refresh + num_reuse) summed over steps",
        "no step with a sequence",
        phase_mix,
    ),
    Metric(
        "budget_occupancy",
        "share",
        "mean over steps of scheduled_tokens / max_num_batched_tokens",
        "no steps, or the run states no budget",
        lambda r: budget_occupancy(r, _cap(r)),
    ),
    Metric(
        "kv_occupancy",
        "share",
        "kv_rows_used / kv_rows_total weighted by duration, over steps with a pool",
        "no step with a pool, or they took no time",
        kv_occupancy,
    ),
    Metric(
        "kv_occupancy_peak",
        "share",
        "largest kv_rows_used / kv_rows_total of a step",
        "no step with a pool",
        kv_occupancy_peak,
    ),
    Metric("outside_forward_share", "share", "1 - sum of forward / sum of duration", _NO_TIME, outside_forward_share),
    Metric(
        "roofline_share",
        "share",
        "sum of bound / sum of duration, over steps with a bound",
        "no card is known, or its steps took no time",
        roofline_share,
    ),
    Metric(
        "graph_hit_rate",
        "share",
        "steps that ran as a CUDA graph / steps, of those that are Reuse only and not profiled",
        "there is no such step",
        graph_hit_rate,
    ),
    Metric(
        "host_share",
        "share",
        "sum of idle / sum of all parts, over profiled steps",
        "no step was profiled, or they took no time",
        host_share,
    ),
    Metric(
        "profile",
        "s, share",
        "of profiled steps (refresh, reuse, mixed, all): num_steps; seconds and share by part",
        "no step was profiled; share: such steps took no time",
        profile,
    ),
    Metric(
        "accuracy",
        "share",
        "correct / all requests, failed ones included; Wilson's 95 % interval",
        "nothing is graded",
        lambda r: accuracy(r, "correct"),
    ),
    Metric(
        "accuracy_strict",
        "share",
        "as accuracy, by the task's stricter criterion",
        "nothing is graded, or the task has one criterion only",
        lambda r: accuracy(r, "correct_strict"),
    ),
)
