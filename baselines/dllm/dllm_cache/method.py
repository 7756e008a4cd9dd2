"""dLLM-Cache as a method: its intervals, its memory, the work of its steps, and its executors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baselines.dllm.dllm_cache.schedule import BatchClock, CacheStep, FeatureCacheConfig, refuse_unsupported
from baselines.dllm.dream import dream_decode
from baselines.dllm.options import DllmCacheOptions
from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler, StaticFootprint, base_bytes
from engines.cost.roofline import StepPrice, StepWork
from engines.dllm.config import DecodeConfig, EngineConfig, GenerationConfig, NoCache, Phase, Window
from engines.dllm.engine import Engine
from engines.dllm.memory import REDUCTION_ROWS
from engines.dllm.method import BLOCKS, Options, Sampler
from engines.dllm.plan import PlanItem, Request, StepOutcome, StepPlan
from engines.dllm.scheduling import KvPool
from engines.dllm.sequence import Course
from engines.dllm.simulated import RooflineExecutor
from engines.errors import require
from engines.models.shape import ModelShape

if TYPE_CHECKING:
    from engines.models.protocol import DiffusionModel


def step_work(step: CacheStep, members: int, shape: ModelShape) -> StepWork:
    """Work of one forward of a static batch, padding included; as published, it makes logits of all response rows at once."""
    return packed_work([(step, members)], shape, logit_rows=members * step.gen_length)


def packed_work(
    steps: Iterable[tuple[CacheStep, int]], shape: ModelShape, *, logit_rows: int, logit_chunks: int = 1
) -> StepWork:
    """Work of one forward of requests at different steps; ``steps`` pairs a step with the number of requests at it.

    Rows whose query path is recomputed pass through every layer alike; they are the forward's ``query_rows``. The ``extra`` fields hold
    what the first layer (always all rows) and the value projections of compared rows add. The forward reads cached outputs for every row
    it does not recompute, and writes them for every row it does. Compared rows read their old value too.
    """
    members = width = rows = fresh = compared = selected = pairs = first_layer_pairs = read_rows = 0
    for step, count in steps:
        members += count
        width += count * step.total_width
        rows += count * step.query_rows
        fresh += count * step.fresh_rows
        compared += count * step.gen_length * step.compares
        selected += count * step.num_selected
        pairs += count * step.query_rows * step.total_width
        first_layer_pairs += count * (step.total_width - step.query_rows) * step.total_width
        # If no row has a query past the first layer, the later layers read nothing.
        read_rows += count * step.total_width if step.query_rows else 0
    later = shape.n_layers - 1

    # The first layer computes every row. We subtract query rows of later layers, which are in query_rows already.
    layer_flops = shape.linear_flops_per_token // shape.n_layers
    value_flops = 2 * shape.d_model * shape.kv_width
    pair_flops = shape.attention_flops_per_pair // shape.n_layers
    streamed = shape.streamed_weight_bytes_layers(width) // shape.n_layers
    if rows:
        weights = streamed - shape.streamed_weight_bytes_layers(rows) // shape.n_layers
    else:
        weights = streamed + (later * shape.d_model * shape.kv_width * shape.dtype_bytes if compared else 0)

    one_row = shape.kv_width * shape.dtype_bytes  # K or V
    outputs = 2 * shape.d_model * shape.dtype_bytes  # attention and MLP
    read = 2 * one_row * (width - read_rows) + outputs * later * (width - rows) + one_row * later * compared
    written = 2 * one_row * (width - fresh) + outputs * (width + later * rows)
    written += one_row * later * (compared + selected)
    return StepWork(
        query_rows=rows,
        attention_pairs=pairs,
        logit_rows=logit_rows,
        kv_read_rows=read_rows,
        kv_written_rows=fresh,
        num_sequences=members,
        logit_chunks=logit_chunks,
        extra_linear_flops=layer_flops * (width - rows) + value_flops * later * (compared - selected),
        extra_weight_bytes=weights,
        extra_attention_flops=pair_flops * first_layer_pairs,
        extra_cache_bytes=read + written,
    )


class _CountingExecutor(RooflineExecutor):
    """A step's work depends on how many steps came before, through blocks."""

    def validate(self, request: Request) -> None:
        super().validate(request)
        refuse_unsupported(request)

    def execute_again(
        self, plan: StepPlan, begun: Sequence[tuple[PlanItem, Course]], number: int, previous: StepOutcome | None
    ) -> StepOutcome:
        return self.execute(plan)


