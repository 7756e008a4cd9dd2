"""The knobs that cells of diffusion LLMs have beside those of the engine and of their method, and what they choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.dllm.config import MEASURED, PACKED
from engines.knobs import SOMETHING, Checked, Memory, Needs, Only, Range
from repro.families.platforms import Dtype
from repro.workloads.knobs import RequestKnobs

ReadingName = Literal["published", "efficient", "policy"]
BatchRule = Literal["one", "workload", "batch", "max_model_len"]
SIMULATED = Only(executor="roofline")
STATIC = Only(reading=("published", "efficient"))
"""What continuous batching does not heed."""
SIMULATED_READING: ReadingName = "published"
"""A simulated card stands for the paper's runs; on other hardware nothing was published."""
DEFAULT_BATCH_RULE: BatchRule = "workload"


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
    """Checkpoint directory, hub id, 'tiny', 'tiny-long', or with random weights a shape (llada-8b, dream-7b)."""
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
