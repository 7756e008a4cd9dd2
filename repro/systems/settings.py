"""A cell's knobs, resolved against its platform into the engine's own configuration objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from baselines.dllm.method import OPTIONS
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.errors import UserError
from engines.models.checkpoint import SHAPES, checkpoint_dir, config_of
from engines.parallel.division import check_division
from repro.runs.cell import Cell, Scalar
from repro.systems.calibration import load_calibration
from repro.systems.platforms import Platform, platform
from repro.tasks.registry import TASKS
from repro.workloads.card import load_card

GENERATION = (
    "gen_length",
    "block_length",
    "steps",
    "temperature",
    "threshold",
    "factor",
    "remasking",
    "cfg_scale",
    "top_p",
    "top_k",
    "alg_temp",
    "stop_at_eos",
)
METHOD = tuple(sorted({name for families in OPTIONS.values() for names in families.values() for name in names}))
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
_RUN = (
    "memory_bytes",
    "reading",
    "batch_size",
    "num_requests",
    "length_scale",
    "source",
    "dataset_path",
    "fixed_prompt_len",
    "arrivals",
    "burstiness",
    "dtype",
    "model",
    "weights",
    "device",
    "num_fewshot",
    "chat",
    "profile_every",
    "tensor_parallel",
)
_MOST = {
    "num_requests": 10**7,
    **dict.fromkeys(("max_num_batched_tokens", "max_num_logits", "max_num_seqs"), 2**31 - 1),
}
_NOTES = ("basis",)
"""Said about a cell, not asked of it: part of its key, without an effect on the run."""
KNOBS = tuple(dict.fromkeys((*GENERATION, *METHOD, *_ENGINE, *_RUN, *_NOTES)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run needs besides its requests. ``batch_size`` None means the largest that fits."""

    platform: Platform
    executor: str
    """torch or roofline."""
    generation: GenerationConfig
    method: Mapping[str, Any]
    """Options of the system's method, only those asked for (baselines.dllm.method)."""
    engine: EngineConfig
    memory_bytes: int
    reading: str = "efficient"
    """Of a baseline: published, efficient or policy (repro.systems.baseline)."""
    batch_size: int | None = None
    num_requests: int
    length_scale: float
    source: str = "auto"
    dataset_path: str | None = None
    fixed_prompt_len: int | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    dtype: str = "float32"
    model: str
    weights: str = "checkpoint"
    device: str = "cpu"
    num_fewshot: int | None = None
    """Examples before each question of a graded task; None is the task's own number."""
    chat: bool = False
    """Whether a graded task is asked in a conversation."""
    tensor_parallel: int = 1
    """Devices of this machine that the model is divided among; memory_bytes is of each."""
    profile_every: int = 0
    """Of how many measured steps one is divided into its parts, which disturbs it; 0 is none."""

    @property
    def family(self) -> str:
        return config_of(self.model).family

    @property
    def calibration_digest(self) -> str:
        """Of the constants a simulated run is charged by."""
        assert self.platform.gpu is not None
        return _digest(repr(load_calibration(self.platform.gpu)).encode())

    @property
    def checkpoint_digest(self) -> str:
        """Of all files behind a measured run: weights, configuration, tokenizer; of the configuration alone where
        weights are random."""
        if self.weights == "random":
            return _digest(repr(config_of(self.model)).encode())
        from engines.models.weights import weight_files

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
    """Of a profiled run: all steps of a CPU; on a GPU few, by a number prime to a block's steps, which a batch in
    lockstep then meets one after another."""
    return 7 if device.startswith("cuda") else 1


def resolve(cell: Cell) -> Settings:
    """Platform defaults overridden by the cell's knobs; an unknown knob is refused by name."""
    where = platform(cell.platform)
    if cell.executor not in ("torch", "roofline"):
        raise UserError(f"executor={cell.executor!r} is unknown: use torch or roofline")
    if cell.executor == "roofline" and where.gpu is None:
        raise UserError(
            f"executor='roofline' needs a GPU model and platform={where.name!r} has none: use --executor torch or platform rtx4090"
        )
    knobs: dict[str, Scalar] = cell.knob_values
    if cell.executor == "roofline":
        for name in (
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
        ):
            if knobs.get(name, False) is not False:
                raise UserError(f"{name}={knobs[name]!r} cannot be simulated: leave it out, or use --executor torch")
        for name in ("attention_backend", "cuda_graphs", "fused_kernels", "tensor_parallel"):
            if name in knobs:
                raise UserError(
                    f"{name}={knobs[name]!r} has no effect on a simulation: leave it out, or use --executor torch"
                )
    if unknown := sorted(set(knobs) - set(KNOBS)):
        raise UserError(f"knob {unknown[0]!r} is unknown: use one of {', '.join(KNOBS)}")
    for name, most in _MOST.items():
        if isinstance(count := knobs.get(name), int) and count > most:
            raise UserError(f"{name}={count} is more than {most}, the most that is taken: give a smaller number")
    every = knobs.get("profile_every", 1)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UserError(
            f"profile_every={every!r} must be a whole number of steps, at least 1; leave it out to profile none"
        )

    def pick(names: tuple[str, ...], **defaults: Any) -> dict[str, Any]:
        return {**defaults, **{name: knobs[name] for name in names if name in knobs}}

    generation = GenerationConfig(
        **pick(GENERATION, gen_length=where.gen_length, block_length=where.block_length, steps=where.steps),
        seed=cell.seed,
    )
    engine = EngineConfig(
        **pick(
            _ENGINE,
            max_num_batched_tokens=where.max_num_batched_tokens,
            max_num_logits=where.max_num_logits,
            max_num_seqs=where.max_num_seqs,
        ),
        max_model_len=where.max_model_len,
    )
    sizes = {**{task.name: task.num_problems for task in TASKS.values()}, **where.num_requests}
    if cell.dataset not in sizes and "num_requests" not in knobs:
        load_card(cell.dataset)  # refuses what is no data set at all, by name
        raise UserError(f"dataset={cell.dataset!r} has no default size on platform={where.name!r}: give --num-prompts")
    run = pick(
        _RUN,
        memory_bytes=where.memory_bytes,
        num_requests=sizes.get(cell.dataset),
        length_scale=where.length_scale,
        model=where.model,
    )
    if cell.executor == "torch":
        run = {"device": where.device, "dtype": where.dtype, **run}
        check_division(config_of(run["model"]), run.get("tensor_parallel", 1))
        backend = knobs.get("attention_backend")
        if backend in ("flash-attn", "torch-varlen") and run["device"] == "cpu":
            raise UserError(f"attention_backend={backend!r} runs on CUDA devices: add --device cuda, or leave it out")
        if run["model"] in SHAPES and run.get("weights") != "random":
            raise UserError(
                f"model={run['model']!r} is a shape without weights: add --weights random, or give a checkpoint with --model"
            )
    return Settings(
        platform=where, executor=cell.executor, generation=generation, method=pick(METHOD), engine=engine, **run
    )
