"""The settings of a cell of a diffusion LLM on its platform: the fields here, and those of the engine's settings inside of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, Literal

from baselines.dllm.published import PublishedMethod
from engines.cost.kernels import check_kernels
from engines.cost.roofline import gpu
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.method import Method
from engines.dllm.scheduling import scheduler_of
from engines.errors import UserError, require
from engines.knobs import Checked, Fixed, given_to, knobs_of
from engines.knobs import resolve as resolve_knobs
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_digest, checkpoint_dir, config_of, digest_of
from engines.models.config import check_division
from engines.models.shape import ModelShape
from repro.runs.cell import NOTES, Cell
from repro.systems.cost import CostKnobs, load_calibration
from repro.systems.dllm.knobs import SIMULATED_READING, BaselineKnobs, Device, ModelKnobs, ReplayKnobs, WorkloadKnobs
from repro.systems.platforms import DllmPart, Platform, platform
from repro.tasks.registry import TASKS
from repro.workloads.dataset import load_card
from repro.workloads.served import workload_knobs

Executor = Literal["torch", "roofline"]
REPLAY = "repro.systems.dllm.replay"
"""What reads a run that is to be followed: no other simulation depends on its code."""


@dataclass(frozen=True, kw_only=True)
class DllmSettings(ModelKnobs, Checked):
    """Everything a run needs besides its requests."""

    platform: Annotated[Platform, Fixed]
    executor: Annotated[Executor, Fixed]
    generation: GenerationConfig
    options: Mapping[str, Any]
    """Options of the system's method, only those asked for."""
    engine: EngineConfig
    asked: WorkloadKnobs
    on: Device = field(default_factory=Device)
    charged: CostKnobs = field(default_factory=CostKnobs)
    followed: ReplayKnobs = field(default_factory=ReplayKnobs)
    baseline: Annotated[BaselineKnobs, Fixed]
    """What a baseline stands for; of no effect on dLLM-Serve."""
    scheduler_knobs: Mapping[str, Any] = field(default_factory=dict)
    """Those of a scheduler's own, only those asked for."""

    @property
    def is_simulated(self) -> bool:
        return self.executor == "roofline"

    @cached_property
    def shape(self) -> ModelShape:
        """What one device holds and computes of the model."""
        # A simulated card serves 16-bit weights whatever the measuring default.
        is_simulated_card = self.is_simulated and self.model in PUBLISHED_CONFIGS
        dtype_bytes = 2 if is_simulated_card or self.on.dtype != "float32" else 4
        whole = ModelShape.from_config(config_of(self.model), name=self.model, dtype_bytes=dtype_bytes)
        return whole.on_rank(self.on.tensor_parallel)

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers: the constants a simulated run is charged by, or the checkpoint."""
        if self.is_simulated:
            assert self.platform.gpu is not None
            card = self.platform.gpu
            replay = "" if self.followed.replay is None else import_module(REPLAY).recorded(self.followed.replay).digest
            behind = repr(load_calibration(card)) + self.charged.basis(card) + self.platform.digest + replay
            return digest_of(behind)
        return self.checkpoint_digest + self.platform.digest

    @property
    def checkpoint_digest(self) -> str:
        """What is behind a measured run: the checkpoint's files, or the configuration alone where weights are random."""
        if self.on.weights == "random":
            return digest_of(repr(config_of(self.model)))
        return checkpoint_digest(checkpoint_dir(self.model))


def default_profile_every(device: str) -> int:
    """Profile every step on a CPU; few on a GPU, by a number prime to a block's steps, which a batch in lockstep then
    meets one after another."""
    return 7 if device.startswith("cuda") else 1


def resolve(cell: Cell, method: Method) -> DllmSettings:
    """The settings of a cell for a method; raises UserError for whatever a user can get wrong in them."""
    where = platform(cell.platform)
    given = {name: value for name, value in cell.knobs if name not in NOTES}
    part, is_measured = where.part(DllmPart), cell.executor == "torch"
    require(
        cell.executor != "roofline" or where.gpu is not None,
        f"executor='roofline' needs a GPU model and platform={where.name!r} has none: use --executor torch or platform "
        f"rtx4090",
    )
    # What a baseline stands for, and what the other knobs have to know of that: dLLM-Serve has no reading.
    baseline, beside = BaselineKnobs(reading="efficient" if is_measured else SIMULATED_READING), {}
    own: tuple[type, ...] = (method.own, *method.plugged_in(given))
    if isinstance(method, PublishedMethod):
        own, baseline = (*own, BaselineKnobs), given_to(baseline, given)
        beside = {"reading": baseline.reading}
    scheduler = knobs_of(scheduler_of(str(given.get("scheduler", "phase"))).knobs)
    settings = resolve_knobs(
        DllmSettings,
        given,
        *own,
        scheduler,
        workload_knobs(given),
        system=method.name,
        usual=_usual(cell, part),
        beside={"executor": cell.executor, **beside},
        platform=where,
        executor=cell.executor,
        options=method.options_in(given),
        scheduler_knobs={name: value for name, value in given.items() if name in scheduler},
        baseline=baseline,
    )
    if is_measured:
        _check_measured(settings, given)
        return settings
    assert where.gpu is not None, "refused above"
    charged = settings.charged.on(where.gpu)
    check_kernels(settings.shape, gpu(where.gpu), charged.framework)
    return replace(settings, charged=charged)


def _usual(cell: Cell, part: DllmPart) -> dict[str, Any]:
    """A platform's defaults for a cell, by name; a file's lengths are its own, and so is how many it has."""
    is_traced, is_measured = "workload" in cell.asked, cell.executor == "torch"
    names = ("gen_length", "block_length", "steps", "max_num_batched_tokens", "max_num_logits", "max_num_seqs")
    found = {name: getattr(part, name) for name in (*names, "max_model_len", "model")}
    found |= {"device": part.device, "dtype": part.dtype} if is_measured else {}
    sizes = {**{task.name: task.num_problems for task in TASKS.values()}, **part.num_requests}
    if cell.dataset not in sizes and "num_prompts" not in cell.asked and not is_traced:
        load_card(cell.dataset)  # refuses what is no data set at all, by name
        raise UserError(
            f"dataset={cell.dataset!r} has no default size on platform={cell.platform!r}: give --num-prompts"
        )
    return found | {
        "seed": cell.seed,
        "memory_limit": part.memory_bytes,
        "num_prompts": 1 if is_traced else sizes.get(cell.dataset, 1),
        "length_scale": 1.0 if is_traced else part.length_scale,
    }


def _check_measured(settings: DllmSettings, given: Mapping[str, Any]) -> None:
    check_division(config_of(settings.model), settings.on.tensor_parallel)
    backend = given.get("attention_backend")
    if backend in ("flash-attn", "torch-varlen") and settings.on.device == "cpu":
        raise UserError(f"attention_backend={backend!r} runs on CUDA devices: add --device cuda, or leave it out")
    if settings.model in PUBLISHED_CONFIGS and settings.on.weights != "random":
        raise UserError(
            f"model={settings.model!r} is a shape without weights: add --weights random, or give a checkpoint with --model"
        )
