"""Latency, violations and throughput of one run of prefill instances.

TTFT is first token minus arrival. A violation rate counts every request whose deadline passed, finished or not, and
leaves out those the end of the run left open. Means and percentiles are over finished requests, so in overload they
are censored; the longest wait is not: an unfinished request counts with its age.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.laps.cluster import PrefillRun

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PrefillSummary:
    """Times in seconds; NaN where there is nothing to average."""

    num_requests: int
    """Arrived after the warm-up."""
    requests_per_s: float
    """Finished after the warm-up."""
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p90_short_s: float
    p90_long_s: float
    longest_s: float
    violation_rate: float
    violation_rate_short: float
    violation_rate_long: float
    utilisation: float
    """Busy share of all instances, the warm-up included."""
    padding: float
    """Padded over real tokens."""


def summarise(run: PrefillRun, warmup_s: float = 0.0) -> PrefillSummary:
    """Requests that arrived before ``warmup_s`` are left out."""
    requests, end_s = run.requests, float(run.facts["end_s"])
    arrival_s, finished_s = _floats(requests["arrival_s"]), _floats(requests["finished_s"])
    kept = arrival_s >= warmup_s
    ttft_s = finished_s - arrival_s
    is_short = np.array([each == "short" for each in requests["length_class"]], dtype=np.bool_)
    violated = _floats(requests["violated"])
    done = kept & ~np.isnan(finished_s)
    age_s = np.where(np.isnan(ttft_s), end_s - arrival_s, ttft_s)[kept]
    busy_s = fsum(run.instances["busy_s"])
    tokens = sum(run.instances["tokens"])
    p50_s, p90_s, p99_s = (_quantile(ttft_s[done], quantile) for quantile in (0.5, 0.9, 0.99))
    return PrefillSummary(
        num_requests=int(kept.sum()),
        requests_per_s=float((finished_s >= warmup_s).sum()) / (end_s - warmup_s) if end_s > warmup_s else float("nan"),
        mean_s=_mean(ttft_s[done]),
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        p90_short_s=_quantile(ttft_s[done & is_short], 0.9),
        p90_long_s=_quantile(ttft_s[done & ~is_short], 0.9),
        longest_s=float(age_s.max()) if len(age_s) else float("nan"),
        violation_rate=_mean(violated[kept]),
        violation_rate_short=_mean(violated[kept & is_short]),
        violation_rate_long=_mean(violated[kept & ~is_short]),
        utilisation=busy_s / (end_s * len(run.instances["instance"])) if end_s > 0 else float("nan"),
        padding=sum(run.instances["padded_tokens"]) / tokens if tokens else float("nan"),
    )


def little(run: PrefillRun) -> tuple[float, float]:
    """Time-average number of requests in the system, and arrival rate times mean time in it (Little's law).

    The first integrates the number over the run's events, the second averages the requests' own times, those cut off
    by the end included: the two agree on any correct record.
    """
    end_s = float(run.facts["end_s"])
    arrival_s, finished_s = _floats(run.requests["arrival_s"]), _floats(run.requests["finished_s"])
    left = finished_s[~np.isnan(finished_s)]
    times = np.concatenate([arrival_s, left])
    change = np.concatenate([np.ones(len(arrival_s)), -np.ones(len(left))])
    order = np.argsort(times, kind="stable")
    number = np.cumsum(change[order])
    lasted = np.diff(np.append(times[order], end_s))
    stay_s = np.where(np.isnan(finished_s), end_s, finished_s) - arrival_s
    return float((number * lasted).sum()) / end_s, len(arrival_s) / end_s * float(stay_s.mean())


def _floats(column: Sequence[Any]) -> Floats:
    """Null becomes NaN."""
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _quantile(values: Floats, quantile: float) -> float:
    return float(np.quantile(values, quantile)) if len(values) else float("nan")
