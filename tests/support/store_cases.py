"""Records and provenance to store."""

from __future__ import annotations

from pathlib import Path

from support.driven import drive

from repro.runs.cell import Cell
from repro.runs.provenance import GitState, Timing, collect
from repro.runs.record import RunRecord

CELL = Cell(system="fake", dataset="poisson", platform="cpu", executor="virtual", rate=1.0, seed=0, knobs=(("a", 1),))


VOLATILE = "provenance.json"


def make_record(service_s: float = 0.75) -> RunRecord:
    record = drive([0.0, 0.5, 1.0, 4.0], service_s)
    return record.with_manifest(calibration="cal-1", dataset={"name": "poisson"}, max_num_batched_tokens=4)


def make_provenance(finished: str = "2025-01-02T03:04:05Z") -> dict[str, object]:
    timing = Timing(started_utc="2025-01-02T03:04:00Z", finished_utc=finished, elapsed_s=5.0)
    return collect(obtained="simulated", timing=timing, git=GitState(commit="abc", dirty=False), argv=["repro", "run"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != VOLATILE}
