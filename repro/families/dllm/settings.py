"""The settings of a cell of a diffusion LLM: what its requests, its device and its baseline may be, and all of it on a platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, Literal

from engines.dllm.config import MEASURED, PACKED, EngineConfig, GenerationConfig
from engines.knobs import SOMETHING, Checked, Fixed, Memory, Needs, Only, Range
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_digest, checkpoint_dir, config_of, digest_of
from engines.models.shape import ModelShape
from repro.families.cost import CostKnobs, load_calibration
from repro.families.platforms import Dtype, Platform
from repro.workloads.knobs import RequestKnobs

ReadingName = Literal["published", "efficient", "policy"]
BatchRule = Literal["one", "workload", "batch", "max_model_len"]
SIMULATED = Only(executor="roofline")
STATIC = Only(reading=("published", "efficient"))
"""What continuous batching does not heed."""
SIMULATED_READING: ReadingName = "published"
"""A simulated card stands for the paper's runs; on other hardware nothing was published."""
DEFAULT_BATCH_RULE: BatchRule = "workload"
Executor = Literal["torch", "roofline"]
REPLAY = "repro.families.dllm.replay"
"""What reads a run that is to be followed: no other simulation depends on its code."""


@dataclass(frozen=True, kw_only=True)
class WorkloadKnobs(RequestKnobs, Checked):
    """What the requests are: how many, of what lengths, from where, arriving how."""

    num_prompts: Annotated[int, Range(1, 10**5)]
    """Requests."""
    length_scale: Annotated[float, Range(above=0, most=1e3)]
    """Factor of the data set's prompt lengths."""
    num_fewshot: Annotated[int, Range(0, 64)] | None = None
    """Examples before each question of a graded task; the task's own number by default."""
    chat: bool = False
    """Ask a graded task's questions in a conversation."""
    allow_code_execution: bool = False
    """Run the programs that a model wrote also where bubblewrap cannot confine them."""


@dataclass(frozen=True, kw_only=True)
class Device(Checked):
    """Where a measured run is made, and with what."""

    device: Annotated[str, MEASURED] = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Annotated[Dtype, MEASURED] = "float32"
    """float32, float16 or bfloat16."""
    quantization: Annotated[
        Literal["none", "int8"], MEASURED, Needs(device="cpu", dtype=("float32", "bfloat16"), tensor_parallel=1)
    ] = "none"
    """int8 keeps the weights of products as int8, with a scale an output: on a CPU, for models without experts."""
    weights: Annotated[Literal["checkpoint", "random"], MEASURED] = "checkpoint"
    """checkpoint, or random for a shape without a download."""
    tensor_parallel: Annotated[int, Range(1, 64), MEASURED, PACKED] = 1
    """Devices of this machine that the model is divided among; the memory limit is of each."""
    profile_every: Annotated[int, Range(1, 10**9), MEASURED] | None = None
    """Profile one measured step in this many, which slows it; none by default."""


@dataclass(frozen=True, kw_only=True)
class ModelKnobs:
    """What is run, and in how much memory."""

    model: str
    """Checkpoint directory, hub id, 'tiny', 'tiny-long', 'tiny-far', 'tiny-roll', or with random weights a shape (llada-8b, dream-7b)."""
    memory_limit: Memory
    """Emulated device memory, e.g. 24GB: the bytes that the plan may split."""


@dataclass(frozen=True, kw_only=True)
class BaselineKnobs(Checked):
    """What a baseline stands for, and how large its batches are; dLLM-Serve heeds none of it."""

    reading: ReadingName = "efficient"
    """Reading of a baseline: published, the default of a simulation; efficient, that of a measurement; or policy."""
    batch_size: Annotated[int, Range(1, 2**14), STATIC, Needs(batch_rule=DEFAULT_BATCH_RULE)] | None = None
    """Static batch of a baseline; what batch_rule says by default."""
    batch_rule: Annotated[BatchRule, STATIC] = DEFAULT_BATCH_RULE
    """Static batch of a baseline: one, or the largest that holds the workload's longest request (workload), its own longest one (batch,
    simulated) or one of max_model_len tokens."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    kind: Literal["packed", "static"]
    """``packed``: continuous batching on dLLM-Serve's engine; ``static``: padded batches that run to completion."""
    is_upstream: bool = False
    """Whether batches are as published code can hold them, and simulated steps charged its copies of logits."""


