"""A method configured for one workload: how it batches, what memory that takes, and the engine that serves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.cards import Gpu, gpu
from engines.cost.composed import Composed
from engines.cost.kernels import Kernels
from engines.cost.roofline import Calibration, Roofline
from engines.dllm.config import EngineConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.replay import Recording, Replayed, ReplayedRule, ReplayingExecutor
from engines.dllm.executor.roofline import RooflineExecutor
from engines.dllm.memory.budget import REDUCTION_ROWS, MemoryPlan, divide_memory, logit_rows_at_once
from engines.dllm.method import Method, Sampler
from engines.dllm.plan import Executor
from engines.dllm.scheduling.phase import SeeingRule
from engines.dllm.scheduling.registry import scheduler_of
from engines.dllm.scheduling.scheduler import KvPool, Scheduler
from engines.errors import UserError, require
from engines.knobs import given_to
from engines.named import asked
from repro.runs.drivers.steps import OnProgress, VirtualClock, WallClock
from repro.runs.record import Obtained, RunRecord
from repro.systems.calibration import describe_calibration, fit_of, load_calibration
from repro.systems.dllm.family import step_requests
from repro.systems.dllm.knobs import Batching
from repro.systems.dllm.log import drive_engine
from repro.systems.dllm.requests import grade_run
from repro.systems.dllm.settings import REPLAY, Settings
from repro.tasks.task import Task
from repro.workloads.workload import Workload

ON_TORCH = "repro.systems.dllm.on_torch"
"""What serves on a real device: a simulation loads no torch, nor depends on its code."""


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
    """Most requests of a static batch; None where steps are packed."""
    room: Callable[[int, int], bool] | None = None
    """Whether requests as long as the longest of them and so many fit in memory, where each batch is sized by its own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that the cell names whether they were given or not: what a simulated baseline stands for."""
    calibration: Calibration | None = None
    """Calibration of a simulated card, in place of the stored one."""
    replayed: Replayed | None = None
    """What its simulated steps follow."""
    task: Task | None = None
    """Whose problems the workload asks; None where nothing is graded."""

    @property
    def obtained(self) -> Obtained:
        return self.settings.charged.obtained if self.settings.is_simulated else "measured"

    @property
    def basis(self) -> str:
        return self.settings.basis + ("" if self.task is None else f" {self.task.digest}")

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
        own = (type(self.method).__module__, *(f"repro.systems.dllm.{name}" for name in ("system", "family")))
        is_simulated = self.settings.is_simulated
        executors = [] if is_simulated else [ON_TORCH, self.method.torch_executors[self.batching.kind]]
        if ":" in self.config.scheduler:
            executors.append(self.config.scheduler)
        if self.replayed is not None:
            executors.append(REPLAY)
        return (*own, *(where.partition(":")[0] for where in executors))

    def check_machine(self) -> None:
        """Any machine simulates."""
        if not self.settings.is_simulated:
            import_module(ON_TORCH).check_machine(self.settings)

    def scheduler(self) -> Scheduler:
        pool, rule, exact = KvPool(self.kv_rows), self.sampler.rule, self.sampler.exact_steps
        if self.replayed is not None and isinstance(rule, SeeingRule):
            rule = ReplayedRule(rule=rule, replayed=self.replayed)
        if self.batching.kind == "packed":
            kind, given = scheduler_of(self.config.scheduler), self.settings.scheduler_knobs
            own = {"own": given_to(kind.knobs(), given)} if given else {}
            made = asked(kind, self.config, pool, rule, exact_steps=exact, **own)
            told = {"config": self.config, "pool": pool, "rule": rule, "exact_steps": exact}
            kept = all(getattr(made, name, None) is value for name, value in told.items())
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
            room=self.room,
        )

    @contextmanager
    def serving(self) -> Iterator[tuple[Engine, Deployment]]:
        """In its body there is an engine, and the deployment as it was measured on the way."""
        if not self.settings.is_simulated:
            with import_module(ON_TORCH).serving(self) as (engine, measured):
                yield engine, measured
            return
        card = self.settings.platform.gpu
        assert card is not None, "settings refuse the roofline where there is no GPU model"
        cost = self.cost_on(card)
        executor: Executor = self.charged_to(cost, is_upstream=self.batching.is_upstream)
        if self.replayed is not None:
            executor = ReplayingExecutor(executor, self.replayed)
        yield Engine(self.scheduler(), executor), self

    def following(self, replayed: Replayed) -> Deployment:
        """As it is where simulated steps follow a run's."""
        require(
            self.batching.kind == "packed", "replay follows packed steps alone: use reading='policy', or leave it out"
        )
        return replace(self, replayed=replayed)

    def cost_on(self, card: str | Gpu) -> Roofline:
        """What a simulated step is charged by."""
        calibration, shape = self.calibration or load_calibration(card), self.settings.shape
        framework = self.settings.charged.framework
        if framework is None:
            return Roofline(shape, gpu(card), calibration)
        return Composed(Kernels(shape, gpu(card), framework), calibration)

    def charged_to(self, roofline: Roofline, *, is_upstream: bool) -> RooflineExecutor:
        """What charges the steps to a roofline; ``is_upstream`` charges the copies of published code too."""
        if self.batching.kind == "packed":
            return self.method.packed_roofline(roofline, self.config, self.sampler)
        copied = self.sampler.reduction_traffic_per_value(roofline.shape.dtype_bytes) if is_upstream else 0
        return self.published.static_roofline(roofline, self.config, self.sampler, copied_bytes_per_logit=copied)

    def _charged_text(self, card: str | Gpu) -> str:
        calibration, charged = self.calibration or load_calibration(card), self.settings.charged
        if charged.framework is None:
            return describe_calibration(calibration)
        how = "assumed" if fit_of(card) is None else "fitted"
        return charged.describe(card, f"{1e3 * calibration.step_overhead_s:g} ms a step {how}")

    def run(self, workload: Workload, on_progress: OnProgress | None = None) -> RunRecord:
        settings, card = self.settings, self.settings.platform.gpu
        clock = VirtualClock() if settings.is_simulated else WallClock()
        with self.serving() as (engine, measured):
            began = time.process_time()
            recording = None
            if any(map(engine.is_open_ended, workload.requests)):
                engine.executor = recording = Recording(engine.executor)
            record = drive_engine(engine, workload.requests, clock, on_progress=on_progress, recording=recording)
            spent = {} if settings.is_simulated else {"processor_s": time.process_time() - began}
            if self.task is not None:
                record = grade_run(record, self.task, _outputs(engine, record), settings.model)
        if not settings.is_simulated:
            on = settings.on
            record = record.with_manifest(device=on.device, dtype=on.dtype, weights=on.weights)
        ran = step_requests(record)
        # Requests that a step ran: of a static batch how large it was.
        batches = {"mean": ran["mean"], "largest": int(ran["max"])} if ran["n"] else None
        return record.with_manifest(
            obtained=self.obtained,
            dataset=asdict(workload.provenance),
            max_num_batched_tokens=measured.config.max_num_batched_tokens,
            platform=settings.platform.title,
            model=settings.model,
            system=self.method.title,
            calibration=self._charged_text(card) if settings.is_simulated and card else None,
            facts={**measured.facts, "batch_ran": batches, **spent},
        )


