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

from baselines.dllm_cache.memory import feature_cache_footprint
from baselines.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm_cache.work import FeatureCacheRooflineExecutor
from baselines.method import Method, check_generation, method
from baselines.static_memory import StaticFootprint, largest_batch, static_footprint
from baselines.static_scheduler import StaticBatchScheduler
from engines.dllm.budget import MemoryPlan, plan_memory, rows_for_request
from engines.dllm.config import EngineConfig, GenerationConfig, require
from engines.dllm.engine import Engine
from engines.dllm.kv_pool import KvPool
from engines.dllm.plan import Executor
from engines.dllm.request import Request
from engines.dllm.roofline_executor import RooflineExecutor
from engines.dllm.scheduler import SCHEDULERS
from engines.dllm.sequence import cache_rows
from engines.errors import UserError
from engines.hardware import gpu
from engines.models.checkpoint import SHAPES, config_of
from engines.models.shape import ModelShape
from engines.roofline import Roofline
from repro.calibration import load_calibration
from repro.settings import Settings

if TYPE_CHECKING:
    from engines.models.protocol import DiffusionModel


PARTICULAR = frozenset({"scheduler", "max_num_batched_tokens", "max_num_logits", "logit_rows", "batch_size"})
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
    """Of a static batch; None for continuous batching."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Assembled:
    engine: Engine
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was learnt by assembling: measured memory peaks."""


class System(ABC):
    """``knobs`` names the run's settings that this system alone heeds; a cell that sets another's is refused."""

    name: str
    title: str
    summary: str
    knobs: frozenset[str]

    def refuse_ignored(self, given: Mapping[str, Any]) -> None:
        for name in sorted((PARTICULAR - self.knobs) & given.keys()):
            raise UserError(f"{name}={given[name]!r} has no effect with system={self.name!r}: leave it out")

    @abstractmethod
    def plan(self, settings: Settings, longest: int) -> Resources:
        """Pure arithmetic; ``longest`` is the workload's longest request in tokens."""

    @abstractmethod
    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled: ...


class DllmServe(System):
    name = "dllm-serve"
    title = "dLLM-Serve"
    summary = "continuous batching by phase, logit decomposition, head-centric sparse KV cache"
    knobs = frozenset({"scheduler", "max_num_batched_tokens", "max_num_logits", "logit_rows"})

    def plan(self, settings: Settings, longest: int) -> Resources:
        chosen = method(self.name, settings.family, settings.method)
        config = replace(
            settings.engine,
            sparsity=chosen.sparsity,
            decode=chosen.decode,
            suppress_mask_token=chosen.suppress_mask_token,
        )
        kv_rows, plan = self._kv_rows(settings, config, longest, activations_measured_bytes=None)
        facts = {
            "kv_rows": kv_rows,
            "activation_bytes": plan.activation_bytes,
            "logits_bytes": plan.logits_bytes,
            "kv_bytes": plan.kv_bytes,
        }
        return Resources(config=config, method=chosen, kv_rows=kv_rows, longest=longest, facts=facts)

    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled:
        config, kv_rows, facts = resources.config, resources.kv_rows, {}
        runner: Executor
        if executor == "roofline":
            runner = RooflineExecutor(_roofline(settings), config)
        else:
            from engines.dllm.torch_executor import TorchExecutor

            # The offline profiler (§4.2): the pool gets what the measured worst step leaves.
            activation_bytes, logits_bytes = _measured_peak(_model_key(settings), config, settings.generation)
            kv_rows, _ = self._kv_rows(settings, config, resources.longest, activations_measured_bytes=activation_bytes)
            facts = {
                "kv_rows": kv_rows,
                "measured_activation_bytes": activation_bytes,
                "measured_logits_bytes": logits_bytes,
            }
            runner = TorchExecutor(_load(*_model_key(settings)), config, kv_rows)
        scheduler = SCHEDULERS[config.scheduler](config, KvPool(kv_rows), resources.method.rule)
        return Assembled(engine=Engine(scheduler, runner), facts=facts)

    @staticmethod
    def _kv_rows(
        settings: Settings, config: EngineConfig, longest: int, *, activations_measured_bytes: int | None
    ) -> tuple[int, MemoryPlan]:
        per_request = rows_for_request(longest, settings.generation, config.sparsity)
        plan = plan_memory(
            model_shape(settings), settings.memory_bytes, config,
            logit_rows=settings.logit_rows, rows_of_one_request=per_request,  # type: ignore[arg-type]
            activations_measured_bytes=activations_measured_bytes,
        )  # fmt: skip
        # More rows than all slots together can use would only cost memory.
        return min(plan.kv_rows, config.max_num_seqs * per_request), plan


