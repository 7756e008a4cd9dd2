"""A method configured for one workload: how it batches, what memory that takes, and the engine that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig
from engines.dllm.engine import Engine
from engines.dllm.method import Method, Sampler
from engines.dllm.scheduling.registry import scheduler_of
from engines.dllm.scheduling.scheduler import Scheduler
from engines.errors import require
from engines.hardware.roofline import Calibration
from engines.named import asked
from repro.runs.clock import VirtualClock, WallClock
from repro.runs.drivers.steps import OnProgress
from repro.runs.record import Obtained, RunRecord
from repro.systems.calibration import describe_calibration, load_calibration
from repro.systems.dllm.graded import grade_run
from repro.systems.dllm.knobs import Batching
from repro.systems.dllm.log import drive_engine
from repro.systems.dllm.metrics import step_requests
from repro.systems.dllm.settings import Settings
from repro.tasks.task import Task
from repro.workloads.workload import Workload

BACKENDS: Mapping[str, str] = {"torch": "repro.systems.dllm.on_torch", "roofline": "repro.systems.dllm.on_roofline"}
"""By executor; a simulation loads no torch, nor depends on its code."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``config``, ``kv_rows`` and ``batch_size`` are planned by arithmetic, and measured by assembling where the model runs."""

    method: Method
    settings: Settings
    sampler: Sampler
    batching: Batching
    config: EngineConfig
    longest: int = 0
    """Tokens of the workload's longest request."""
    kv_rows: int = 0
    batch_size: int | None = None
    """Requests of a static batch; None where steps are packed."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    """Calibration of a simulated card, in place of the stored one."""
    task: Task | None = None
    """Whose problems the workload asks; None where nothing is graded."""

    @property
    def obtained(self) -> Obtained:
        return "simulated" if self.settings.is_simulated else "measured"

    @property
    def basis(self) -> str:
        return self.settings.basis + ("" if self.task is None else f" {self.task.digest}")

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Knobs that the cell names whether they were given or not: what a simulated baseline stands for."""
        has_readings = isinstance(self.method, PublishedMethod) and self.settings.is_simulated
        return {"reading": self.settings.baseline.reading} if has_readings else {}

    @property
    def published(self) -> PublishedMethod:
        """The method of a static batch: no other has them."""
        assert isinstance(self.method, PublishedMethod)
        return self.method

    @property
    def device(self) -> str:
        return self.settings.on.device

    @property
    def modules(self) -> tuple[str, ...]:
        own = (
            type(self.method).__module__,
            *(f"repro.systems.dllm.{name}" for name in ("system", "family", "platforms")),
        )
        executors = [] if self.settings.is_simulated else [self.method.torch_executors[self.batching.kind]]
        if ":" in self.config.scheduler:
            executors.append(self.config.scheduler)
        return (*own, BACKENDS[self.settings.executor], *(where.partition(":")[0] for where in executors))

    def check_machine(self) -> None:
        """Any machine simulates."""
        if not self.settings.is_simulated:
            import_module(BACKENDS["torch"]).check_machine(self.settings)

    def scheduler(self) -> Scheduler:
        pool, rule, exact = KvPool(self.kv_rows), self.sampler.rule, self.sampler.exact_steps
        if self.batching.kind == "packed":
            made = asked(scheduler_of(self.config.scheduler), self.config, pool, rule, exact_steps=exact)
            own = {"config": self.config, "pool": pool, "rule": rule, "exact_steps": exact}
            kept = all(getattr(made, name, None) is given for name, given in own.items())
            require(
                kept,
                f"scheduler={self.config.scheduler!r} replaces the config, pool, rule or exact_steps that it is made with, "
                f"which say what is run: leave them",
            )
            return made
        assert self.batch_size is not None
        return StaticBatchScheduler(
            self.config,
            pool,
            rule,
            batch_size=self.batch_size,
            exact_steps=exact,
            mixes_lengths=getattr(self.method, "mixes_lengths", True),
        )

    def serving(self) -> AbstractContextManager[tuple[Engine, Deployment]]:
        """In its body there is an engine, and the deployment as it was measured on the way."""
        return import_module(BACKENDS[self.settings.executor]).serving(self)  # type: ignore[no-any-return]

    def run(self, workload: Workload, on_progress: OnProgress | None = None) -> RunRecord:
        with self.serving() as (engine, measured):
            return _drive(engine, measured, workload, on_progress)


def _drive(engine: Engine, deployment: Deployment, workload: Workload, on_progress: OnProgress | None) -> RunRecord:
    settings, gpu = deployment.settings, deployment.settings.platform.gpu
    clock = VirtualClock() if settings.is_simulated else WallClock()
    record = drive_engine(engine, workload.requests, clock, on_progress=on_progress)
    if deployment.task is not None:
        record = grade_run(record, deployment.task, _outputs(engine, record), settings.model)
    if not settings.is_simulated:
        on = settings.on
        record = record.with_manifest(device=on.device, dtype=on.dtype, weights=on.weights)
    ran = step_requests(record)
    # Requests that a step ran: of a static batch how large it was.
    batches = {"mean": ran["mean"], "largest": int(ran["max"])} if ran["n"] else None
    return record.with_manifest(
        dataset=asdict(workload.provenance),
        max_num_batched_tokens=deployment.config.max_num_batched_tokens,
        platform=settings.platform.title,
        model=settings.model,
        system=deployment.method.title,
        calibration=describe_calibration(deployment.calibration or load_calibration(gpu))
        if settings.is_simulated and gpu
        else None,
        facts={**deployment.facts, "batch_ran": batches},
    )


def _outputs(engine: Engine, record: RunRecord) -> dict[int, tuple[int, ...]]:
    outputs = {}
    for request_id, status in zip(record.requests["request_id"], record.requests["status"], strict=True):
        if status == "ok":
            ids = engine.take_output(request_id)
            assert ids is not None, "a simulation is never graded"
            outputs[request_id] = ids
    return outputs
