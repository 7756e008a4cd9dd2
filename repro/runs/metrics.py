"""Metrics of every run that serves requests, each with its formula, unit, and when it is undefined.

An undefined value is None, never NaN. "ok" requests are the finished ones; failed and unfinished requests
have no latency, and count against goodput. Times count from the due time, so waiting for the engine is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.errors import require
from repro.runs.record import REQUESTS, RunRecord

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PERCENTILES = {50: 2, 90: 10, 95: 20, 99: 100}
"""With the fewest samples that put one beyond each."""
REQUEST_TIMES = {"e2el_s": "finished_s", "ttft_s": "first_output_s", "queue_wait_s": "admitted_s"}
"""A request's time is this column minus its due time."""


class Metric(NamedTuple):
    name: str
    unit: str
    formula: str
    undefined: str
    compute: Callable[[RunRecord], Any]


def metric(unit: str, formula: str, undefined: str = "never") -> Callable[[Callable[[RunRecord], Any]], Metric]:
    """The function below is a metric, under its own name."""
    return lambda compute: Metric(compute.__name__, unit, formula, undefined, compute)


# -- requests ---------------------------------------------------------------------------------------------


def status_counts(record: RunRecord) -> dict[str, int]:
    statuses = record.requests["status"]
    return {status: statuses.count(status) for status in ("ok", "failed", "unfinished")}


def request_times(record: RunRecord, name: str) -> Floats:
    """One value per ok request that has the stamp, in table order; ``name`` is a key of ``REQUEST_TIMES``."""
    times = (column(record, REQUEST_TIMES[name]) - column(record, "arrival_s"))[is_ok(record)]
    return known(times)


def window_s(record: RunRecord) -> float | None:
    """Last finish of an ok request minus first arrival of any; None without an ok request or of no length."""
    finished = column(record, "finished_s")[is_ok(record)]
    if finished.size == 0:
        return None
    span = float(finished.max() - column(record, "arrival_s").min())
    return span if span > 0 else None


def served_per_second(record: RunRecord, summed: str | None = None) -> float | None:
    """Ok requests, or the sum of what they have of a column of whole numbers, a second."""
    ok = is_ok(record)
    amount = int(ok.sum()) if summed is None else int(column(record, summed)[ok].sum())
    seconds = window_s(record)
    return None if seconds is None else amount / seconds


def distribution(values: Sequence[float] | Floats) -> dict[str, Any]:
    """n, mean, std, min, max, span and ``PERCENTILES`` of finite values.

    std is the population's (ddof 0), needs n >= 2. span = max - min. A percentile interpolates linearly
    between order statistics (Hyndman and Fan's type 7, as numpy and vLLM) and is left out where n is too
    small for it to mean anything.
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
    told = [q for q, fewest in PERCENTILES.items() if n >= fewest]
    found = dict(zip(told, np.percentile(data, told), strict=True)) if told else {}
    summary |= {f"p{q}": float(found[q]) if q in found else None for q in PERCENTILES}
    return summary


# -- goodput ----------------------------------------------------------------------------------------------


def goodput(record: RunRecord) -> dict[str, Any]:
    """By the manifest's ``slos``, ``{name: {time: limit in seconds}}``: num_good; requests_s = num_good / window; attainment =
    num_good / all requests, failed ones included.

    A request is good when it is ok and every named time is at most its limit. One without a named stamp is not: what was not
    seen cannot have met a limit.
    """
    arrival, found = column(record, "arrival_s"), {}
    for name, limits in sorted(record.manifest.get("slos", {}).items()):
        require(bool(limits), f"slo {name!r} has no limit: name at least one of {', '.join(REQUEST_TIMES)}")
        good = is_ok(record)
        for time, limit in sorted(limits.items()):
            require(
                time in REQUEST_TIMES, f"slo {name!r} limits {time!r}, which is unknown: use {', '.join(REQUEST_TIMES)}"
            )
            require(0 < limit < math.inf, f"slo {name!r} has {time}={limit!r}: a limit must be positive seconds")
            # A comparison with NaN, a missing stamp, is False.
            good = good & (column(record, REQUEST_TIMES[time]) - arrival <= limit)
        found[name] = {"limits": dict(sorted(limits.items())), **told_of_good(record, good)}
    return found


def told_of_good(record: RunRecord, good: Mask) -> dict[str, Any]:
    """How many requests are good, a second and of all."""
    num_good, n, seconds = int(good.sum()), good.size, window_s(record)
    return {
        "num_good": num_good,
        "requests_s": None if seconds is None else num_good / seconds,
        "attainment": num_good / n if n else None,
    }


def column(record: RunRecord, name: str, table: str = REQUESTS) -> Floats:
    """A column as an array, null as NaN, which is made once and cannot be written to."""
    if (table, name) not in record.derived:
        record.derived[table, name] = _shared(np.asarray(record.tables[table][name], dtype=np.float64))
    found: Floats = record.derived[table, name]
    return found


def mask(record: RunRecord, name: str, value: object = True) -> Mask:
    """[requests] where a column has this value; as ``column``."""
    if (REQUESTS, name, value) not in record.derived:
        is_value = [each == value for each in record.requests[name]]
        record.derived[REQUESTS, name, value] = _shared(np.asarray(is_value, dtype=np.bool_))
    found: Mask = record.derived[REQUESTS, name, value]
    return found


def _shared(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def is_ok(record: RunRecord) -> Mask:
    """[requests] which of them finished."""
    return mask(record, "status", "ok")


_NO_WINDOW = "no ok request, or the window has no length"
_NO_SAMPLE = "per entry: no ok request with the stamp; std below 2, pQ below 100 / (100 - Q) of them"


def _of_times(name: str, stamp: str) -> Metric:
    formula = f"distribution of {stamp} - arrival"
    return Metric(name, "s", formula, _NO_SAMPLE, lambda record: distribution(request_times(record, name)))


METRICS: tuple[Metric, ...] = (
    Metric("num_requests", "requests", "by status: ok, failed, unfinished", "never", status_counts),
    Metric("window_s", "s", "last finish of ok requests - first arrival", _NO_WINDOW, window_s),
    Metric(
        "throughput_tok_s",
        "tokens/s",
        "sum of output_len over ok requests / window_s",
        _NO_WINDOW,
        partial(served_per_second, summed="output_len"),
    ),
    Metric("request_throughput", "requests/s", "ok requests / window_s", _NO_WINDOW, served_per_second),
    _of_times("e2el_s", "finished"),
    _of_times("ttft_s", "first output"),
    _of_times("queue_wait_s", "admitted"),
    Metric(
        "goodput",
        "requests/s, share",
        "by SLO: good requests / window_s; good / all requests",
        f"rate: {_NO_WINDOW}; share: no requests",
        goodput,
    ),
)
