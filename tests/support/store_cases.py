"""An experiment, and records and provenance to store of it."""

from support.driven import drive
from support.fake_system import fake_cell

from repro.runs.experiment import prepare
from repro.runs.provenance import GitState, Timing, collect
from repro.runs.record import RunRecord
from repro.runs.store import StoredRun

EXPERIMENT = prepare(fake_cell(rate=1.0, num_prompts=4, executor="real"))
"""Measured: every table of its run is kept."""
CELL = EXPERIMENT.cell


def make_record(service_s: float = 0.75) -> RunRecord:
    record = drive([0.0, 0.5, 1.0, 4.0], service_s)
    return record.with_manifest(
        obtained="measured", calibration="cal-1", dataset={"name": "poisson"}, max_num_batched_tokens=4
    )


def make_provenance(finished: str = "2025-01-02T03:04:05Z") -> dict[str, object]:
    timing = Timing(started_utc="2025-01-02T03:04:00Z", finished_utc=finished, elapsed_s=5.0)
    return collect(obtained="simulated", timing=timing, git=GitState(commit="abc", dirty=False), argv=["repro", "run"])


def whole_record(run: StoredRun) -> RunRecord:
    """With every table, as it was stored."""
    tables = {name: run.table(name) for name in run.family.columns}
    return RunRecord(tables=tables, manifest=run.manifest["facts"])
