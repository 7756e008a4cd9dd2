"""A method configured for one workload: how it batches, how much memory that takes, and the engine that serves it.

The paper gives no sizes of static batches (§6.1). It says only that they are the largest that fit, found beforehand. ``batch_rule`` says
what has to fit: the workload's longest request, one of ``max_model_len`` tokens, or each batch's own longest; or it says one request.
For a simulated card the memory model decides what fits; if the model runs, the measured peak does ("preliminary profiling"). A batch
size that was asked for must fit too.

With ``is_upstream``, the allocations of published code have to fit. The batch is one request if published code serves one at a time. We
run a single request even if its allocation does not fit; ``oom_requests`` counts the requests for which it would fail. On a real
executor our code stands in for the published code, and only the batch may be smaller than the largest.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import (
    FoundBatch,
    StaticBatchScheduler,
    StaticFootprint,
    check_in_step,
    largest_batch,
)
from engines.cost.kernels import price_on
from engines.cost.roofline import Calibration, Gpu, StepPrice, gpu
from engines.data import ask
from engines.dllm.config import EngineConfig, sees
from engines.dllm.engine import Engine
from engines.dllm.memory import REDUCTION_ROWS, MemoryPlan, divide_memory, logit_rows_at_once
from engines.dllm.method import Method, Sampler
from engines.dllm.plan import Executor
from engines.dllm.rows import RowRule
from engines.dllm.scheduling import KvPool, Scheduler, scheduler_of
from engines.dllm.simulated import RecordingExecutor, Replayed, ReplayedRule, ReplayingExecutor, RooflineExecutor
from engines.errors import UserError, require
from engines.knobs import with_knobs
from repro.families.cost import DENOISING, describe_calibration, fit_of, load_calibration
from repro.families.dllm.record import drive_engine, step_requests
from repro.families.dllm.requests import grade_run
from repro.families.dllm.settings import BATCH_RULES, DEFAULT_BATCH_RULE, DllmSettings
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.runs.step_driver import VirtualClock, WallClock
from repro.tasks.task import Task
from repro.workloads.workload import Workload

ON_TORCH = "repro.families.dllm.on_torch"
"""The module that serves on a real device. A simulation loads no torch and does not depend on this code."""


@dataclass(frozen=True, kw_only=True)
class DllmDeployment:
    """A method for one workload. ``config``, ``kv_rows`` and ``batch_size`` are planned by arithmetic, or measured if the model runs."""

    method: Method
    settings: DllmSettings
    sampler: Sampler
    config: EngineConfig
    longest: int = 0
    """Tokens of the workload's longest request."""
    kv_rows: int = 0
    batch_size: int | None = None
    """The most requests of a static batch; None if steps are packed."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    """Calibration of a simulated card, in place of the stored one."""
    replayed: Replayed | None = None
    """The recorded steps that its simulated steps follow."""
    task: Task | None = None
    """The task whose problems the workload asks; None if nothing is graded."""

    @property
    def is_packed(self) -> bool:
        """Whether batching is continuous, on dLLM-Serve's engine. Otherwise padded batches run to completion."""
        return not isinstance(self.method, PublishedMethod) or self.settings.baseline.reading == "policy"

    @property
    def is_upstream(self) -> bool:
        """Whether batches are limited to those that published code can hold, and simulated steps also charge its copies of logits."""
        return not self.is_packed and self.settings.baseline.reading == "published"

    @property
    def is_sized_each(self) -> bool:
        """Whether each static batch has a size of its own."""
        return self.settings.baseline.batch_rule == "batch"

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Knobs that the cell always names, even if they were not given: the reading of a simulated baseline."""
        is_read = isinstance(self.method, PublishedMethod) and self.settings.is_simulated
        return {"reading": self.settings.baseline.reading} if is_read else {}

    @property
    def obtained(self) -> Obtained:
        return self.settings.charged.obtained if self.settings.is_simulated else "measured"

    @property
    def basis(self) -> str:
        return self.settings.basis + ("" if self.task is None else f" {self.task.digest}")

    @property
    def published(self) -> PublishedMethod:
        """The method, if batches are static. Only published methods have static batches."""
        assert isinstance(self.method, PublishedMethod)
        return self.method

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def modules(self) -> tuple[str, ...]:
        module = type(self.method).__module__
        if self.settings.is_simulated:
            return (module,)
        return module, self.method.torch_executors["packed" if self.is_packed else "static"].partition(":")[0]

    def check_machine(self) -> None:
        """Raise UserError if a measured run cannot run here. Any machine can simulate."""
        if not self.settings.is_simulated:
            import_module(ON_TORCH).check_machine(self.settings)

    def scheduler(self) -> Scheduler:
        pool, rule, exact = KvPool(self.kv_rows), self.sampler.rule, self.sampler.exact_steps
        if self.replayed is not None and sees(rule) and not isinstance(rule, RowRule):
            rule = ReplayedRule(rule=rule, replayed=self.replayed)
        if self.is_packed:
            kind, knobs = scheduler_of(self.config.scheduler), self.settings.scheduler_knobs
            arguments = {"own": with_knobs(kind.knobs(), knobs)} if knobs else {}
            scheduler = ask(kind, self.config, pool, rule, exact_steps=exact, **arguments)
            expected = {"config": self.config, "pool": pool, "rule": rule, "exact_steps": exact}
            is_kept = all(getattr(scheduler, name, None) is value for name, value in expected.items())
            require(
                is_kept,
                f"scheduler={self.config.scheduler!r} replaces the config, pool, rule or exact_steps that it is made with, "
                f"which say what is run: leave them",
            )
            return scheduler
        assert self.batch_size is not None
        return StaticBatchScheduler(
            self.config,
            pool,
            rule,
            batch_size=self.batch_size,
            exact_steps=exact,
            mixes_lengths=getattr(self.method, "mixes_lengths", True),
            room=partial(_fits, self) if self.is_sized_each else None,
        )

    @contextmanager
    def serving(self) -> "Iterator[tuple[Engine, DllmDeployment]]":
        """Yield a ready engine, and the deployment with all that was measured while assembling it."""
        if not self.settings.is_simulated:
            with import_module(ON_TORCH).serving(self) as (engine, measured):
                yield engine, measured
            return
        card = self.settings.platform.gpu
        assert card is not None, "settings refuse the roofline where there is no GPU model"
        executor: Executor = self.charged_to(self.cost_on(card), is_upstream=self.is_upstream)
        if self.replayed is not None:
            executor = ReplayingExecutor(executor, self.replayed)
        yield Engine(self.scheduler(), executor), self

    def following(self, replayed: Replayed) -> "DllmDeployment":
        """The deployment with simulated steps that follow a recorded run's. Raises UserError unless steps are packed."""
        require(self.is_packed, "replay follows packed steps alone: use reading='policy', or leave it out")
        return replace(self, replayed=replayed)

    def cost_on(self, card: str | Gpu) -> StepPrice:
        """The cost model that charges simulated steps."""
        settings = self.settings
        calibration = self.calibration or load_calibration(card)
        return price_on(settings.shape, gpu(card), settings.charged.framework, calibration)

    def charged_to(self, roofline: StepPrice, *, is_upstream: bool) -> RooflineExecutor:
        """The executor that charges steps to a roofline. With ``is_upstream`` it also charges the copies of published code."""
        if self.is_packed:
            return self.method.packed_roofline(roofline, self.config, self.sampler)
        copied_bytes = self.sampler.reduction_traffic_per_value(roofline.shape.dtype_bytes) if is_upstream else 0
        return self.published.static_roofline(roofline, self.config, self.sampler, copied_bytes_per_logit=copied_bytes)

    def _charged_text(self, card: str | Gpu) -> str:
        calibration, charged = self.calibration or load_calibration(card), self.settings.charged
        if charged.framework is None:
            return describe_calibration(calibration)
        how = "assumed" if fit_of(card) is None else "fitted"
        return charged.describe(card, f"{1e3 * calibration.step_overhead_s:g} ms a step {how}")

    def _estimates(self) -> Mapping[str, Any]:
        """How much of a composed run's times is estimated."""
        settings, card = self.settings, self.settings.platform.gpu
        if not settings.is_simulated or card is None:
            return {}
        return settings.charged.estimates(card, settings.shape, {(DENOISING, 1): 1.0})

    def run(self, workload: Workload, on_progress: OnProgress | None = None) -> RunRecord:
        settings, card = self.settings, self.settings.platform.gpu
        clock = VirtualClock() if settings.is_simulated else WallClock()
        with self.serving() as (engine, measured):
            started_s = time.process_time()
            recording = None
            if any(map(engine.is_open_ended, workload.requests)):
                engine.executor = recording = RecordingExecutor(engine.executor)
            record = drive_engine(engine, workload.requests, clock, on_progress=on_progress, recording=recording)
            cpu_time = {} if settings.is_simulated else {"processor_s": time.process_time() - started_s}
            if self.task is not None:
                record = grade_run(record, self.task, _outputs(engine, record), settings.model)
        if not settings.is_simulated:
            record = record.with_manifest(device=settings.device, dtype=settings.dtype, weights=settings.weights)
        sizes = step_requests(record)
        # How many requests each step ran: for static batches, the batch size.
        batches = {"mean": sizes["mean"], "largest": int(sizes["max"])} if sizes["n"] else None
        return record.with_manifest(
            obtained=self.obtained,
            dataset=asdict(workload.provenance),
            max_num_batched_tokens=measured.config.max_num_batched_tokens,
            platform=settings.platform.title,
            model=settings.model,
            system=self.method.title,
            calibration=self._charged_text(card) if settings.is_simulated and card else None,
            facts={**measured.facts, "batch_ran": batches, **cpu_time, **self._estimates()},
        )


