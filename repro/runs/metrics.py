"""Metrics of one run, each with its formula, unit, and when it is undefined.

An undefined value is None, never NaN. "ok" requests are the finished ones; failed and unfinished requests
have no latency, and count against goodput. Times count from the due time, so waiting for the engine is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import UserError
from repro.runs.proportions import wilson_interval
from repro.runs.record import PART_COLUMNS, RunRecord

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
REQUEST_TIMES = {"e2el_s": "finished_s", "ttfb_s": "first_block_s", "queue_wait_s": "admitted_s"}
"""A request's time is this column minus its due time."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    unit: str
    formula: str
    undefined: str
    compute: Callable[[RunRecord], Any]


def summarize(record: RunRecord) -> dict[str, Any]:
    """Every metric of ``METRICS``, by name."""
    return {metric.name: metric.compute(record) for metric in METRICS}


# -- requests ---------------------------------------------------------------------------------------------


def status_counts(record: RunRecord) -> dict[str, int]:
    statuses = record.requests["status"]
    return {status: statuses.count(status) for status in ("ok", "failed", "unfinished")}


def request_times(record: RunRecord, name: str) -> Floats:
    """One value per ok request that has the stamp, in table order; ``name`` is a key of ``REQUEST_TIMES``."""
    table = record.requests
    stamp, arrival = _floats(table[REQUEST_TIMES[name]]), _floats(table["arrival_s"])
    times = (stamp - arrival)[_is_ok(record)]
    return times[~np.isnan(times)]


def window_s(record: RunRecord) -> float | None:
    """Last finish of an ok request minus first arrival of any; None without an ok request or of no length."""
    finished = _floats(record.requests["finished_s"])[_is_ok(record)]
    if finished.size == 0:
        return None
    span = float(finished.max() - _floats(record.requests["arrival_s"]).min())
    return span if span > 0 else None


def throughput_tok_s(record: RunRecord) -> float | None:
    lengths = _floats(record.requests["output_len"])[_is_ok(record)]
    return _per_second(int(lengths.sum()), window_s(record))


def request_throughput(record: RunRecord) -> float | None:
    return _per_second(status_counts(record)["ok"], window_s(record))


def distribution(values: Sequence[float] | Floats) -> dict[str, Any]:
    """n, mean, std, min, max, span and ``PERCENTILES`` of finite values.

    std is the population's (ddof 0), needs n >= 2. span = max - min. A percentile interpolates linearly
    between order statistics (Hyndman and Fan's type 7, as numpy and vLLM) and is left out where n is too
    small for it to mean anything, see ``min_count``.
    """
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError("a distribution needs finite values")
    n = int(data.size)
    summary: dict[str, Any] = {"n": n}
    summary["mean"] = float(data.mean()) if n else None
    summary["std"] = float(data.std()) if n >= 2 else None
    summary["min"] = float(data.min()) if n else None
    summary["max"] = float(data.max()) if n else None
    summary["span"] = float(data.max() - data.min()) if n else None
    for q in PERCENTILES:
        summary[f"p{q}"] = float(np.percentile(data, q)) if n >= min_count(q) else None
    return summary