class FeatureCacheRooflineExecutor(_CountingExecutor):
    """Charges for what ``feature_cache_executor`` computes."""

    def __init__(
        self, roofline: StepPrice, config: EngineConfig, cache: FeatureCacheConfig, *, copied_bytes_per_logit: int = 0
    ) -> None:
        super().__init__(roofline, config, copied_bytes_per_logit=copied_bytes_per_logit)
        self._clock = BatchClock(cache)
        self._known: dict[tuple[CacheStep, int], StepWork] = {}

    def work(self, plan: StepPlan) -> StepWork:
        step = self._clock.tick(plan), len(plan.items)
        if step not in self._known:
            self._known[step] = step_work(*step, self.roofline.shape)
        return self._known[step]


class PackedFeatureCacheRooflineExecutor(_CountingExecutor):
    """dLLM-Cache without padding or static batches: every request counts its own steps, and a step makes the logits of the active blocks,
    in chunks."""

    def __init__(self, roofline: StepPrice, config: EngineConfig, cache: FeatureCacheConfig) -> None:
        super().__init__(roofline, config)
        self.cache = cache
        self._steps: dict[int, int] = {}
        self._gen_lengths: dict[int, int] = {}

    def work(self, plan: StepPlan) -> StepWork:
        for request in plan.admitted:
            self._steps[request.request_id] = 0
            self._gen_lengths[request.request_id] = request.generation.gen_length
        logit_rows, steps = sum(item.block_len for item in plan.items), []
        for item in plan.items:
            self._steps[item.request_id] += 1
            gen_length = self._gen_lengths[item.request_id]
            step = self.cache.step(self._steps[item.request_id], item.total_len - gen_length, gen_length)
            steps.append((step, 1))
        return packed_work(
            steps,
            self.roofline.shape,
            logit_rows=logit_rows,
            logit_chunks=max(1, -(-logit_rows // self.config.max_num_logits)),
        )

    def release(self, request_id: int) -> None:
        del self._steps[request_id], self._gen_lengths[request_id]


def memory_bytes_per_token(shape: ModelShape) -> int:
    """K, V, attention output and MLP output of one token over all layers. Without grouped queries this is twice a plain KV cache, 1 MiB
    for LLaDA-8B in bfloat16."""
    return shape.kv_bytes_per_token + shape.n_layers * 2 * shape.d_model * shape.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class FeatureCaches:
    """dLLM-Cache under continuous batching. A request reserves a row of features for each of its tokens. Every step is charged for all of
    them, as the first layer always recomputes every row."""

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
    batches_upstream = True  # its process-wide cache allows batches of one prompt length and one generation length
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
        """On Dream, dLLM-Cache runs Dream's own loop, which has no blocks."""
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
        """Memory of a static batch: each of ``longest`` rows has activations and cached features, and response rows have logits. Logits
        are copied to be reduced: REDUCTION_ROWS at a time, all at once upstream. Guidance also caches the features of a second forward,
        and what it adds to the logits of each response row."""
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
        self, model: "DiffusionModel", config: EngineConfig, sampler: Sampler, request: Request, **options: Any
    ) -> Engine:
        scheduler = StaticBatchScheduler(config, KvPool(0), sampler.rule, batch_size=1)
        return Engine(scheduler, self.static_torch(model, config, sampler, 0, batch_size=1, **options))

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
