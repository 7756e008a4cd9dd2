"""What is read off the steps of a diffusion-LLM engine, and off graded answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import UserError
from repro.runs.metrics import Floats, Metric, distribution, floats
from repro.runs.record import RunRecord
from repro.runs.statistics import wilson_interval
from repro.systems.dllm.columns import PART_COLUMNS, STEPS


def num_steps(record: RunRecord) -> int:
    return len(record.tables[STEPS]["step"])


def step_requests(record: RunRecord) -> dict[str, Any]:
    return distribution(_column(record, "num_refresh") + _column(record, "num_reuse"))


def _column(record: RunRecord, name: str) -> Floats:
    return floats(record.tables[STEPS][name])


def _per_busy_second(record: RunRecord, values: Floats) -> float | None:
    """Sum of the values over the sum of duration, over the steps that have a value."""
    known = ~np.isnan(values)
    busy = float(_column(record, "duration_s")[known].sum())
    return float(values[known].sum()) / busy if busy > 0 else None


def _kinds(record: RunRecord) -> dict[str, npt.NDArray[np.bool_]]:
    """Which steps are pure Refresh, pure Reuse and mixed; empty ones are neither."""
    refreshes, reuses = _column(record, "num_refresh") > 0, _column(record, "num_reuse") > 0
    return {"refresh": refreshes & ~reuses, "reuse": reuses & ~refreshes, "mixed": refreshes & reuses}


def _phase_mix(record: RunRecord) -> dict[str, float | None]:
    """Shares of non-empty steps that are pure Refresh, pure Reuse and mixed, and the Refresh share of sequences."""
    counts = {name: int(of_kind.sum()) for name, of_kind in _kinds(record).items()}
    shares = {name: count / sum(counts.values()) if any(counts.values()) else None for name, count in counts.items()}
    refresh, reuse = (float(_column(record, name).sum()) for name in ("num_refresh", "num_reuse"))
    return {
        "refresh_only_steps": shares["refresh"],
        "reuse_only_steps": shares["reuse"],
        "mixed_steps": shares["mixed"],
        "refresh_sequences": refresh / (refresh + reuse) if refresh + reuse else None,
    }


def _budget_occupancy(record: RunRecord) -> float | None:
    cap = record.manifest.get("max_num_batched_tokens")
    if cap is None or num_steps(record) == 0:
        return None
    if cap < 1:
        raise UserError(f"max_num_batched_tokens={cap} must be at least 1")
    return float(_column(record, "scheduled_tokens").mean()) / cap


def _kv_shares(record: RunRecord) -> Floats:
    """How much of its pool each step used; NaN without a pool."""
    used, total = _column(record, "kv_rows_used"), _column(record, "kv_rows_total")
    return np.divide(used, total, out=np.full_like(total, np.nan), where=total > 0)


def _kv_peak(record: RunRecord) -> float | None:
    shares = _kv_shares(record)
    shares = shares[~np.isnan(shares)]
    return float(shares.max()) if shares.size else None


def _outside_forward(record: RunRecord) -> float | None:
    inside = _per_busy_second(record, _column(record, "forward_s"))
    return None if inside is None else 1.0 - inside


def _graph_hit_rate(record: RunRecord) -> float | None:
    """Profiled steps do not count: taking them apart leaves no graph to run."""
    could_hit = _kinds(record)["reuse"] & np.isnan(_column(record, "idle_s"))
    hits = np.asarray(record.tables[STEPS]["graph"], dtype=np.bool_)[could_hit]
    return float(hits.mean()) if hits.size else None


def _profile(record: RunRecord) -> dict[str, Any] | None:
    """The profiled steps that are pure Refresh, pure Reuse, mixed, and all of them: how many, and seconds and share by
    part (``STEP_PARTS``)."""
    taken = {part: _column(record, name) for name, part in PART_COLUMNS.items()}
    profiled = ~np.isnan(taken["idle"])
    if not profiled.any():
        return None
    found: dict[str, Any] = {}
    for name, of_kind in (*_kinds(record).items(), ("all", profiled)):
        steps = profiled & of_kind
        seconds = {part: float(values[steps].sum()) for part, values in taken.items()}
        total = sum(seconds.values())
        share = {part: value / total if total > 0 else None for part, value in seconds.items()}
        found[name] = {"num_steps": int(steps.sum()), "seconds": seconds, "share": share}
    return found


def _host_share(record: RunRecord) -> float | None:
    found = _profile(record)
    return None if found is None else found["all"]["share"]["idle"]


def _solved(record: RunRecord, column: str) -> dict[str, Any] | None:
    """value, low, high and n of ``correct`` or ``correct_strict``."""
    verdicts = record.requests[column]
    if not verdicts or None in verdicts:
        return None
    n, solved = len(verdicts), sum(verdicts)
    low, high = wilson_interval(solved, n)
    return {"value": solved / n, "low": low, "high": high, "n": n}


_NO_TIME = "no steps, or they took no time"

DLLM_METRICS: tuple[Metric, ...] = (
    Metric("num_steps", "steps", "engine iterations", "never", num_steps),
    Metric("busy_s", "s", "sum of duration over steps", "never", lambda run: float(np.sum(_column(run, "duration_s")))),
    Metric(
        "step_requests", "requests", "distribution over steps of num_refresh + num_reuse", "no steps", step_requests
    ),
    Metric(
        "mean_running",
        "requests",
        "sum of num_running * duration / sum of duration",
        _NO_TIME,
        lambda run: _per_busy_second(run, _column(run, "num_running") * _column(run, "duration_s")),
    ),
    Metric(
        "phase_mix",
        "share",
        "of non-empty steps: Refresh only, Reuse only, mixed; num_refresh / (num_refresh + num_reuse) summed over steps",
        "no step with a sequence",
        _phase_mix,
    ),
    Metric(
        "budget_occupancy",
        "share",
        "mean over steps of scheduled_tokens / max_num_batched_tokens",
        "no steps, or the run states no budget",
        _budget_occupancy,
    ),
    Metric(
        "kv_occupancy",
        "share",
        "kv_rows_used / kv_rows_total weighted by duration, over steps with a pool",
        "no step with a pool, or they took no time",
        lambda run: _per_busy_second(run, _kv_shares(run) * _column(run, "duration_s")),
    ),
    Metric(
        "kv_occupancy_peak", "share", "largest kv_rows_used / kv_rows_total of a step", "no step with a pool", _kv_peak
    ),
    Metric("outside_forward_share", "share", "1 - sum of forward / sum of duration", _NO_TIME, _outside_forward),
    Metric(
        "roofline_share",
        "share",
        "sum of bound / sum of duration, over steps with a bound",
        "no card is known, or its steps took no time",
        lambda run: _per_busy_second(run, _column(run, "bound_s")),
    ),
    Metric(
        "graph_hit_rate",
        "share",
        "steps that ran as a CUDA graph / steps, of those that are Reuse only and not profiled",
        "there is no such step",
        _graph_hit_rate,
    ),
    Metric(
        "host_share",
        "share",
        "sum of idle / sum of all parts, over profiled steps",
        "no step was profiled, or they took no time",
        _host_share,
    ),
    Metric(
        "profile",
        "s, share",
        "of profiled steps (refresh, reuse, mixed, all): num_steps; seconds and share by part",
        "no step was profiled; share: such steps took no time",
        _profile,
    ),
    Metric(
        "accuracy",
        "share",
        "correct / all requests, failed ones included; Wilson's 95 % interval",
        "nothing is graded",
        lambda run: _solved(run, "correct"),
    ),
    Metric(
        "accuracy_strict",
        "share",
        "as accuracy, by the task's stricter criterion",
        "nothing is graded, or the task has one criterion only",
        lambda run: _solved(run, "correct_strict"),
    ),
)