def _outputs(engine: Engine, record: RunRecord) -> dict[int, tuple[int, ...]]:
    outputs = {}
    for request_id, status in zip(record.requests["request_id"], record.requests["status"], strict=True):
        if status == "ok":
            ids = engine.take_output(request_id)
            assert ids is not None, "a simulation is never graded"
            outputs[request_id] = ids
    return outputs


def plan_packed(deployment: DllmDeployment, lengths: Sequence[int]) -> DllmDeployment:
    """The deployment with its pool, sized by arithmetic. Raises UserError for settings that cannot be served."""
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


def pool_rows(deployment: DllmDeployment, *, activations_measured_bytes: int | None = None) -> tuple[int, MemoryPlan]:
    """The pool's rows, each of the method's own size, and the memory split that leaves them."""
    method, settings, config = deployment.method, deployment.settings, deployment.config
    shape = settings.shape
    per_request = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    row_bytes = method.cache_row_bytes(shape)
    # We count whole buffers of a chunk of logits: the chunk itself, and the buffers that reducing it takes, rounded up.
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced_rows = min(rows, REDUCTION_ROWS) if deployment.sampler.decode.confidence_dtype == "float64" else rows
    copied_bytes = reduced_rows * deployment.sampler.reduction_bytes_per_value(shape.dtype_bytes)
    plan = divide_memory(
        shape,
        settings.memory_limit,
        config,
        logit_rows=config.logit_rows,
        logit_copies=1 - (-copied_bytes // (rows * shape.dtype_bytes)),
        activations_measured_bytes=activations_measured_bytes,
    )
    # We count KV rows. A method without a cache still needs room for its worst step.
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


def _fits(deployment: DllmDeployment, longest: int, members: int) -> bool:
    """Whether a batch of ``members`` requests, padded to the longest, fits in memory."""
    footprint = _footprint(deployment, longest, is_upstream=deployment.is_upstream)
    return footprint.peak_bytes(members) <= deployment.settings.memory_limit


def plan_static(deployment: DllmDeployment, lengths: Sequence[int]) -> DllmDeployment:
    """The deployment with its batch size from the memory model. Raises UserError if the batch does not fit or cannot stay in step."""
    settings = deployment.settings
    requested, limit = settings.baseline.batch_size, settings.engine.max_num_seqs
    require(
        requested is None or requested <= limit,
        f"batch_size={requested} is more than max_num_seqs={limit} allows: ask for fewer, or raise max_num_seqs",
    )
    _check_rule(deployment)
    deployment = replace(deployment, longest=max(lengths))
    max_members = most_members(deployment)
    check_in_step(settings.generation, deployment.sampler.decode, max_members)
    facts = dict(_planned(deployment, max_members) if requested is None else _requested(deployment, max_members))
    if deployment.is_upstream and settings.is_simulated:
        # Longer requests take more memory, so we find the fitting ones by bisection.
        ordered = sorted(lengths)
        fitting = bisect_right(
            ordered,
            settings.memory_limit,
            key=lambda length: _footprint(deployment, length, is_upstream=True).peak_bytes(1),
        )
        facts["oom_requests"] = len(ordered) - fitting
    return sized(deployment, facts)


def sized(deployment: DllmDeployment, facts: Mapping[str, Any]) -> DllmDeployment:
    """The deployment with a batch of ``facts['batch_size']``."""
    batch_size, settings = facts["batch_size"] or most_members(deployment), deployment.settings
    # Only dLLM-Serve has a token budget. Memory alone limits a static batch.
    config = replace(deployment.config, max_num_batched_tokens=batch_size * settings.engine.max_model_len)
    rows = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    kv_rows = batch_size * rows
    if deployment.is_sized_each:
        free = settings.memory_limit - _footprint(deployment, deployment.longest).fixed_bytes
        kv_rows = max(rows, min(kv_rows, free // settings.shape.kv_bytes_per_token))
    return replace(deployment, config=config, kv_rows=kv_rows, batch_size=batch_size, facts=facts)


def most_members(deployment: DllmDeployment) -> int:
    """The most requests of any batch, however much memory there is."""
    settings, baseline = deployment.settings, deployment.settings.baseline
    max_members = min(settings.asked.num_prompts, settings.engine.max_num_seqs)
    if baseline.batch_size is not None:
        return min(max_members, baseline.batch_size)
    if baseline.batch_rule == "one":
        return 1
    if not deployment.is_upstream:
        return max_members
    if not deployment.published.batches_upstream:
        return 1
    if deployment.is_sized_each:
        return max_members
    footprint = _footprint(deployment, member_tokens(deployment), is_upstream=True)
    return min(max_members, max(1, (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes))


def member_tokens(deployment: DllmDeployment) -> int:
    """Tokens that each member of a batch needs room for."""
    settings = deployment.settings
    return settings.engine.max_model_len if settings.baseline.batch_rule == "max_model_len" else deployment.longest


def batch_facts(batch: FoundBatch, deployment: DllmDeployment, limit: int) -> Mapping[str, Any]:
    """Facts of a batch found by running batches of up to ``limit``. Raises UserError if it is smaller than the batch asked for."""
    settings, asked = deployment.settings, deployment.settings.baseline.batch_size
    if asked is None:
        return _largest_facts(batch, deployment, "by the measured peak")
    if batch.size < limit:
        _refuse_batch(limit, settings.memory_limit, batch.size)
    return {"batch_size": batch.size, "batch_obtained": _size_text(asked, limit), "batch_peak_bytes": batch.peak_bytes}


def _planned(deployment: DllmDeployment, limit: int) -> Mapping[str, Any]:
    settings = deployment.settings
    rule, size = BATCH_RULES[settings.baseline.batch_rule], None if deployment.is_sized_each else limit
    if deployment.is_upstream and settings.is_simulated:
        is_batched = deployment.published.batches_upstream
        how = f"{rule}, in published code's memory" if is_batched else "one request at a time, as published code serves"
        return {"batch_size": size, "batch_obtained": how}
    if deployment.is_sized_each:
        return {"batch_size": size, "batch_obtained": f"{rule}, by the memory model"}
    footprint = _footprint(deployment, member_tokens(deployment))
    batch = largest_batch(footprint.peak_bytes, settings.memory_limit, fixed_bytes=footprint.fixed_bytes, most=limit)
    return _largest_facts(batch, deployment, "by the memory model")


def _largest_facts(batch: FoundBatch, deployment: DllmDeployment, how: str) -> Mapping[str, Any]:
    rule = BATCH_RULES[deployment.settings.baseline.batch_rule]
    within = ", up to what published code could hold" if deployment.is_upstream else ""
    return {"batch_size": batch.size, "batch_obtained": f"{rule}, {how}{within}", "batch_peak_bytes": batch.peak_bytes}


def _requested(deployment: DllmDeployment, requested: int) -> Mapping[str, Any]:
    settings, is_upstream = deployment.settings, deployment.is_upstream
    assert settings.baseline.batch_size is not None
    facts = {"batch_size": requested, "batch_obtained": _size_text(settings.baseline.batch_size, requested)}
    if not settings.is_simulated:
        return facts
    footprint = _footprint(deployment, deployment.longest, is_upstream=is_upstream)
    peak = footprint.peak_bytes(requested)
    if peak > settings.memory_limit and (requested > 1 or not is_upstream):
        fitting = (settings.memory_limit - footprint.fixed_bytes) // footprint.per_request_bytes
        _refuse_batch(requested, settings.memory_limit, max(0, fitting))
    return {**facts, "batch_peak_bytes": peak}


def _footprint(deployment: DllmDeployment, longest: int, *, is_upstream: bool = False) -> StaticFootprint:
    settings = deployment.settings
    return deployment.published.footprint(
        settings.shape,
        deployment.sampler,
        settings.generation,
        memory_bytes=settings.memory_limit,
        longest=longest,
        is_upstream=is_upstream,
    )


def _check_rule(deployment: DllmDeployment) -> None:
    method, baseline = deployment.published, deployment.settings.baseline
    if baseline.batch_rule == DEFAULT_BATCH_RULE:
        return
    require(
        baseline.batch_rule != "batch" or deployment.settings.is_simulated,
        "batch_rule='batch' needs executor='roofline', as batches of a measured run are found once: use workload or max_model_len",
    )
    require(
        method.batches_upstream or not deployment.is_upstream,
        f"batch_rule={baseline.batch_rule!r} has no effect with system={method.name!r} and reading={baseline.reading!r}, whose code "
        "serves one request at a time: leave it out",
    )


def _size_text(requested: int, size: int) -> str:
    return "asked for" if size == requested else f"asked for {requested}, all {size} requests"


def _refuse_batch(requested: int, memory_limit: int, fitting: int) -> NoReturn:
    raise UserError(
        f"batch_size={requested} does not fit into memory_limit={memory_limit}, which holds {fitting}: ask for no more, give "
        "more memory, or leave it out for the largest"
    )
