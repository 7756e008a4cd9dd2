"""Families: what systems of one kind share. A family has metrics, each with its formula, unit, and when it is undefined. It has columns and
tables beyond the harness's own, their checks, and rules that tell whether a run's numbers may be used.

An undefined value is None, never NaN. "ok" requests are the finished ones. Failed and unfinished requests have no latency, and count
against goodput. Times count from the due time, so they include waiting for the engine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.errors import require
from repro.runs.cell import Cell
from repro.runs.record import EVERY, REQUEST_COLUMNS, REQUESTS, Column, RunRecord, Table, columns_in, is_marked, rows_in

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PERCENTILES = {50: 2, 90: 10, 95: 20, 99: 100}
"""Percentiles, each with the fewest samples that put one sample beyond it."""
REQUEST_TIMES = {"e2el_s": "finished_s", "ttft_s": "first_output_s", "queue_wait_s": "admitted_s"}
"""A request's time is this column minus its due time."""


Compute = Callable[[RunRecord], Any]


class Metric(NamedTuple):
    name: str
    unit: str
    formula: str
    undefined: str
    compute: Compute


def metrics_in(path: Path, family: str, functions: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The metrics of a family in a CSV file. Each is computed by the function of its name, or is a fact of the run."""
    metrics = []
    for row in rows_in(path, family):
        name = row["name"]
        compute = partial(_fact, name=name) if is_marked(row, "fact") else functions.get(name)
        if not callable(compute):
            raise ValueError(f"{path}: metric {name!r} has no function of its name")
        metrics.append(Metric(name, row["unit"], row["formula"], row["undefined"], compute))
    return tuple(metrics)


def _fact(record: RunRecord, name: str) -> Any:
    return record.facts[name]


# -- requests ---------------------------------------------------------------------------------------------


def status_counts(record: RunRecord) -> dict[str, int]:
    statuses = record.requests["status"]
    return {status: statuses.count(status) for status in ("ok", "failed", "unfinished")}


def request_times(record: RunRecord, name: str) -> Floats:
    """One value for each ok request that has the stamp, in table order. ``name`` is a key of ``REQUEST_TIMES``."""
    times = (column(record, REQUEST_TIMES[name]) - column(record, "arrival_s"))[is_ok(record)]
    return without_nan(times)


def window_s(record: RunRecord) -> float | None:
    """Last finish of an ok request minus the first arrival of any request. None without an ok request, or if that is not positive."""
    finished = column(record, "finished_s")[is_ok(record)]
    if finished.size == 0:
        return None
    span = float(finished.max() - column(record, "arrival_s").min())
    return span if span > 0 else None


def served_per_second(record: RunRecord, sum_column: str | None = None) -> float | None:
    """Ok requests per second, or the sum of a column of whole numbers over them, per second."""
    ok = is_ok(record)
    amount = int(ok.sum()) if sum_column is None else int(column(record, sum_column)[ok].sum())
    seconds = window_s(record)
    return None if seconds is None else amount / seconds


def distribution(values: Sequence[float] | Floats) -> dict[str, Any]:
    """n, mean, std, min, max, span and ``PERCENTILES`` of finite values.

    std is the population's (ddof 0) and needs n >= 2. span = max - min. A percentile interpolates linearly between order statistics
    (Hyndman and Fan's type 7, like numpy and vLLM). It is None if n is too small for it to mean anything.
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
    ranks = [q for q, fewest in PERCENTILES.items() if n >= fewest]
    percentiles = dict(zip(ranks, np.percentile(data, ranks), strict=True)) if ranks else {}
    summary |= {f"p{q}": float(percentiles[q]) if q in percentiles else None for q in PERCENTILES}
    return summary


# -- goodput ----------------------------------------------------------------------------------------------

SYNONYMS: Mapping[str, str] = {"itl-request": "tpot", "itl-gap": "itl"}
"""Short names of objectives for the time between tokens: mean per request (TPOT), and each gap (ITL)."""


def goodput(record: RunRecord) -> dict[str, Any]:
    """Goodput for each of the manifest's ``slos``, ``{name: {time: limit in seconds}}``: num_good; requests_s = num_good / window;
    attainment = num_good / all requests, failed ones included.

    A request is good if it is ok and every named time is at most its limit. A request without a named stamp is not good: a time that was
    not seen cannot have met a limit.
    """
    arrival, by_slo = column(record, "arrival_s"), {}
    for name, limits in sorted(record.manifest.get("slos", {}).items()):
        require(bool(limits), f"slo {name!r} has no limit: name at least one of {', '.join(REQUEST_TIMES)}")
        good = is_ok(record)
        for time, limit in sorted(limits.items()):
            require(
                time in REQUEST_TIMES, f"slo {name!r} limits {time!r}, which is unknown: use {', '.join(REQUEST_TIMES)}"
            )
            require(0 < limit < math.inf, f"slo {name!r} has {time}={limit!r}: a limit must be positive seconds")
            # A missing stamp is NaN, and a comparison with NaN is False.
            good = good & (column(record, REQUEST_TIMES[time]) - arrival <= limit)
        by_slo[name] = {"limits": dict(sorted(limits.items())), **goodput_facts(record, good)}
    return by_slo


def goodput_facts(record: RunRecord, is_good: Mask) -> dict[str, Any]:
    """The number of good requests, their rate per second, and their share of all requests."""
    num_good, n, seconds = int(is_good.sum()), is_good.size, window_s(record)
    return {
        "num_good": num_good,
        "requests_s": None if seconds is None else num_good / seconds,
        "attainment": num_good / n if n else None,
    }


def column(record: RunRecord, name: str, table: str = REQUESTS) -> Floats:
    """A column as an array, with NaN for null. It is made once, and is read-only."""
    if (table, name) not in record.derived:
        record.derived[table, name] = _read_only(np.asarray(record.tables[table][name], dtype=np.float64))
    array: Floats = record.derived[table, name]
    return array


def mask(record: RunRecord, name: str, value: object = True) -> Mask:
    """[requests] Whether a column has this value; cached and read-only like ``column``."""
    if (REQUESTS, name, value) not in record.derived:
        values = record.requests[name]
        is_value = values.where(value) if hasattr(values, "where") else [entry == value for entry in values]
        record.derived[REQUESTS, name, value] = _read_only(np.asarray(is_value, dtype=np.bool_))
    matches: Mask = record.derived[REQUESTS, name, value]
    return matches


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def without_nan(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def is_ok(record: RunRecord) -> Mask:
    """[requests] Whether each request finished."""
    return mask(record, "status", "ok")


METRICS = metrics_in(
    Path(__file__).with_name("metrics.csv"),
    EVERY,
    {
        "num_requests": status_counts,
        "window_s": window_s,
        "throughput_tok_s": partial(served_per_second, sum_column="output_len"),
        "request_throughput": served_per_second,
        **{name: lambda record, name=name: distribution(request_times(record, name)) for name in REQUEST_TIMES},
        "goodput": goodput,
    },
)


# -- whether a run counts, and what its family is -----------------------------------------------------------

MAX_HARNESS_DELAY_S = 0.010
MAX_HARNESS_DELAY_SHARE = 0.01
"""A submission is late if the harness itself added more than the larger of 10 ms and 1 % of the mean latency. A run is invalid if more than
1 % of its submissions are late."""
MAX_LATE_SHARE = 0.01

_ORDER = ("arrival_s", "admitted_s", "first_output_s", "finished_s")


@dataclass(frozen=True, kw_only=True)
class Validity:
    valid: bool
    reasons: tuple[str, ...]
    """Why the run is not valid."""
    warnings: tuple[str, ...] = ()
    """Notes that a reader of valid numbers must know: that the machine was also busy with something else, or the facts' ``warnings``."""


def request_counts(record: RunRecord) -> Iterator[str]:
    n, counts = len(record.requests["request_id"]), status_counts(record)
    if n == 0:
        yield "there are no requests"
        return
    if counts["failed"]:
        first_error = next(error for error in record.requests["error"] if error is not None)
        yield f"{counts['failed']} of {n} requests failed, the first with: {first_error}"
    if counts["unfinished"]:
        yield f"{counts['unfinished']} of {n} requests did not finish"
    if unknown := n - sum(counts.values()):
        yield f"{unknown} of {n} requests have an unknown status"
    if negative := int((column(record, "output_len") < 0).sum()):
        yield f"{negative} of {n} requests have an output_len below 0"
    if (repeated := n - len(set(record.requests["request_id"]))) > 0:
        yield f"{repeated} request ids are repeated"


def request_stamps(record: RunRecord) -> Iterator[str]:
    """Checks arrival <= admitted <= first output <= finished. A stamp that no request has was not observed, which is no fault."""
    ok, stamps = is_ok(record), {name: column(record, name) for name in _ORDER}
    for name in _ORDER[1:]:
        missing = int((np.isnan(stamps[name]) & ok).sum())
        if missing and (name == "finished_s" or missing < int(ok.sum())):
            yield f"{missing} finished requests have no {name}"
    if (column(record, "submit_lag_s") < 0).any():
        yield "some requests were submitted before they were due"
    for i, earlier in enumerate(_ORDER):
        for later in _ORDER[i + 1 :]:
            # A missing stamp is NaN, and a comparison with NaN is False.
            if wrong := int((stamps[later] < stamps[earlier]).sum()):
                yield f"{wrong} requests have {later} before {earlier}"


def late_submissions(record: RunRecord, earliest: Floats | None = None) -> Iterator[str]:
    """Checks for late submissions. ``earliest`` is when each request could be submitted at all, if that is later than its due time."""
    lag = column(record, "submit_lag_s")
    was_submitted = ~np.isnan(lag)
    due = column(record, "arrival_s")[was_submitted]
    if due.size == 0:
        return
    possible = due if earliest is None else earliest[was_submitted]
    delay = due + lag[was_submitted] - possible
    latencies = request_times(record, "e2el_s")
    limit = max(MAX_HARNESS_DELAY_S, MAX_HARNESS_DELAY_SHARE * float(latencies.mean()) if latencies.size else 0.0)
    late = int((delay > limit).sum())
    if late > MAX_LATE_SHARE * due.size:
        yield (
            f"{late} of {due.size} requests were submitted more than {limit * 1e3:.3g} ms late by the harness "
            f"(worst {float(delay.max()) * 1e3:.3g} ms)"
        )


Score = tuple[float, ...]
"""How badly a run served its load; lower is better. The first number decides, and the next one breaks ties."""
CHECKS = (request_counts, request_stamps)
"""Checks of every run that serves requests."""
Check = Callable[[RunRecord], Iterator[str]]
"""Yields reasons why a run's numbers may not be used, a clause each; none if they may."""


class SummaryColumn(NamedTuple):
    title: str
    metric: str
    is_share: bool = False
    stat: str | None = None
    """Which number to show of a metric that is a distribution."""
    scale: float = 1.0
    is_predicted: bool = False
    """Whether a measured run shows the simulator's prediction and its error instead of the measured value."""


def summary_in(path: Path, family: str) -> tuple[SummaryColumn, ...]:
    """The summary columns of a family that a CSV file lists."""
    return tuple(
        SummaryColumn(
            row["title"],
            row["metric"],
            is_share=is_marked(row, "share"),
            stat=row["stat"] or None,
            scale=float(row["scale"] or 1),
            is_predicted=is_marked(row, "predicted"),
        )
        for row in rows_in(path, family)
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of system. ``checks`` and ``metrics`` add to the harness's, and ``tables`` to its table of requests."""

    name: str
    request_columns: tuple[Column, ...] = ()
    tables: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()
    checks: tuple[Check, ...] = ()
    shown: tuple[SummaryColumn, ...] = ()
    """Extra columns in tables of runs."""
    unit: str = "req"
    """The unit of arrival rates, as a column head: req, sessions, turns."""
    ends_at_first_token: bool = False
    """Whether runs only prefill: latencies are then TTFT, and the computed tokens are those of prompts."""
    serves: bool = True
    """Whether runs serve requests; the harness's own metrics and checks need requests."""
    score: Callable[[RunRecord], Score] | None = None
    """The score that a search for the best settings minimises (repro.runs.tuning); None: nothing is tuned."""
    trial: Callable[[Cell], Cell] | None = None
    """Returns the cell that a search tries settings in, if its trials can be shorter than its runs."""

    @cached_property
    def columns(self) -> Mapping[str, tuple[Column, ...]]:
        """Columns of every table of a run."""
        return {REQUESTS: REQUEST_COLUMNS + self.request_columns, **self.tables}

    @property
    def every_metric(self) -> tuple[Metric, ...]:
        """Metrics of every run that serves requests, and the family's own, which win if names are equal."""
        by_name = {metric.name: metric for metric in (*(METRICS if self.serves else ()), *self.metrics)}
        return tuple(by_name.values())

    def check_tables(self, record: RunRecord) -> None:
        """Raise ValueError unless the record has exactly the family's tables and their columns. Columns of a table must have one length,
        nulls only where allowed, and only finite numbers."""
        if wrong := sorted(set(record.tables) ^ set(self.columns)):
            kind = "unknown" if wrong[0] in record.tables else "missing"
            raise ValueError(f"table {wrong[0]!r} of a run of family {self.name} is {kind}")
        for name, columns in self.columns.items():
            table = record.tables[name]
            if wrong := sorted(set(table) ^ {spec.name for spec in columns}):
                kind = "unknown" if wrong[0] in table else "missing"
                raise ValueError(f"table {name}: column {wrong[0]!r} is {kind}")
            if len({len(values) for values in table.values()}) > 1:
                raise ValueError(f"table {name}: columns differ in length: { {k: len(v) for k, v in table.items()} }")
            for spec in columns:
                values = table[spec.name]
                num_known = len(values) - values.count(None)
                if not spec.nullable and num_known < len(values):
                    raise ValueError(f"table {name}: column {spec.name!r} holds a null")
                is_number = spec.kind == "float" and num_known > 0
                if is_number and np.isfinite(column(record, spec.name, name)).sum() != num_known:
                    raise ValueError(f"table {name}: column {spec.name!r} holds a value that is not finite")

    def summarize(self, record: RunRecord) -> dict[str, Any]:
        """The value of every metric, by name."""
        return {metric.name: metric.compute(record) for metric in self.every_metric}

    def assess(self, record: RunRecord) -> Validity:
        reasons = tuple(
            reason for check in (*(CHECKS if self.serves else ()), *self.checks) for reason in check(record)
        )
        return Validity(valid=not reasons, reasons=reasons)


def family_in(folder: Path, name: str, functions: Mapping[str, Any], **others: Any) -> Family:
    """Return a family whose columns, metrics and summary columns are listed in the CSV files of a folder.

    ``functions`` compute the metrics of their names. ``others`` are fields of ``Family`` that no file holds. Raises ValueError for a row
    that gives no valid metric or column.
    """
    columns = columns_in(folder / "columns.csv", name)
    return Family(
        name=name,
        request_columns=columns.pop(REQUESTS),
        tables=columns,
        metrics=metrics_in(folder / "metrics.csv", name, functions),
        shown=summary_in(folder / "summary.csv", name),
        **others,
    )


_KINDS: Mapping[str, tuple[type | tuple[type, ...], Callable[[Any], Any]]] = {
    "int": (Integral, int),
    "float": (Real, float),
    "str": (str, str),
    "bool": ((bool, np.bool_), bool),
}


def plain_table(name: str, table: Table, columns: Sequence[Column]) -> Table:
    """The table with values as JSON holds them. Raises TypeError for a value of another kind than its column's."""
    plain: Table = {}
    for spec in columns:
        kind, convert = _KINDS[spec.kind]
        values = table[spec.name]
        if not all(value is None or isinstance(value, kind) for value in values):
            raise TypeError(f"table {name}: column {spec.name!r} holds a value that is no {spec.kind}")
        plain[spec.name] = [None if value is None else convert(value) for value in values]
    return plain
