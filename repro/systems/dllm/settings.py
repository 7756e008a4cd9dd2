"""A cell's knobs, resolved against its platform into the engine's own configuration objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from engines.bounds import check_fields, check_most
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.errors import UserError, require
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_dir, config_of, weight_files
from engines.parallel.division import check_division
from repro.runs.cell import Cell, Scalar
from repro.systems.calibration import load_calibration
from repro.systems.dllm.batching import DEFAULT_BATCH_RULE, default_reading
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import Platform, platform
from repro.tasks.registry import TASKS
from repro.workloads.card import load_card

GENERATION = tuple(f.name for f in fields(GenerationConfig) if f.name != "seed")
_EVERY_METHODS = ("gen_length", "steps", "temperature", "top_p", "top_k", "stop_at_eos")
"""Settings that every method heeds; the others of GENERATION are options of some."""
_ENGINE = (
    "max_num_batched_tokens",
    "max_num_logits",
    "logit_rows",
    "max_num_seqs",
    "scheduler",
    "tie_policy",
    "attention_backend",
    "cuda_graphs",
    "fused_kernels",
)
_MOST_SEQS = 2**14
"""Of a workload's engine: each takes a slot, used or not."""

MEASURED_ALONE = (
    "device",
    "dtype",
    "weights",
    "threshold",
    "factor",
    "temperature",
    "top_p",
    "top_k",
    "alg_temp",
    "cfg_scale",
    "remasking",
    "tie_policy",
    "stop_at_eos",
    "profile_every",
)
WITHOUT_EFFECT_SIMULATED = ("attention_backend", "cuda_graphs", "fused_kernels", "tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the requests are: how many, of what lengths, from where, arriving how."""

    num_prompts: int
    length_scale: float
    dataset_source: str = "auto"
    dataset_path: str | None = None
    input_len: int | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    num_fewshot: int | None = None
    """Examples before each question of a graded task; None is the task's own number."""
    chat: bool = False
    """Whether a graded task is asked in a conversation."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a measured run is made, and with what."""

    device: str = "cpu"
    dtype: str = "float32"
    weights: str = "checkpoint"
    tensor_parallel: int = 1
    """Devices of this machine that the model is divided among; the memory limit is of each."""
    profile_every: int = 0
    """Profile every n-th measured step (0: never); profiling slows it."""

    def __post_init__(self) -> None:
        check_fields(self)


_ASKED = tuple(f.name for f in fields(Asked))
_DEVICE = tuple(f.name for f in fields(Device))
_RUN = ("model", "memory_limit", "reading", "batch_size", "batch_rule")
_NOTES = ("basis",)
"""Said about a cell, not asked of it: part of its key, without an effect on the run."""
_EVERYONES = frozenset((*_EVERY_METHODS, *_ENGINE, *_RUN, *_ASKED, *_DEVICE, *_NOTES))
"""Knobs that are no option of a method."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run needs besides its requests. ``batch_size`` None means what ``batch_rule`` says."""

    platform: Platform
    executor: str
    """torch or roofline."""
    generation: GenerationConfig
    options: Mapping[str, Any]
    """Options of the system's method, only those asked for."""
    engine: EngineConfig
    asked: Asked
    on: Device = field(default_factory=Device)
    model: str
    memory_limit: int
    """Bytes the plan may split."""
    reading: str
    """What a baseline stands for (repro.systems.dllm.batching)."""
    batch_size: int | None = None
    batch_rule: str = DEFAULT_BATCH_RULE

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_simulated(self) -> bool:
        return self.executor == "roofline"

    @property
    def family(self) -> str:
        return config_of(self.model).family

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers: the constants a simulated run is charged by, or the checkpoint."""
        if self.is_simulated:
            assert self.platform.gpu is not None
            return _digest(repr(load_calibration(self.platform.gpu)).encode())
        return self.checkpoint_digest

    @property
    def checkpoint_digest(self) -> str:
        """Digest of all files behind a measured run: weights, configuration, tokenizer; of the configuration alone
        where weights are random."""
        if self.on.weights == "random":
            return _digest(repr(config_of(self.model)).encode())
        folder = checkpoint_dir(self.model)
        names = {*weight_files(folder), *(path.name for what in _TEXT_FILES for path in folder.glob(what))}
        found = [folder / name for name in sorted(names)]
        stats = [path.stat() for path in found]
        return _digest_of_files(tuple(found), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


_TEXT_FILES = ("*.json", "*.jinja", "merges.txt")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


@lru_cache(maxsize=32)
def _digest_of_files(paths: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    """Read once for all cells, and again once a size or a time of change is another; a checkpoint may be larger than
    memory."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            own = hashlib.file_digest(file, "sha256").digest()
        whole.update(path.name.encode() + own)
    return whole.hexdigest()[:12]


def default_profile_every(device: str) -> int:
    """Profile every step on a CPU; few on a GPU, by a number prime to a block's steps, which a batch in lockstep then
    meets one after another."""
    return 7 if device.startswith("cuda") else 1


def resolve(cell: Cell) -> Settings:
    """Platform defaults overridden by the cell's knobs; an unknown knob is refused by name."""
    where = platform(cell.platform)
    part, knobs = where.part(DllmPart), cell.knob_values
    _check_executor(cell, where)
    _check_knobs(knobs)

    def pick(names: tuple[str, ...], **defaults: Any) -> dict[str, Any]:
        return {**defaults, **{name: knobs[name] for name in names if name in knobs}}

    sizes = {**{task.name: task.num_problems for task in TASKS.values()}, **part.num_requests}
    if cell.dataset not in sizes and "num_prompts" not in knobs:
        load_card(cell.dataset)  # refuses what is no data set at all, by name
        raise UserError(f"dataset={cell.dataset!r} has no default size on platform={where.name!r}: give --num-prompts")
    on = Device()
    if cell.executor == "torch":
        on = Device(**pick(_DEVICE, device=part.device, dtype=part.dtype))
    settings = Settings(
        platform=where,
        executor=cell.executor,
        generation=GenerationConfig(
            **pick(GENERATION, gen_length=part.gen_length, block_length=part.block_length, steps=part.steps),
            seed=cell.seed,
        ),
        options=options_of(knobs),
        engine=EngineConfig(
            **pick(
                _ENGINE,
                max_num_batched_tokens=part.max_num_batched_tokens,
                max_num_logits=part.max_num_logits,
                max_num_seqs=part.max_num_seqs,
            ),
            max_model_len=part.max_model_len,
        ),
        asked=Asked(**pick(_ASKED, num_prompts=sizes.get(cell.dataset), length_scale=part.length_scale)),
        on=on,
        **pick(_RUN, model=part.model, memory_limit=part.memory_bytes, reading=default_reading(cell.executor)),
    )
    if cell.executor == "torch":
        _check_measured(settings, knobs)
    return settings


def _check_executor(cell: Cell, where: Platform) -> None:
    if cell.executor not in ("torch", "roofline"):
        raise UserError(f"executor={cell.executor!r} is unknown: use torch or roofline")
    if cell.executor == "torch":
        return
    if where.gpu is None:
        raise UserError(
            f"executor='roofline' needs a GPU model and platform={where.name!r} has none: use --executor torch or platform "
            f"rtx4090"
        )
    knobs = cell.knob_values
    for name in MEASURED_ALONE:
        if knobs.get(name, False) is not False:
            raise UserError(f"{name}={knobs[name]!r} cannot be simulated: leave it out, or use --executor torch")
    for name in WITHOUT_EFFECT_SIMULATED:
        if name in knobs:
            raise UserError(
                f"{name}={knobs[name]!r} has no effect on a simulation: leave it out, or use --executor torch"
            )


def options_of(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a method has to know."""
    return {name: value for name, value in knobs.items() if name not in _EVERYONES}


def _check_knobs(knobs: Mapping[str, Scalar]) -> None:
    for name, value in knobs.items():
        check_most(name, value)
    seqs = knobs.get("max_num_seqs", 1)
    require(
        not isinstance(seqs, int) or seqs <= _MOST_SEQS,
        f"max_num_seqs={seqs} is more than {_MOST_SEQS}, the most that is taken: give a smaller number",
    )
    every = knobs.get("profile_every", 1)
    require(
        isinstance(every, int) and not isinstance(every, bool) and every >= 1,
        f"profile_every={every!r} must be a whole number of steps, at least 1; leave it out to profile none",
    )


def _check_measured(settings: Settings, knobs: Mapping[str, Scalar]) -> None:
    check_division(config_of(settings.model), settings.on.tensor_parallel)
    backend = knobs.get("attention_backend")
    if backend in ("flash-attn", "torch-varlen") and settings.on.device == "cpu":
        raise UserError(f"attention_backend={backend!r} runs on CUDA devices: add --device cuda, or leave it out")
    for name in ("cuda_graphs", "fused_kernels"):
        if name in knobs and settings.on.device == "cpu":
            raise UserError(f"{name}={knobs[name]!r} has no effect on device='cpu': leave it out")
    if settings.model in PUBLISHED_CONFIGS and settings.on.weights != "random":
        raise UserError(
            f"model={settings.model!r} is a shape without weights: add --weights random, or give a checkpoint with --model"
        )
