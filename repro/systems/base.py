"""What a system is to the harness: a plan of its resources, then an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baselines.dllm.method import Method, method
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.roofline import RooflineExecutor
from engines.dllm.request import Request
from engines.dllm.sequence import cache_rows
from engines.errors import UserError, require
from engines.hardware.roofline import Roofline
from engines.models.shape import ModelShape
from repro.systems.settings import Settings

if TYPE_CHECKING:
    from engines.dllm.executor.torch import TorchExecutor
    from engines.models.protocol import DiffusionModel
    from engines.parallel.group import TensorParallel

CONTINUOUS_KNOBS = frozenset(
    {
        "scheduler",
        "max_num_batched_tokens",
        "max_num_logits",
        "logit_rows",
        "attention_backend",
        "cuda_graphs",
        "tensor_parallel",
    }
)
STATIC_KNOBS = frozenset({"batch_size"})
PARTICULAR = CONTINUOUS_KNOBS | STATIC_KNOBS | {"reading"}
"""Run settings that only some systems heed."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a system makes of the settings for a workload whose longest request is known."""

    config: EngineConfig
    method: Method
    kv_rows: int
    longest: int
    """Tokens of the workload's longest request."""
    batch_size: int | None = None
    """Of a static batch, by the memory model; None for continuous batching."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """``config`` is the engine's; ``facts`` are what was learnt by assembling, and replace the plan's."""

    engine: Engine
    config: EngineConfig
    facts: Mapping[str, Any] = field(default_factory=dict)


class System(ABC):
    """A cache policy with its decode rule, on a real or a simulated executor. How its requests are batched is
    the business of its ``Serving``."""

    name: str
    title: str
    summary: str

    @abstractmethod
    def serving(self, reading: str) -> Serving: ...

    @abstractmethod
    def refuse_ignored(self, given: Mapping[str, Any]) -> None:
        """Refuse a knob of ``PARTICULAR`` that this system does not heed."""

    def plan(self, settings: Settings, lengths: Sequence[int]) -> Resources:
        """Pure arithmetic; refuses bad settings. ``lengths`` are the tokens of every request of the workload."""
        chosen = self.method(settings)
        require(
            settings.executor == "torch" or chosen.decode.quota != "origin",
            "alg='origin' commits tokens by chance, which cannot be simulated: give another --alg, or use --executor torch",
        )
        return self.serving(settings.reading).plan(self, settings, chosen, lengths)

    def assemble(self, settings: Settings, resources: Resources, group: TensorParallel | None = None) -> Assembled:
        """``group`` is what the model is divided among; every rank assembles, and rank 0 leads."""
        return self.serving(settings.reading).assemble(self, settings, resources, group)

    def method(self, settings: Settings) -> Method:
        return method(self.name, settings.family, settings.method)

    # ---- packed steps, logits in chunks ---------------------------------------------------

    def packed_method(self, settings: Settings, chosen: Method) -> Method:
        """The method as continuous batching runs it; refuses what it cannot."""
        return chosen

    def cache_row_bytes(self, shape: ModelShape) -> int:
        """Of one token in the cache, over all layers."""
        return shape.kv_bytes_per_token

    def packed_roofline(self, roofline: Roofline, config: EngineConfig, chosen: Method) -> RooflineExecutor:
        return RooflineExecutor(roofline, config)

    def packed_torch(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        kv_rows: int,
        *,
        stop_ids: Collection[int] | None,
        block_length: int,
        profile_every: int = 0,
    ) -> TorchExecutor:
        from engines.dllm.executor.packed import packed_executor

        executor = packed_executor(model, config, kv_rows, stop_ids=stop_ids, profile_every=profile_every)
        executor.prepare(block_length)
        return executor


class Serving(ABC):
    """How requests become steps, and how much memory that takes."""

    knobs: frozenset[str]
    """Of ``PARTICULAR``."""

    @abstractmethod
    def plan(self, system: Any, settings: Settings, chosen: Method, lengths: Sequence[int]) -> Resources: ...

    @abstractmethod
    def assemble(
        self, system: Any, settings: Settings, resources: Resources, group: TensorParallel | None = None
    ) -> Assembled: ...


def engine_config(settings: Settings, chosen: Method, **changes: Any) -> EngineConfig:
    """The run's settings with what the method decides."""
    return replace(
        settings.engine,
        sparsity=chosen.sparsity,
        decode=chosen.decode,
        suppress_mask_token=chosen.suppress_mask_token,
        **changes,
    )


def rows_of_request(total_len: int, generation: GenerationConfig, chosen: Method) -> int:
    """Cache rows a request of ``total_len`` tokens holds under a method; 0 without a cache."""
    if not chosen.rule.caches:
        return 0
    if total_len < generation.gen_length:
        raise UserError(
            f"total_len={total_len} is less than gen_length={generation.gen_length}: it includes the prompt"
        )
    request = Request(request_id=0, prompt_len=total_len - generation.gen_length, generation=generation)
    return cache_rows(request, chosen.sparsity, chosen.rule.window)
