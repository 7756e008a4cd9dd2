"""dLLM-Cache as a method: its intervals, its memory and its executors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.work import FeatureCacheRooflineExecutor, PackedFeatureCacheRooflineExecutor
from baselines.dllm.dream import dream_decode
from baselines.dllm.options import DllmCacheOptions
from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler
from baselines.dllm.static.search import StaticFootprint, base_bytes
from engines.cost.roofline import StepPrice
from engines.dllm.config import DecodeConfig, EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.simulated import RooflineExecutor
from engines.dllm.memory import REDUCTION_ROWS
from engines.dllm.method import BLOCKS, Options, Sampler
from engines.dllm.phase import NoCache, Phase, Window
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from engines.errors import require
from engines.models.shape import ModelShape

if TYPE_CHECKING:
    from engines.models.protocol import DiffusionModel


def memory_bytes_per_token(shape: ModelShape) -> int:
    """K, V, attention output and MLP output of one token over all layers: twice a plain KV cache
    without grouped queries, 1 MiB for LLaDA-8B in bfloat16."""
    return shape.kv_bytes_per_token + shape.n_layers * 2 * shape.d_model * shape.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class FeatureCaches:
    """dLLM-Cache under continuous batching. A request reserves a row of features for each of its tokens, and
    is charged all of them at every step: the first layer always recomputes every row."""

    caches: bool = True
    window: Window = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.FULL


@dataclass(frozen=True, kw_only=True)
class FeatureSampler(Sampler):
    """A sampler that caches features of every layer."""

    features: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)


class DllmCache(PublishedMethod):
    name = "dllm-cache"
    title = "dLLM-Cache"
    heeds = {"llada": BLOCKS | {"cfg_scale"}, "dream": frozenset({"alg_temp"})}
    own = DllmCacheOptions
    batches_upstream = True  # of one prompt length and one generation length, its process-wide cache allows
    mixes_lengths = False
    torch_executors = {"static": "baselines.dllm.dllm_cache.torch_executor:feature_cache_executor"}

    def _sampler(self, family: str, own: DllmCacheOptions, options: Options) -> FeatureSampler:
        require(
            "cfg_interval" not in options or options.get("cfg_scale", 0) > 0,
            f"cfg_interval={options.get('cfg_interval')!r} has no effect without guidance: add cfg_scale or leave it out",
        )
        return FeatureSampler(
            rule=NoCache(),
            decode=DecodeConfig() if family == "llada" else dream_decode(own.alg, options),
            features=own.features,
        )

    def has_blocks(self, family: str, options: Options) -> bool:
        """On Dream it runs Dream's own loop."""
        return family != "dream"

    def footprint(
        self,
        shape: ModelShape,
        sampler: Sampler,
        generation: GenerationConfig,
        *,
        memory_bytes: int,
        longest: int,
        is_upstream: bool = False,
    ) -> StaticFootprint:
        """Every one of ``longest`` rows has activations and cached features, the response rows have logits, copied to be reduced:
        REDUCTION_ROWS at a time, all at once upstream. Guidance caches the features of a second forward, and what it adds to each
        response row's logits."""
        guided = generation.cfg_scale > 0
        per_row = shape.activation_bytes_per_query_token + (1 + guided) * memory_bytes_per_token(shape)
        logits = generation.gen_length * (1 + guided) * shape.logits_bytes_per_row
        copies = sampler.reduction_bytes_per_value(shape.dtype_bytes) * shape.vocab_rows
        return StaticFootprint(
            fixed_bytes=base_bytes(shape, memory_bytes) + (0 if is_upstream else REDUCTION_ROWS * copies),
            per_request_bytes=longest * per_row + logits + (generation.gen_length * copies if is_upstream else 0),
        )

    def static_roofline(
        self, roofline: StepPrice, config: EngineConfig, sampler: Sampler, *, copied_bytes_per_logit: int
    ) -> RooflineExecutor:
        return FeatureCacheRooflineExecutor(
            roofline, config, _features(sampler), copied_bytes_per_logit=copied_bytes_per_logit
        )

    def static_cache(self, sampler: Sampler, kv_rows: int) -> FeatureCacheConfig:
        return _features(sampler)

    def alone(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        sampler: Sampler,
        request: Request,
        *,
        stop_ids: Collection[int] | None,
    ) -> Engine:
        scheduler = StaticBatchScheduler(config, KvPool(0), sampler.rule, batch_size=1)
        return Engine(scheduler, self.static_torch(model, config, sampler, 0, batch_size=1, stop_ids=stop_ids))

    # ---- packed steps -----------------------------------------------------------------------

    def packed(self, sampler: Sampler, *, is_simulated: bool) -> Sampler:
        require(
            is_simulated,
            "reading='policy' of system='dllm-cache' can only be simulated, its torch executor runs padded batches alone: "
            "use --executor roofline or another reading",
        )
        return replace(sampler, rule=FeatureCaches())

    def cache_row_bytes(self, shape: ModelShape) -> int:
        return memory_bytes_per_token(shape)

    def packed_roofline(self, roofline: StepPrice, config: EngineConfig, sampler: Sampler) -> RooflineExecutor:
        return PackedFeatureCacheRooflineExecutor(roofline, config, _features(sampler))


def _features(sampler: Sampler) -> FeatureCacheConfig:
    assert isinstance(sampler, FeatureSampler)
    return sampler.features


DLLM_CACHE = DllmCache()
