"""What systems of one kind share: what their runs record beyond the harness's own tables, and what is read off it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from repro.runs.metrics import METRICS, Metric
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Column, RunRecord
from repro.runs.tables import check_table
from repro.runs.validity import CHECKS, Validity

Check = Callable[[RunRecord], Iterator[str]]
"""Reasons why a run's numbers may not be used, a clause each; none if they may."""


class Shown(NamedTuple):
    title: str
    metric: str
    is_share: bool = False
    stat: str | None = None
    """Which number of a metric that is a distribution."""
    scale: float = 1.0
    is_predicted: bool = False
    """Whether a measured run shows what the simulator said, and its error, instead of what was measured."""


WAITS = (Shown("wait s", "queue_wait_s", stat="mean"), Shown("longest wait s", "queue_wait_s", stat="max"))
"""Beside the mean what a policy that starves a request would hide in it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """``checks`` and ``metrics`` come on top of the harness's, ``tables`` beside its table of requests."""

    name: str
    request_columns: tuple[Column, ...] = ()
    tables: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()
    checks: tuple[Check, ...] = ()
    shown: tuple[Shown, ...] = ()
    """What tables of runs show besides what every run has."""
    serves: bool = True
    """Whether runs serve requests; the harness's own metrics and checks are about them."""

    @cached_property
    def columns(self) -> Mapping[str, tuple[Column, ...]]:
        """Columns of every table of a run."""
        return {REQUESTS: REQUEST_COLUMNS + self.request_columns, **self.tables}

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        return (METRICS if self.serves else ()) + self.metrics

    def check_tables(self, record: RunRecord) -> None:
        """Raise ValueError unless the record has the family's tables and columns."""
        if wrong := sorted(set(record.tables) ^ set(self.columns)):
            kind = "unknown" if wrong[0] in record.tables else "missing"
            raise ValueError(f"table {wrong[0]!r} of a run of family {self.name} is {kind}")
        for name, columns in self.columns.items():
            check_table(name, record.tables[name], columns)

    def summarize(self, record: RunRecord) -> dict[str, Any]:
        """Every metric, by name."""
        return {metric.name: metric.compute(record) for metric in self.all_metrics}

    def assess(self, record: RunRecord) -> Validity:
        reasons = tuple(
            reason for check in (*(CHECKS if self.serves else ()), *self.checks) for reason in check(record)
        )
        return Validity(valid=not reasons, reasons=reasons)