class StaticSystem(System):
    """A published sampler under static batching, with the largest batch that fits unless told."""

    knobs = frozenset({"batch_size"})

    def __init__(self, name: str, title: str, summary: str) -> None:
        self.name, self.title, self.summary = name, title, summary

    def plan(self, settings: Settings, longest: int) -> Resources:
        generation = settings.generation
        chosen = method(self.name, settings.family, settings.method)
        check_generation(self.name, settings.family, generation)
        footprint = self._footprint(settings, chosen, longest)
        batch_size = settings.batch_size or largest_batch(footprint, settings.memory_bytes, longest)
        batch_size = min(batch_size, settings.num_requests, settings.engine.max_num_seqs)
        require(
            batch_size == 1 or not generation.is_parallel,
            f"threshold={generation.threshold}, factor={generation.factor}: parallel decoding ends requests of a static "
            f"batch at different steps, and published code runs it alone: add --batch-size 1",
        )
        config = replace(
            settings.engine,
            sparsity=chosen.sparsity,
            decode=chosen.decode,
            suppress_mask_token=chosen.suppress_mask_token,
            # The token budget is dLLM-Serve's currency; a static batch is bounded by memory alone.
            max_num_batched_tokens=batch_size * settings.engine.max_model_len,
        )
        rows = cache_rows_of(longest, generation, chosen)
        return Resources(
            config=config,
            method=chosen,
            kv_rows=batch_size * rows,
            longest=longest,
            batch_size=batch_size,
            facts={"batch_size": batch_size},
        )

    def assemble(self, settings: Settings, resources: Resources, executor: str) -> Assembled:
        batch_size = resources.batch_size
        assert batch_size is not None
        scheduler = StaticBatchScheduler(
            resources.config, KvPool(resources.kv_rows), resources.method.rule,
            batch_size=batch_size, exact_steps=resources.method.exact_steps,
        )  # fmt: skip
        return Assembled(engine=Engine(scheduler, self._executor(settings, resources, executor)))

    def _footprint(self, settings: Settings, chosen: Method, longest: int) -> StaticFootprint:
        return static_footprint(
            model_shape(settings), settings.memory_bytes, longest,
            kv_rows=cache_rows_of(longest, settings.generation, chosen),
            logit_bytes_per_value=chosen.logit_bytes_per_value(model_shape(settings).dtype_bytes),
        )  # fmt: skip

    def _executor(self, settings: Settings, resources: Resources, executor: str) -> Executor:
        if executor == "roofline":
            return RooflineExecutor(_roofline(settings), resources.config)
        from baselines.static_batch import PaddedTorchExecutor

        assert resources.batch_size is not None
        model = _load(*_model_key(settings))
        return PaddedTorchExecutor(model, resources.config, resources.kv_rows, batch_size=resources.batch_size)


class DllmCache(StaticSystem):
    """Its own memory and executors: what it caches are features of every layer."""

    def _footprint(self, settings: Settings, chosen: Method, longest: int) -> StaticFootprint:
        return feature_cache_footprint(model_shape(settings), settings.memory_bytes, longest, settings.generation)

    def _executor(self, settings: Settings, resources: Resources, executor: str) -> Executor:
        cache = FeatureCacheConfig(**{name: value for name, value in settings.method.items() if name != "alg"})
        if executor == "roofline":
            return FeatureCacheRooflineExecutor(_roofline(settings), resources.config, cache)
        from baselines.dllm_cache.torch_executor import FeatureCacheTorchExecutor

        assert resources.batch_size is not None
        model = _load(*_model_key(settings))
        return FeatureCacheTorchExecutor(model, resources.config, cache, batch_size=resources.batch_size)


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        s.name: s
        for s in (
            DllmServe(),
            StaticSystem(
                "fast-dllm",
                "Fast-dLLM",
                "prefix or dual cache, one Refresh per block, parallel decoding; static batches",
            ),
            DllmCache(
                "dllm-cache", "dLLM-Cache", "feature caches of prompt and response, partial updates; static batches"
            ),
            StaticSystem(
                "sparse-dllm", "Sparse-dLLM", "delayed sparse cache, one selection for all heads; static batches"
            ),
            StaticSystem(
                "llada", "LLaDA", "the plain LLaDA sampler: no cache, every step a full forward; static batches"
            ),
            StaticSystem("dream", "Dream", "the plain Dream sampler: no cache, no blocks; static batches"),
        )
    }
)


def system(name: str) -> System:
    if name not in SYSTEMS:
        raise UserError(f"system={name!r} is unknown: use one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def cache_rows_of(longest: int, generation: GenerationConfig, chosen: Method) -> int:
    """KV rows of a request of ``longest`` tokens under a method; 0 without a KV cache."""
    if not chosen.rule.caches:
        return 0
    request = Request(request_id=0, prompt_len=longest - generation.gen_length, generation=generation)
    return cache_rows(request, chosen.sparsity, chosen.rule.window)


def model_shape(settings: Settings) -> ModelShape:
    # A simulated card serves 16-bit weights whatever the measuring default.
    dtype_bytes = 2 if settings.model in SHAPES or settings.dtype != "float32" else 4
    return ModelShape.from_config(config_of(settings.model), name=settings.model, dtype_bytes=dtype_bytes)


def _roofline(settings: Settings) -> Roofline:
    card = settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    return Roofline(model_shape(settings), gpu(card), load_calibration(card))


def _model_key(settings: Settings) -> tuple[str, str, str, str]:
    return settings.model, settings.dtype, settings.device, settings.weights


@lru_cache(maxsize=2)
def _load(name: str, dtype: str, device: str, weights: str) -> DiffusionModel:
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