def min_count(percentile: int) -> int:
    """Fewest samples that put one beyond it: 2 for the median, 10 for p90, 20 for p95, 100 for p99."""
    if not 0 < percentile < 100:
        raise UserError(f"percentile={percentile} must be between 1 and 99")
    return -(-100 // (100 - percentile))


# -- goodput ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slo:
    """A request is good when it is ok and every named time is at most its limit (seconds)."""

    name: str
    limits: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.limits:
            raise UserError(f"slo {self.name!r} has no limit: name at least one of {', '.join(REQUEST_TIMES)}")
        for metric, limit in self.limits:
            if metric not in REQUEST_TIMES:
                raise UserError(
                    f"slo {self.name!r} limits {metric!r}, which is unknown: use {', '.join(REQUEST_TIMES)}"
                )
            if not math.isfinite(limit) or limit <= 0:
                raise UserError(f"slo {self.name!r} has {metric}={limit!r}: a limit must be positive seconds")


def slos_from(mapping: Mapping[str, Mapping[str, float]]) -> tuple[Slo, ...]:
    """From a manifest's ``slos``: ``{name: {time: limit in seconds}}``."""
    return tuple(Slo(name=name, limits=tuple(sorted(limits.items()))) for name, limits in sorted(mapping.items()))


def goodput(record: RunRecord, slo: Slo) -> dict[str, Any]:
    """num_good; requests_s = num_good / window; attainment = num_good / all requests, failed ones included.

    A request without a named stamp is not good: what was not seen cannot have met a limit.
    """
    good = _is_ok(record)
    arrival = _floats(record.requests["arrival_s"])
    for metric, limit in slo.limits:
        # A comparison with NaN, a missing stamp, is False.
        good = good & (_floats(record.requests[REQUEST_TIMES[metric]]) - arrival <= limit)
    num_good, n = int(good.sum()), record.num_requests
    return {
        "limits": dict(slo.limits),
        "num_good": num_good,
        "requests_s": _per_second(num_good, window_s(record)),
        "attainment": num_good / n if n else None,
    }


# -- steps ------------------------------------------------------------------------------------------------


def busy_s(record: RunRecord) -> float:
    return float(np.sum(_floats(record.steps["duration_s"])))


def mean_running(record: RunRecord) -> float | None:
    return _time_weighted(record, _floats(record.steps["num_running"]))


def phase_mix(record: RunRecord) -> dict[str, float | None]:
    """Shares of non-empty steps that are pure Refresh, pure Reuse and mixed, and the Refresh share of sequences."""
    refresh, reuse = _floats(record.steps["num_refresh"]), _floats(record.steps["num_reuse"])
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
    if cap is None or record.num_steps == 0:
        return None
    if cap < 1:
        raise UserError(f"max_num_batched_tokens={cap} must be at least 1")
    return float(_floats(record.steps["scheduled_tokens"]).mean()) / cap


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
    could_hit = _kinds(record)["reuse"] & np.isnan(_floats(record.steps["idle_s"]))
    hits = np.asarray(record.steps["graph"], dtype=np.bool_)[could_hit]
    return float(hits.mean()) if hits.size else None


def profile(record: RunRecord) -> dict[str, Any] | None:
    """Of the profiled steps that are pure Refresh, pure Reuse, mixed, and all of them: how many, and seconds and share
    by part (``STEP_PARTS``)."""
    taken = {part: _floats(record.steps[name]) for name, part in PART_COLUMNS.items()}
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


# -- answers ----------------------------------------------------------------------------------------------


def accuracy(record: RunRecord, column: str) -> dict[str, Any] | None:
    """value, low, high and n of ``correct`` or ``correct_strict``."""
    verdicts = record.requests[column]
    if not verdicts or None in verdicts:
        return None
    n, solved = len(verdicts), sum(verdicts)
    low, high = wilson_interval(solved, n)
    return {"value": solved / n, "low": low, "high": high, "n": n}


# -- repeats ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interval:
    """mean +- half_width; half_width is None with fewer than two repeats, mean with none."""

    mean: float | None
    half_width: float | None
    n: int
    confidence: float


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean over independent repeats: t(n-1) * s / sqrt(n), s with ddof 1."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence} must be in (0, 1)")
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError("an interval needs finite values")
    n = int(data.size)
    mean = float(data.mean()) if n else None
    if n < 2:
        return Interval(mean=mean, half_width=None, n=n, confidence=confidence)
    quantile = student_t_two_sided(confidence, n - 1)
    return Interval(mean=mean, half_width=quantile * float(data.std(ddof=1)) / math.sqrt(n), n=n, confidence=confidence)


