"""The settings of a cell of a diffusion LLM on its platform: the fields here, and those of the engine's settings inside of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, Literal

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.knobs import Checked, Fixed
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_digest, checkpoint_dir, config_of, digest_of
from engines.models.shape import ModelShape
from repro.families.cost import CostKnobs, load_calibration
from repro.families.dllm.knobs import BaselineKnobs, Device, ModelKnobs, ReplayKnobs, WorkloadKnobs
from repro.families.platforms import Platform

Executor = Literal["torch", "roofline"]
REPLAY = "repro.families.dllm.replay"
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
