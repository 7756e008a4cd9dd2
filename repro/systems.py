"""The systems a cell can name: each plans its resources (pure, refuses bad settings), then assembles an
engine on a real or a simulated executor. The policy objects are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines.static_memory import largest_static_batch
from baselines.static_scheduler import StaticBatchScheduler
from engines.dllm.budget import MemoryPlan, plan_memory, rows_for_request
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.kv_pool import KvPool
from engines.dllm.phase import DelayedCache, NoCache, RefreshRule
from engines.dllm.plan import Executor
from engines.dllm.roofline_executor import RooflineExecutor
from engines.dllm.scheduler import SCHEDULERS
from engines.errors import UserError
from engines.hardware import gpu
from engines.models.shape import LLADA_8B, ModelShape
from engines.roofline import Roofline
from repro.calibration import load_calibration
from repro.settings import Settings

if TYPE_CHECKING:
    from engines.models.llada import LLaDAModelLM


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a system makes of the settings for a workload whose longest request is known."""

    config: EngineConfig
    rule: RefreshRule
    kv_rows: int
    longest: int
    """Tokens of the workload's longest request."""
    batch_size: int | None = None
    """Of a static batch; None for continuous batching."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Assembled:
    engine: Engine
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was learnt by assembling: measured memory peaks."""


class System(ABC):
    """``ignored`` names the knobs without an effect here; a cell that sets one is refused."""

    name: str
    title: str
    summary: str
    ignored: frozenset[str]

    def refuse_ignored(self, knobs: Mapping[str, Any]) -> None:
        for name in sorted(self.ignored & knobs.keys()):
            raise UserError(f"{name}={knobs[name]!r} has no effect with system={self.name!r}: leave it out")

    @abstractmethod
    def plan(self, settings: Settings, longest: int) -> Resources:
        """Pure arithmetic; ``longest`` is the workload's longest request in tokens."""

    @abstractmethod
    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled: ...


class DllmServe(System):
    name = "dllm-serve"
    title = "dLLM-Serve"
    summary = "continuous batching by phase, logit decomposition, head-centric sparse KV cache"
    ignored = frozenset({"batch_size"})

    def plan(self, settings: Settings, longest: int) -> Resources:
        config = settings.engine
        kv_rows, plan = self._kv_rows(settings, longest, activations_measured_bytes=None)
        facts = {"kv_rows": kv_rows, "activation_bytes": plan.activation_bytes, "logits_bytes": plan.logits_bytes,
                 "kv_bytes": plan.kv_bytes}  # fmt: skip
        return Resources(
            config=config,
            rule=DelayedCache(delay=config.sparsity.refresh_delay),
            kv_rows=kv_rows,
            longest=longest,
            facts=facts,
        )

    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled:
        config, kv_rows, facts = resources.config, resources.kv_rows, {}
        runner: Executor
        if executor == "roofline":
            runner = _roofline(settings, config)
        else:
            from engines.dllm.torch_executor import TorchExecutor

            # The offline profiler (§4.2): the pool gets what the measured worst step leaves.
            activation_bytes, logits_bytes = _measured_peak(_model_key(settings), config, settings.generation)
            kv_rows, _ = self._kv_rows(settings, resources.longest, activations_measured_bytes=activation_bytes)
            facts = {
                "kv_rows": kv_rows,
                "measured_activation_bytes": activation_bytes,
                "measured_logits_bytes": logits_bytes,
            }
            runner = TorchExecutor(_load(*_model_key(settings)), config, kv_rows)
        scheduler = SCHEDULERS[config.scheduler](config, KvPool(kv_rows), resources.rule)
        return Assembled(engine=Engine(scheduler, runner), facts=facts)

    @staticmethod
    def _kv_rows(settings: Settings, longest: int, *, activations_measured_bytes: int | None) -> tuple[int, MemoryPlan]:
        per_request = rows_for_request(longest, settings.generation, settings.engine.sparsity)
        plan = plan_memory(
            model_shape(settings), settings.memory_bytes, settings.engine,
            logit_rows=settings.logit_rows, rows_of_one_request=per_request,  # type: ignore[arg-type]
            activations_measured_bytes=activations_measured_bytes,
        )  # fmt: skip
        # More rows than all slots together can use would only cost memory.
        return min(plan.kv_rows, settings.engine.max_num_seqs * per_request), plan