def _outputs(engine: Engine, record: RunRecord) -> dict[int, tuple[int, ...]]:
    outputs = {}
    for request_id, status in zip(record.requests["request_id"], record.requests["status"], strict=True):
        if status == "ok":
            ids = engine.take_output(request_id)
            assert ids is not None, "a simulation is never graded"
            outputs[request_id] = ids
    return outputs


def plan_packed(deployment: Deployment, lengths: Sequence[int]) -> Deployment:
    """The deployment with its pool, by arithmetic; refuses settings that cannot be served."""
    sampler = deployment.method.packed(deployment.sampler, is_simulated=deployment.settings.is_simulated)
    deployment = replace(deployment, sampler=sampler, longest=max(lengths))
    kind = scheduler_of(deployment.config.scheduler)
    kind.check(deployment.config, deployment.settings.generation)
    kind.check_rule(sampler.rule)
    kv_rows, plan = pool_rows(deployment)
    facts = {
        "kv_rows": kv_rows,
        "activation_bytes": plan.activation_bytes,
        "logits_bytes": plan.logits_bytes,
        "kv_bytes": plan.kv_bytes,
        "memory_plan": asdict(plan),
    }
    return replace(deployment, kv_rows=kv_rows, facts=facts)


def pool_rows(deployment: Deployment, *, activations_measured_bytes: int | None = None) -> tuple[int, MemoryPlan]:
    """Rows of the pool, in the method's own size, and the split that leaves them."""
    method, settings, config = deployment.method, deployment.settings, deployment.config
    shape = settings.shape
    per_request = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    row_bytes = method.cache_row_bytes(shape)
    # Whole buffers of a chunk of logits: itself, and what reducing it takes, rounded up.
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced = min(rows, REDUCTION_ROWS) if deployment.sampler.decode.confidence_dtype == "float64" else rows
    copied = reduced * deployment.sampler.reduction_bytes_per_value(shape.dtype_bytes)
    plan = divide_memory(
        shape,
        settings.memory_limit,
        config,
        logit_rows=config.logit_rows,
        logit_copies=1 - (-copied // (rows * shape.dtype_bytes)),
        activations_measured_bytes=activations_measured_bytes,
    )
    # Counted in KV rows; a method without a cache still needs its worst step to fit.
    needed = max(1, -(-per_request * row_bytes // shape.kv_bytes_per_token))
    if plan.kv_rows < needed:
        knobs = ["max_num_batched_tokens", *(["max_num_logits"] if config.logit_rows == "decomposed" else [])]
        raise UserError(
            f"memory_bytes={settings.memory_limit}: budget too small for one request, which needs {needed} KV rows of "
            f"{shape.kv_bytes_per_token} bytes while {plan.kv_bytes} bytes are left for KV: give more memory or lower "
            f"{', '.join(f'{name}={getattr(config, name)}' for name in knobs)}"
        )
    # More rows than all slots together can use would only cost memory.
    return min(plan.kv_bytes // row_bytes, config.max_num_seqs * per_request), plan
