"""The first stages of a card's suite, with runs that say what a test tells them to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from support.suite_cases import AT
from support.tables import data_beside

from engines.cost.roofline import H200, Calibration, StepWork
from engines.models.shape import LLADA_8B
from repro.gpu_suite.calibration import TimedSteps
from repro.gpu_suite.suite import FIRST, Job, Suite, scale_of, stages, title_of
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

KNOWN = Calibration(
    gpu="h200",
    matmul_efficiency=0.55,
    attention_efficiency=0.55,
    bandwidth_efficiency=0.8,
    step_overhead_s=0.002,
    fitted_on=(),
    note="",
)
BLOCK, LENGTH = 32, 512
PREDICTED = data_beside(__file__, "told_suite")["predicted"]
"""Tokens per second that a simulator might expect."""


class Validity(NamedTuple):
    valid: bool = True
    reasons: tuple[str, ...] = ()


VALID = Validity()


@dataclass(frozen=True)
class ToldRun:
    """What is read of a stored run."""

    cell: Cell
    summary: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    graphs: bool = False
    validity: Validity = VALID
    num_requests: int = 256
    device: str = "NVIDIA H200"

    @property
    def manifest(self) -> Mapping[str, Any]:
        return {"facts": {"model": self.cell.knob_values.get("model", "llada-8b")}}

    @property
    def provenance(self) -> Mapping[str, Any]:
        return {
            "gpu": {"name": self.device},
            "cpu": {"model": "a CPU"},
            "git": {"commit": "abcdef0"},
            "finished_utc": "2025-01-02T03:04:05Z",
        }

    def table(self, name: str) -> Mapping[str, list[Any]]:
        return {"graph": [False, self.graphs]}


@dataclass(frozen=True, kw_only=True)
class ToldSuite(Suite):
    told: Mapping[str, ToldRun]
    """By the job's name."""

    def stored(self, job: Job) -> Any:
        return self.told.get(job.name)


@lru_cache
def first_jobs(platform: str = "h200") -> tuple[Job, ...]:
    asked = [each for each in stages(scale_of(platform)) if each.stage in FIRST]
    return tuple(
        Job(
            stage=each.stage,
            experiment=prepare(each.cell),
            estimate_s=1.0,
            predicted_tok_s=PREDICTED.get(title_of(each.cell)),
        )
        for each in asked
    )


def told_suite(root: Path, told: Mapping[str, ToldRun], platform: str = "h200") -> ToldSuite:
    return ToldSuite(jobs=first_jobs(platform), root=root, platform=platform, command="go on", told=told, git=AT)


def served(stage: str, speeds: Mapping[str, float], *, model: str | None = None, **more: Any) -> dict[str, ToldRun]:
    """Runs of the systems of one stage: tok/s, and half of the roofline; dLLM-Serve's steps are graphs."""
    found = {}
    for job in first_jobs():
        cell = job.experiment.cell
        if job.stage == stage and title_of(cell) in speeds and cell.knob_values.get("model") == model:
            found[job.name] = ToldRun(
                cell=cell,
                summary={
                    "throughput_tok_s": speeds[title_of(cell)],
                    "roofline_share": 0.5,
                    "graph_hit_rate": 1.0,
                    "outside_forward_share": 0.25,
                },
                facts={"bound": {"card": "h200", "flops_per_s": H200.peak_flops, "bytes_per_s": H200.bandwidth}},
                graphs=cell.system == "dllm-serve" or "reading" in cell.knob_values,
                **more,
            )
    return found


def checked(stage: str, note: str, *, script: str | None = None, rows: Any = None, **more: Any) -> dict[str, ToldRun]:
    return {
        job.name: ToldRun(cell=job.experiment.cell, summary={"note": note}, facts={"rows": rows}, **more)
        for job in first_jobs()
        if job.stage == stage and job.experiment.cell.knob_values.get("script") == script
    }


def work_of(kind: str, size: int, length: int = LENGTH) -> StepWork:
    """A Refresh or Reuse step of ``size`` requests."""
    rows = size * (length if kind == "refresh" else BLOCK)
    return StepWork(
        query_rows=rows,
        attention_pairs=rows * length,
        logit_rows=size * BLOCK,
        kv_read_rows=size * length,
        kv_written_rows=rows,
        num_sequences=size,
    )


def timed(kind: str, size: int, calibration: Calibration, *, slower: float = 1.0, length: int = LENGTH) -> TimedSteps:
    """Steps that take what a calibration says."""
    made = TimedSteps(
        kind=kind,
        batch_size=size,
        total_len=length,
        seconds=1.0,
        works=((8, work_of(kind, size, length)),),
        shape=LLADA_8B,
    )
    return TimedSteps(**{**made.__dict__, "seconds": slower * made.predicted_s(H200, calibration)})


def step_rows(calibration: Calibration = KNOWN, sizes: tuple[int, ...] = (1, 16, 64, 256)) -> dict[str, Any]:
    """As repro/bench/step.py leaves them."""
    rows = [
        {
            "kind": row.kind,
            "batch_size": row.batch_size,
            "total_len": row.total_len,
            "ms": 1e3 * row.seconds,
            "host": 0.1,
            "graph": 1.0,
            "works": [[n, work.non_defaults()] for n, work in row.works],
        }
        for size in sizes
        for row in (timed(kind, size, calibration) for kind in ("refresh", "reuse"))
    ]
    return {"rows": rows, "shape": LLADA_8B.dimensions, "flops_per_s": 1e12, "bytes_per_s": 1e10}


def peak_rows(share: float) -> dict[str, Any]:
    """As repro/bench/peaks.py leaves them, at this share of the datasheet."""
    return {"rows": [{"flops_per_s": share * H200.peak_flops, "bytes_per_s": share * H200.bandwidth}]}


def host_rows(reuse_ms: float, a_layer: int) -> dict[str, Any]:
    """As repro/bench/host.py leaves them."""
    return {
        "rows": [{"requests": 64, "reuse_ms": reuse_ms, "reuse_p95_ms": 2 * reuse_ms}],
        "launches": [
            {"name": "reuse, operator by operator", "a_layer": 34},
            {"name": "reuse, fused", "a_layer": a_layer},
        ],
    }