class StaticSystem(System):
    """A published sampler under static batching; ``cached`` says whether it keeps a sparse cache."""

    cached: bool
    ignored = frozenset(
        {
            "selection",
            "refresh_delay",
            "scheduler",
            "compat",
            "threshold",
            "max_num_batched_tokens",
            "max_num_logits",
            "logit_rows",
        }
    )

    def plan(self, settings: Settings, longest: int) -> Resources:
        generation = settings.generation
        require_even(generation.gen_length, generation.block_length, generation.steps)
        sparsity = replace(settings.engine.sparsity, selection="uniform", refresh_delay=1, min_kept=0)
        batch_size = settings.batch_size or largest_static_batch(
            model_shape(settings), settings.memory_bytes, longest, generation, sparsity if self.cached else None
        )
        batch_size = min(batch_size, settings.num_requests, settings.engine.max_num_seqs)
        config = replace(
            settings.engine,
            sparsity=sparsity,
            suppress_mask_token=False,
            # The token budget is dLLM-Serve's currency; a static batch is bounded by memory alone.
            max_num_batched_tokens=batch_size * settings.engine.max_model_len,
        )
        return Resources(
            config=config,
            rule=DelayedCache(delay=1) if self.cached else NoCache(),
            kv_rows=batch_size * rows_for_request(longest, generation, sparsity) if self.cached else 0,
            longest=longest,
            batch_size=batch_size,
            facts={"batch_size": batch_size},
        )

    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled:
        config, batch_size = resources.config, resources.batch_size
        assert batch_size is not None
        scheduler = StaticBatchScheduler(config, KvPool(resources.kv_rows), resources.rule, batch_size=batch_size)
        runner: Executor
        if executor == "roofline":
            runner = _roofline(settings, config)
        else:
            from baselines.static_batch import PaddedTorchExecutor

            runner = PaddedTorchExecutor(_load(*_model_key(settings)), config, resources.kv_rows, batch_size=batch_size)
        return Assembled(engine=Engine(scheduler, runner))


class SparseDllm(StaticSystem):
    name = "sparse-dllm"
    title = "Sparse-dLLM"
    summary = "delayed sparse cache, one selection for all heads; static batches, padded, monolithic logits"
    cached = True


class Llada(StaticSystem):
    name = "llada"
    title = "LLaDA"
    summary = "the reference sampler: no cache, every step a full forward; static batches"
    cached = False
    ignored = StaticSystem.ignored | {"retention_ratio", "pool_kernel"}


SYSTEMS: Mapping[str, System] = MappingProxyType({s.name: s for s in (DllmServe(), SparseDllm(), Llada())})


def system(name: str) -> System:
    if name not in SYSTEMS:
        raise UserError(f"system={name!r} is unknown: use one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def require_even(gen_length: int, block_length: int, steps: int) -> None:
    """The published samplers assert whole blocks and whole steps per block; so do we, in words."""
    if gen_length % block_length:
        raise UserError(
            f"gen_length={gen_length} is not a multiple of block_length={block_length}, which this system needs: change one of them"
        )
    blocks = gen_length // block_length
    if steps % blocks:
        raise UserError(
            f"steps={steps} is not a multiple of the {blocks} blocks, which this system needs: change steps or block_length"
        )


def model_shape(settings: Settings) -> ModelShape:
    if settings.model == "llada-8b":
        return LLADA_8B
    from engines.models.checkpoint import checkpoint_dir, read_config

    dtype_bytes = 4 if settings.dtype == "float32" else 2
    return ModelShape.from_llada(
        read_config(checkpoint_dir(settings.model)), name=settings.model, dtype_bytes=dtype_bytes
    )


def _roofline(settings: Settings, config: EngineConfig) -> RooflineExecutor:
    card = settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    return RooflineExecutor(Roofline(model_shape(settings), gpu(card), load_calibration(card)), config)


def _model_key(settings: Settings) -> tuple[str, str, str, str]:
    return settings.model, settings.dtype, settings.device, settings.weights


@lru_cache(maxsize=2)
def _load(name: str, dtype: str, device: str, weights: str) -> LLaDAModelLM:
    """One load serves every cell of a sweep."""
    from engines.models.loader import load_model, parse_dtype

    return load_model(name, dtype=parse_dtype(dtype), device=device, weights=weights)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _measured_peak(
    model_key: tuple[str, str, str, str], config: EngineConfig, generation: GenerationConfig
) -> tuple[int, int]:
    """(activation bytes, logits bytes) of the worst step, measured once per sweep."""
    from engines.dllm.memory_profile import measure_worst_step

    peak = measure_worst_step(_load(*model_key), config, generation)
    return peak.activation_bytes, peak.logits_bytes