def student_t_two_sided(confidence: float, degrees: int) -> float:
    """t with P(|T| <= t) = confidence, by bisection on the angle atan(t / sqrt(degrees))."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_central_mass(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_central_mass(theta: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(theta), math.cos(theta)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (theta + sine * total) if is_odd else sine * total


# -- the list ---------------------------------------------------------------------------------------------


def _cap(record: RunRecord) -> int | None:
    return record.manifest.get("max_num_batched_tokens")


def _all_goodputs(record: RunRecord) -> dict[str, Any]:
    return {slo.name: goodput(record, slo) for slo in slos_from(record.manifest.get("slos", {}))}


_NO_WINDOW = "no ok request, or the window has no length"
_NO_SAMPLE = "per entry: no ok request with the stamp; std below 2, pQ below 100 / (100 - Q) of them"
_NO_TIME = "no steps, or they took no time"

METRICS: tuple[Metric, ...] = (
    Metric(
        name="num_requests",
        unit="requests",
        formula="by status: ok, failed, unfinished",
        undefined="never",
        compute=status_counts,
    ),
    Metric(
        name="window_s",
        unit="s",
        formula="last finish of ok requests - first arrival",
        undefined=_NO_WINDOW,
        compute=window_s,
    ),
    Metric(
        name="throughput_tok_s",
        unit="tokens/s",
        formula="sum of output_len over ok requests / window_s",
        undefined=_NO_WINDOW,
        compute=throughput_tok_s,
    ),
    Metric(
        name="request_throughput",
        unit="requests/s",
        formula="ok requests / window_s",
        undefined=_NO_WINDOW,
        compute=request_throughput,
    ),
    Metric(
        name="e2el_s",
        unit="s",
        formula="distribution of finished - arrival",
        undefined=_NO_SAMPLE,
        compute=lambda r: distribution(request_times(r, "e2el_s")),
    ),
    Metric(
        name="ttfb_s",
        unit="s",
        formula="distribution of first block - arrival",
        undefined=_NO_SAMPLE,
        compute=lambda r: distribution(request_times(r, "ttfb_s")),
    ),
    Metric(
        name="queue_wait_s",
        unit="s",
        formula="distribution of admitted - arrival",
        undefined=_NO_SAMPLE,
        compute=lambda r: distribution(request_times(r, "queue_wait_s")),
    ),
    Metric(
        name="goodput",
        unit="requests/s, share",
        formula="by SLO: good requests / window_s; good / all requests",
        undefined=f"rate: {_NO_WINDOW}; share: no requests",
        compute=_all_goodputs,
    ),
    Metric(
        name="num_steps", unit="steps", formula="engine iterations", undefined="never", compute=lambda r: r.num_steps
    ),
    Metric(name="busy_s", unit="s", formula="sum of duration over steps", undefined="never", compute=busy_s),
    Metric(
        name="mean_running",
        unit="requests",
        formula="sum of num_running * duration / sum of duration",
        undefined=_NO_TIME,
        compute=mean_running,
    ),
    Metric(
        name="phase_mix",
        unit="share",
        formula="of non-empty steps: Refresh only, Reuse only, mixed; "
        "num_refresh / (num_refresh + num_reuse) summed over steps",
        undefined="no step with a sequence",
        compute=phase_mix,
    ),
    Metric(
        name="budget_occupancy",
        unit="share",
        formula="mean over steps of scheduled_tokens / max_num_batched_tokens",
        undefined="no steps, or the run states no budget",
        compute=lambda r: budget_occupancy(r, _cap(r)),
    ),
    Metric(
        name="kv_occupancy",
        unit="share",
        formula="kv_rows_used / kv_rows_total weighted by duration, over steps with a pool",
        undefined="no step with a pool, or they took no time",
        compute=kv_occupancy,
    ),
    Metric(
        name="kv_occupancy_peak",
        unit="share",
        formula="largest kv_rows_used / kv_rows_total of a step",
        undefined="no step with a pool",
        compute=kv_occupancy_peak,
    ),
    Metric(
        name="outside_forward_share",
        unit="share",
        formula="1 - sum of forward / sum of duration",
        undefined=_NO_TIME,
        compute=outside_forward_share,
    ),
    Metric(
        name="roofline_share",
        unit="share",
        formula="sum of bound / sum of duration, over steps with a bound",
        undefined="no card is known, or its steps took no time",
        compute=roofline_share,
    ),
    Metric(
        name="graph_hit_rate",
        unit="share",
        formula="steps that ran as a CUDA graph / steps, of those that are Reuse only and not profiled",
        undefined="there is no such step",
        compute=graph_hit_rate,
    ),
    Metric(
        name="host_share",
        unit="share",
        formula="sum of idle / sum of all parts, over profiled steps",
        undefined="no step was profiled, or they took no time",
        compute=host_share,
    ),
    Metric(
        name="profile",
        unit="s, share",
        formula="of profiled steps (refresh, reuse, mixed, all): num_steps; seconds and share by part",
        undefined="no step was profiled; share: such steps took no time",
        compute=profile,
    ),
    Metric(
        name="accuracy",
        unit="share",
        formula="correct / all requests, failed ones included; Wilson's 95 % interval",
        undefined="nothing is graded",
        compute=lambda r: accuracy(r, "correct"),
    ),
    Metric(
        name="accuracy_strict",
        unit="share",
        formula="as accuracy, by the task's stricter criterion",
        undefined="nothing is graded, or the task has one criterion only",
        compute=lambda r: accuracy(r, "correct_strict"),
    ),
)


def _floats(column: Sequence[float | None]) -> Floats:
    """Nulls become NaN, inside this file only."""
    return np.asarray(column, dtype=np.float64)


def _is_ok(record: RunRecord) -> npt.NDArray[np.bool_]:
    return np.asarray([status == "ok" for status in record.requests["status"]], dtype=np.bool_)


def _per_second(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count / seconds


def _kinds(record: RunRecord) -> dict[str, npt.NDArray[np.bool_]]:
    """Which steps are pure Refresh, pure Reuse and mixed; empty ones are neither."""
    refreshes, reuses = (np.asarray(record.steps[name]) > 0 for name in ("num_refresh", "num_reuse"))
    return {"refresh": refreshes & ~reuses, "reuse": reuses & ~refreshes, "mixed": refreshes & reuses}


def _share_of_time(record: RunRecord, column: str) -> float | None:
    """Sum of the column over sum of duration, over the steps that have it."""
    values, duration = _floats(record.steps[column]), _floats(record.steps["duration_s"])
    known = ~np.isnan(values)
    busy = float(duration[known].sum())
    return float(values[known].sum()) / busy if busy > 0 else None


def _time_weighted(record: RunRecord, values: Floats) -> float | None:
    duration = _floats(record.steps["duration_s"])
    busy = float(duration.sum())
    return float((values * duration).sum()) / busy if busy > 0 else None


def _kv(record: RunRecord) -> tuple[Floats, Floats, Floats]:
    total = _floats(record.steps["kv_rows_total"])
    has_pool = total > 0
    used, duration = _floats(record.steps["kv_rows_used"]), _floats(record.steps["duration_s"])
    return used[has_pool], total[has_pool], duration[has_pool]