@dataclass(frozen=True, kw_only=True)
class ReplayKnobs(Checked):
    """What a simulation follows where a model decides how steps go."""

    replay: Annotated[str, SIMULATED] | None = None
    """A stored measured run, whose commits, stops and refreshes are followed."""
    replay_drawn: Annotated[bool, SIMULATED, Needs(replay=SOMETHING)] = False
    """Ask other requests than the run was asked: each block follows one of the run's, drawn evenly."""


PACKED_STEPS = Batching(kind="packed")

BATCH_RULES: Mapping[BatchRule, str] = {
    "one": "one request at a time",
    "workload": "largest that holds the workload's longest request",
    "batch": "each the largest that holds its own longest request",
    "max_model_len": "largest that holds requests of max_model_len tokens",
}
"""How large a static batch is. The paper (§6.1) says "the maximum static batch size that fits in memory", found by
"preliminary profiling", and not what was profiled."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    text: str
    title: str
    """What a figure's title says of it."""
    batching: Batching


READINGS: Mapping[ReadingName, Reading] = {
    "published": Reading(
        title="baselines as published",
        text="baselines as published: batches that published code's memory holds, and its copies of logits",
        batching=Batching(kind="static", is_upstream=True),
    ),
    "efficient": Reading(
        title="baselines in our code",
        text="baselines in our implementation, largest static batch",
        batching=Batching(kind="static"),
    ),
    "policy": Reading(
        title="baselines' policies, batched alike",
        text="baselines' cache policies under continuous batching",
        batching=PACKED_STEPS,
    ),
}
"""What a baseline stands for in a comparison. Only the first can be held against the paper; the last isolates the policy:
nothing differs from dLLM-Serve but refresh rule, retention and decode rule."""


@dataclass(frozen=True, kw_only=True)
class DllmSettings(ModelKnobs, Device, ReplayKnobs, Checked):
    """Everything a run needs besides its requests."""

    platform: Annotated[Platform, Fixed]
    executor: Annotated[Executor, Fixed]
    generation: GenerationConfig
    options: Mapping[str, Any]
    """Options of the system's method, only those asked for."""
    engine: EngineConfig
    asked: WorkloadKnobs
    charged: CostKnobs = field(default_factory=CostKnobs)
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
        dtype_bytes = 2 if is_simulated_card or self.dtype != "float32" else 4
        whole = ModelShape.from_config(config_of(self.model), name=self.model, dtype_bytes=dtype_bytes)
        return whole.on_rank(self.tensor_parallel)

    @property
    def basis(self) -> str:
        """Digest of what is behind the numbers: the constants a simulated run is charged by, or the checkpoint."""
        if self.is_simulated:
            assert self.platform.gpu is not None
            card = self.platform.gpu
            replay = "" if self.replay is None else import_module(REPLAY).recorded(self.replay).digest
            behind = repr(load_calibration(card)) + self.charged.basis(card) + self.platform.digest + replay
            return digest_of(behind)
        return self.checkpoint_digest + self.platform.digest

    @property
    def checkpoint_digest(self) -> str:
        """What is behind a measured run: the checkpoint's files, or the configuration alone where weights are random."""
        if self.weights == "random":
            return digest_of(repr(config_of(self.model)))
        return checkpoint_digest(checkpoint_dir(self.model))


def default_profile_every(device: str) -> int:
    """Profile every step on a CPU; few on a GPU, by a number prime to a block's steps, which a batch in lockstep then
    meets one after another."""
    return 7 if device.startswith("cuda") else 1
