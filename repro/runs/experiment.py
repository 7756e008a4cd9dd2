"""From a cell to a run: settings, workload, engine, driver."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from baselines.dllm.method import check_ties, generation_of, method
from engines.dllm.config import GenerationConfig
from engines.dllm.engine import Engine
from engines.errors import UserError
from repro.runs.cell import Cell
from repro.runs.clock import VirtualClock, WallClock
from repro.runs.drivers.steps import DriveProgress, drive_steps
from repro.runs.record import RunRecord
from repro.systems import Assembled, Resources, System, system
from repro.systems.calibration import describe_calibration
from repro.systems.settings import Settings, resolve
from repro.tasks.evaluation import grade_run, task_of, task_workload
from repro.tasks.task import Task
from repro.workloads import ArrivalConfig, Workload, WorkloadConfig, build_workload

MIN_PROMPT_LEN = 8


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A cell made concrete and checked; nothing heavy has run yet."""

    cell: Cell
    settings: Settings
    system: System
    workload: Workload
    resources: Resources
    task: Task | None = None
    """Whose problems the workload asks; None where nothing is graded."""


def prepare(cell: Cell) -> Experiment:
    """Resolve and check a cell. Every refusal a user can cause is raised here, before any run.

    The cell gets a ``basis``: a digest of its requests and of the checkpoint or calibration behind
    its numbers. Stored runs are then never reused for other data, another model or another fit.
    """
    settings, chosen = resolve(cell), system(cell.system)
    chosen.refuse_ignored(cell.knob_values)
    settings = replace(settings, generation=_generation(cell, settings))
    task = task_of(cell, settings)
    workload = _workload(cell, settings) if task is None else task_workload(cell, settings, task, _room(settings))
    resources = chosen.plan(settings, [request.total_len for request in workload.requests])
    behind = settings.calibration_digest if cell.executor == "roofline" else settings.checkpoint_digest
    graded = "" if task is None else f" {task.digest}"
    basis = hashlib.sha256(f"{workload.provenance.checksum} {behind}{graded}".encode()).hexdigest()[:12]
    knobs = {**cell.knob_values, "basis": basis}
    return Experiment(
        cell=replace(cell, knobs=tuple(knobs.items())),
        settings=settings,
        system=chosen,
        workload=workload,
        resources=resources,
        task=task,
    )


def _generation(cell: Cell, settings: Settings) -> GenerationConfig:
    chosen = method(cell.system, settings.family, settings.method)
    generation = generation_of(cell.system, settings.family, settings.method, settings.generation)
    check_ties(generation, settings.engine.tie_policy)
    if cell.executor == "roofline" and (generation.is_parallel or chosen.decode.quota == "origin"):
        raise UserError(
            f"alg={settings.method.get('alg', 'origin')!r} cannot be simulated, how many tokens a step commits is not known "
            f"beforehand: use --alg entropy or --executor torch"
        )
    return generation


def run(experiment: Experiment, on_progress: Callable[[DriveProgress], None] | None = None) -> RunRecord:
    if experiment.settings.tensor_parallel > 1:
        from repro.systems.ranks import leading

        with leading(experiment) as assembled:
            return _drive(experiment, assembled, on_progress)
    assembled = experiment.system.assemble(experiment.settings, experiment.resources)
    try:
        return _drive(experiment, assembled, on_progress)
    finally:
        assembled.engine.close()


def _drive(
    experiment: Experiment, assembled: Assembled, on_progress: Callable[[DriveProgress], None] | None
) -> RunRecord:
    cell, settings = experiment.cell, experiment.settings
    is_simulated = cell.executor == "roofline"
    clock = VirtualClock() if is_simulated else WallClock()
    record = drive_steps(assembled.engine, experiment.workload.requests, clock, on_progress=on_progress)
    if experiment.task is not None:
        record = grade_run(record, experiment.task, _outputs(assembled.engine, record), settings.model)
    if not is_simulated:
        record = record.with_manifest(device=settings.device, dtype=settings.dtype, weights=settings.weights)
    return record.with_manifest(
        dataset=asdict(experiment.workload.provenance),
        max_num_batched_tokens=assembled.config.max_num_batched_tokens,
        platform=settings.platform.title,
        model=settings.model,
        system=experiment.system.title,
        calibration=describe_calibration(settings.platform.gpu) if is_simulated and settings.platform.gpu else None,
        facts={**experiment.resources.facts, **assembled.facts},
    )


def run_cell(cell: Cell) -> RunRecord:
    """``run(prepare(cell))``, importable by worker processes."""
    return run(prepare(cell))


def _outputs(engine: Engine, record: RunRecord) -> dict[int, tuple[int, ...]]:
    outputs = {}
    for request_id, status in zip(record.requests["request_id"], record.requests["status"], strict=True):
        if status == "ok":
            ids = engine.take_output(request_id)
            assert ids is not None, "a simulation is never graded"
            outputs[request_id] = ids
    return outputs


def _room(settings: Settings) -> int:
    """Most prompt tokens a request can have."""
    engine, gen_length = settings.engine, settings.generation.gen_length
    limit = min(engine.max_model_len, engine.max_num_batched_tokens) - gen_length
    if limit < MIN_PROMPT_LEN:
        name = "max_num_batched_tokens" if engine.max_num_batched_tokens <= engine.max_model_len else "max_model_len"
        raise UserError(
            f"{name}={getattr(engine, name)} leaves {limit} tokens for a prompt beside gen_length={gen_length}: "
            f"raise it to at least {gen_length + MIN_PROMPT_LEN} or lower gen_length"
        )
    return limit


def _workload(cell: Cell, settings: Settings) -> Workload:
    arrivals = settings.arrivals if cell.rate is not None else "burst"
    limit = _room(settings)
    fixed = settings.fixed_prompt_len
    if fixed is not None and not MIN_PROMPT_LEN <= fixed <= limit:
        raise UserError(f"input_len={fixed} must be between {MIN_PROMPT_LEN} and {limit} here: change it or gen_length")
    if settings.num_requests < 1:
        raise UserError(f"num_prompts={settings.num_requests} must be at least 1")
    config = WorkloadConfig(
        dataset=cell.dataset,
        num_requests=settings.num_requests,
        seed=cell.seed,
        arrivals=ArrivalConfig(kind=arrivals, rate=cell.rate, burstiness=settings.burstiness),  # type: ignore[arg-type]
        source=settings.source,  # type: ignore[arg-type]
        dataset_path=settings.dataset_path,
        length_scale=settings.length_scale,
        max_prompt_len=limit,
        min_prompt_len=MIN_PROMPT_LEN,
        fixed_prompt_len=settings.fixed_prompt_len,
    )
    encode = None
    if cell.executor == "torch":
        from engines.models.checkpoint import TINY_DIR, checkpoint_dir
        from engines.models.tokenizer import load_tokenizer

        # Random full-size weights come without a tokenizer; the embedded one's ids are valid for any vocabulary.
        directory = TINY_DIR if settings.weights == "random" else checkpoint_dir(settings.model)
        encode = load_tokenizer(directory).encode
    return build_workload(config, settings.generation, encode=encode)
