"""Waiting times of queues from formulas: M/D/1, and M/G/k after Lee and Longton."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from engines.ampd.planner import erlang_c
from engines.errors import require
from engines.knobs import Range, check_requested, with_knobs
from paper_figures.common import style
from repro.families.platforms import Platform
from repro.files import replace_bytes
from repro.reports.claims import Finding
from repro.reports.figures import Paper, Rendered, View
from repro.runs.cell import Cell
from repro.runs.family import Family, Metric, SummaryColumn, column
from repro.runs.record import REQUESTS, Column, Obtained, OnProgress, RunRecord
from repro.runs.step_driver import RequestLog, in_arrival_order
from repro.runs.store import StoredRun


def mean_wait(servers: int, load: float, cv2: float) -> float:
    """Lee and Longton: the wait of M/M/k times (1 + cv^2) / 2. Exact for M/M/k and M/G/1."""
    return erlang_c(servers, servers * load) / (servers * (1 - load)) * (1 + cv2) / 2


COLUMNS = (Column(name="queue_len", kind="int", meaning="jobs there when it arrived, the one in service too"),)
WORK = (Column(name="idle_s", kind="float", meaning="time the server waited for the job"),)


def mean_queue(record: RunRecord) -> float:
    return float(column(record, "queue_len").mean())


def served_in_turn(record: RunRecord) -> Iterator[str]:
    if (np.diff(column(record, "finished_s")) < 0).any():
        yield "jobs overtook each other"


QUEUE = Family(
    name="queue",
    request_columns=COLUMNS,
    tables={"work": WORK},
    metrics=(Metric("mean_queue", "jobs", "mean of queue_len over jobs", "never", mean_queue),),
    checks=(served_in_turn,),
    shown=(SummaryColumn("queue", "mean_queue"),),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    request_id: int
    arrival_s: float
    prompt_len: int = 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Jobs:
    requests: tuple[Job, ...]
    provenance: Origin


@dataclass(frozen=True, kw_only=True)
class Server:
    service_s: float
    obtained: ClassVar[Obtained] = "simulated"
    basis: ClassVar[str] = ""
    facts: ClassVar[Mapping[str, Any]] = {}
    modules: ClassVar[tuple[str, ...]] = (__name__,)

    def check_machine(self) -> None:
        """Any machine will do."""

    def run(self, workload: Jobs, on_progress: OnProgress | None = None) -> RunRecord:
        ordered = in_arrival_order(workload.requests)
        log = RequestLog(ordered, COLUMNS)
        idle: list[float] = []
        ends: list[float] = []
        for job in ordered:
            log.submit(job.request_id, job.arrival_s)
            log.set_once("queue_len", job.request_id, len(ends) - bisect_right(ends, job.arrival_s))
            free = ends[-1] if ends else 0.0
            start = max(free, job.arrival_s)
            idle.append(start - free)
            ends.append(start + self.service_s)
            log.set_once("admitted_s", job.request_id, start)
            log.set_once("first_output_s", job.request_id, ends[-1])
            log.close(job.request_id, "ok", finished_s=ends[-1], output_len=1)
        tables = {REQUESTS: log.table, "work": {"idle_s": idle}}
        return RunRecord(tables=tables, manifest={"obtained": "simulated", "dataset": asdict(workload.provenance)})


@dataclass(frozen=True, kw_only=True)
class QueueKnobs:
    service_s: Annotated[float, Range(above=0)] = 1.0
    """Seconds of a job."""
    num_prompts: Annotated[int, Range(1, 10**5)] = 200
    """Jobs."""


class Md1:
    name = "md1"
    title = "M/D/1"
    family = QUEUE
    knobs = (QueueKnobs,)

    def prepare(self, cell: Cell) -> tuple[Server, Jobs]:
        check_requested(cell.requested, QueueKnobs, owner="system='md1'")
        asked = with_knobs(QueueKnobs(), cell.requested)
        require(cell.rate is not None, "rate: jobs need an arrival rate")
        gaps = np.random.default_rng(cell.seed).exponential(1 / (cell.rate or 1), asked.num_prompts)
        times = np.cumsum(gaps).tolist()
        jobs = tuple(Job(request_id=i, arrival_s=time_s) for i, time_s in enumerate(times))
        checksum = hashlib.sha256(repr(times).encode()).hexdigest()
        return Server(service_s=asked.service_s), Jobs(
            requests=jobs, provenance=Origin(source="exponential gaps", checksum=checksum)
        )


MD1 = Md1()
WORKSHOP = Platform(name="workshop", title="a workshop", executor="virtual", gpu=None)


TITLE = "Mean wait of M/D/1 against load"
SOURCE = "Pollaczek and Khinchine"
PLATFORMS = (f"{__name__}:WORKSHOP",)
LOADS = (0.3, 0.6, 0.8)


def cells(view: View) -> list[Cell]:
    return [
        view.applied(
            Cell(
                figure="md1",
                system=f"{__name__}:MD1",
                dataset="jobs",
                platform=f"{__name__}:WORKSHOP",
                executor=view.platform.executor,
                rate=load,
                seed=seed,
                knobs=(("service_s", 1.0), ("num_prompts", 20000)),
            )
        )
        for load in LOADS
        for seed in view.seeds
    ]


def waits(runs: Sequence[StoredRun]) -> list[tuple[float, float]]:
    return [(run.cell.rate or 0.0, run.summary["queue_wait_s"]["mean"]) for run in runs]


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    found = waits(runs)
    with style.drawing():
        figure, (axes,) = style.grid_of_panels([TITLE], columns=1)
        axes.plot(*zip(*found, strict=True), marker="o", label="simulated")
        style.compose(figure, [axes], title=TITLE, line="All runs simulated.")
        pictures = [replace_bytes(out / f"md1.{kind}", style.rendered(figure, kind)) for kind in ("png", "pdf")]
    csv = style.save_csv(out / "md1.csv", ("load", "wait_s"), found)
    return Rendered(
        files=(*pictures, csv), columns=("load", "wait s"), rows=tuple((str(a), f"{b:.3f}") for a, b in found)
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    worst = max(abs(wait / (load / (2 * (1 - load))) - 1) for load, wait in waits(runs))
    return [Finding(claim="md1-wait", value=100 * worst, obtained="simulated", how="largest error of the mean wait")]


CLAIMS_YAML = """
- id: md1-wait
  paper: queueing
  kind: stated
  section: eq. 1
  statement: the mean wait is rho / (2 (1 - rho)) service times
  metric: queue_wait_s
  expected: {value: 0, unit: "%"}
  direction: equal
  tolerance: {type: absolute, value: 10}
  figure: md1
  conditions: null
"""
"""What the test writes beside the runs."""


def paper_at(claims: Path) -> Paper:
    return Paper(
        name="queueing", title="Queueing", package=__name__.rpartition(".")[0], figures={"md1": TITLE}, claims=claims
    )
