"""A run packed where it is made: what comes back from there is ready to be stored."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from repro.runs.drivers.steps import OnProgress
from repro.runs.experiment import Experiment
from repro.runs.provenance import GitState, Timing, clean_command, collect, git_state, utc_now
from repro.runs.record import RunRecord
from repro.runs.sitting import Sitting
from repro.runs.store import Packed, pack

_OBJECTS = 100_000
"""That a simulation makes before the collector looks at them (Python's default: 700)."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Makes a run and packs it, in whatever process of whatever machine it is called: what it knows is the sweep's.

    Packing a run takes about as long as a short simulation. Done by the sweep, one after the other, workers would wait.
    """

    git: GitState
    command: tuple[str, ...]

    @classmethod
    def of_this_process(cls) -> Packing:
        # Cleaned here: another machine knows nothing of the folders of this one.
        return cls(git=git_state(), command=tuple(clean_command(sys.argv)))

    def make(
        self, experiment: Experiment, on_progress: OnProgress | None = None, sitting: Sitting | None = None
    ) -> Packed:
        """A run in a sitting says besides how busy the machine was."""
        with nullcontext() if experiment.is_measured else _collecting_rarely():
            started, began, load = utc_now(), time.perf_counter(), None
            if sitting is None:
                record = experiment.run(on_progress)
            else:
                record, load = sitting.measure(partial(experiment.run, on_progress))
            elapsed = time.perf_counter() - began
            provenance = collect(
                obtained=record.obtained,
                timing=Timing(started_utc=started, finished_utc=utc_now(), elapsed_s=elapsed, load=load),
                git=self.git,
                calibration=record.manifest.get("calibration"),
                dataset=record.manifest.get("dataset"),
                argv=self.command,
                sitting=None if sitting is None else sitting.id,
                busy_s=_busy_s(experiment, record) if experiment.is_measured else None,
            )
            return pack(experiment, record, provenance)


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A simulation makes millions of small objects and no rings of them: looking for some took a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _busy_s(experiment: Experiment, record: RunRecord) -> float | None:
    """Seconds of a measured run's steps, where its family has steps and they were computed on the CPU."""
    if record.manifest.get("device", "cpu") != "cpu":
        return None
    compute = next((metric.compute for metric in experiment.family.all_metrics if metric.name == "busy_s"), None)
    return None if compute is None else compute(record)
