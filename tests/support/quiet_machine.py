"""Measured runs as on a machine with nothing else to do, so that no test depends on what else its machine does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from repro.runs import sweep
from repro.runs.provenance import Load
from repro.runs.record import REQUESTS, RunRecord
from repro.runs.sitting import Sitting


def keep_quiet() -> None:
    """From here on, sweeps in this process that are given no sitting find the machine quiet."""
    sweep.Sitting = QuietSitting


def _steady() -> float:
    return 0.05


@dataclass(kw_only=True)
class QuietSitting(Sitting):
    """The calibration loop takes the same every time, no step waits for a core, and every request is submitted in time."""

    loop: Callable[[], float] | None = _steady
    cpu: Callable[[], float] = field(default_factory=lambda: count(0.0, 3600.0).__next__)
    """More than any steps take, those included that a scripted engine only claims."""

    def measure(self, run: Callable[[], Any]) -> tuple[Any, Load]:
        record, load = super().measure(run)
        return submitted_in_time(record), load


def submitted_in_time(record: RunRecord) -> RunRecord:
    """Without positive lags; a negative one is no busy machine's doing, and stays."""
    lags = [None if lag is None else min(lag, 0.0) for lag in record.requests["submit_lag_s"]]
    return record.with_columns(REQUESTS, submit_lag_s=lags)
