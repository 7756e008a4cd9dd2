"""The settings of a diffusion LLM's cell: its requests, its device, its baseline, and all of these on a platform."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

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
"""Marks a setting of static batches, which continuous batching ignores."""
SIMULATED_READING: ReadingName = "published"
"""The default reading of a simulation, because a simulated card stands for the paper's runs."""
DEFAULT_BATCH_RULE: BatchRule = "workload"
Executor = Literal["torch", "roofline"]
REPLAY = "repro.families.dllm.replay"
"""The module that reads a run to replay. We import it only then, so that no other simulation depends on its code."""


@dataclass(frozen=True, kw_only=True)
class WorkloadKnobs(RequestKnobs, Checked):
    """The requests of a run: their number, lengths, source and arrivals."""

    num_prompts: Annotated[int, Range(1, 10**5)]
    """How many requests to run."""
    length_scale: Annotated[float, Range(above=0, most=1e3)]
    """Factor on the data set's prompt lengths."""
    num_fewshot: Annotated[int, Range(0, 64)] | None = None
    """Examples before each question of a graded task; the task's own number by default."""
    chat: bool = False
    """Ask a graded task's questions in a conversation."""
    allow_code_execution: bool = False
    """Run the programs that a model wrote even if bubblewrap cannot confine them."""


@dataclass(frozen=True, kw_only=True)
class Device(Checked):
    """The device of a measured run, and how the model is held on it."""

    device: Annotated[str, MEASURED] = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Annotated[Dtype, MEASURED] = "float32"
    """float32, float16 or bfloat16."""
    quantization: Annotated[
        Literal["none", "int8"], MEASURED, Needs(device="cpu", dtype=("float32", "bfloat16"), tensor_parallel=1)
    ] = "none"
    """int8 stores the weights of matrix products as int8, with one scale per output. Only on a CPU, for models without experts."""
    weights: Annotated[Literal["checkpoint", "random"], MEASURED] = "checkpoint"
    """checkpoint, or random for a shape without a download."""
    tensor_parallel: Annotated[int, Range(1, 64), MEASURED, PACKED] = 1
    """How many devices of this machine share the model; the memory limit applies to each."""
    profile_every: Annotated[int, Range(1, 10**9), MEASURED] | None = None
    """Profile one measured step in this many, which slows it; none by default."""


@dataclass(frozen=True, kw_only=True)
class ModelKnobs:
    """The model, and how much memory it may use."""

    model: str
    """Checkpoint directory, hub id, 'tiny', 'tiny-long', 'tiny-far', 'tiny-roll', or with random weights a shape (llada-8b, dream-7b)."""
    memory_limit: Memory
    """Emulated device memory, e.g. 24GB: the bytes that the plan may split."""


@dataclass(frozen=True, kw_only=True)
class BaselineKnobs(Checked):
    """The reading of a baseline, and the size of its batches. dLLM-Serve ignores these knobs."""

    reading: ReadingName = "efficient"
    """Reading of a baseline: published (default of a simulation), efficient (default of a measurement) or policy."""
    batch_size: Annotated[int, Range(1, 2**14), STATIC, Needs(batch_rule=DEFAULT_BATCH_RULE)] | None = None
    """Requests in a baseline's static batch; by default batch_rule decides."""
    batch_rule: Annotated[BatchRule, STATIC] = DEFAULT_BATCH_RULE
    """Size of a baseline's static batch. one: one request. Else the largest batch that fits if its requests are as long as the workload's
    longest (workload), its own longest (batch, simulated) or max_model_len tokens."""


@dataclass(frozen=True, kw_only=True)
class ReplayKnobs(Checked):
    """The measured run that a simulation follows, because only a model can decide how its steps go."""

    replay: Annotated[str, SIMULATED] | None = None
    """A stored measured run. The simulation repeats its commits, stops and refreshes."""
    replay_drawn: Annotated[bool, SIMULATED, Needs(replay=SOMETHING)] = False
    """Serve other requests than the replayed run's. Each of their blocks follows a block of that run, drawn evenly."""


BATCH_RULES: Mapping[BatchRule, str] = {
    "one": "one request at a time",
    "workload": "largest that holds the workload's longest request",
    "batch": "each the largest that holds its own longest request",
    "max_model_len": "largest that holds requests of max_model_len tokens",
}
"""Rules for the size of a static batch. The paper (§6.1) says "the maximum static batch size that fits in memory", found by
"preliminary profiling", but does not say what was profiled."""


class Reading(NamedTuple):
    title: str
    """Its name in the title of a figure."""
    text: str


READINGS: Mapping[ReadingName, Reading] = {
    "published": Reading(
        "baselines as published",
        "baselines as published: batches that published code's memory holds, and its copies of logits",
    ),
    "efficient": Reading("baselines in our code", "baselines in our implementation, largest static batch"),
    "policy": Reading("baselines' policies, batched alike", "baselines' cache policies under continuous batching"),
}
"""The meanings of a baseline in a comparison. Only the first compares to the paper. The last isolates the policy: only refresh rule,
retention and decode rule differ from dLLM-Serve."""


@dataclass(frozen=True, kw_only=True)
class DllmSettings(ModelKnobs, Device, ReplayKnobs, Checked):
    """Everything a run needs besides its requests."""

    platform: Annotated[Platform, Fixed]
    executor: Annotated[Executor, Fixed]
    generation: GenerationConfig
    options: Mapping[str, Any]
    """The options of the system's method that the cell asks for."""
    engine: EngineConfig
    asked: WorkloadKnobs
    charged: CostKnobs = field(default_factory=CostKnobs)
    baseline: Annotated[BaselineKnobs, Fixed]
    """The reading and batch size of a baseline. dLLM-Serve ignores them."""
    scheduler_knobs: Mapping[str, Any] = field(default_factory=dict)
    """The scheduler's own knobs that the cell asks for."""

    @property
    def is_simulated(self) -> bool:
        return self.executor == "roofline"

    @cached_property
    def shape(self) -> ModelShape:
        """The part of the model that one device holds and computes."""
        # A simulated card serves 16-bit weights, even if measured runs default to float32.
        is_simulated_card = self.is_simulated and self.model in PUBLISHED_CONFIGS
        dtype_bytes = 2 if is_simulated_card or self.dtype != "float32" else 4
        whole = ModelShape.from_config(config_of(self.model), name=self.model, dtype_bytes=dtype_bytes)
        return whole.on_rank(self.tensor_parallel)

    @property
    def basis(self) -> str:
        """A digest of all that the numbers depend on: the constants that a simulation charges, or the checkpoint."""
        if self.is_simulated:
            assert self.platform.gpu is not None
            card = self.platform.gpu
            replay = "" if self.replay is None else import_module(REPLAY).recorded(self.replay).digest
            text = repr(load_calibration(card)) + self.charged.basis(card) + self.platform.digest + replay
            return digest_of(text)
        return self.checkpoint_digest + self.platform.digest

    @property
    def checkpoint_digest(self) -> str:
        """A digest of a measured run's model: of the checkpoint's files, or only of the configuration if weights are random."""
        if self.weights == "random":
            return digest_of(repr(config_of(self.model)))
        return checkpoint_digest(checkpoint_dir(self.model))


def default_profile_every(device: str) -> int:
    """How often to profile a step: every step on a CPU, one in seven on a GPU. Seven is coprime to a block's steps, so that profiling a
    batch in lockstep reaches each of them in turn."""
    return 7 if device.startswith("cuda") else 1
