"""What a step of dLLM-Cache asks of the hardware, and its simulated executors."""

from __future__ import annotations

from collections.abc import Iterable

from baselines.dllm.dllm_cache.schedule import BatchClock, CacheStep, FeatureCacheConfig, refuse_unsupported
from engines.cost.roofline import StepPrice, StepWork
from engines.dllm.config import EngineConfig
from engines.dllm.executor.simulated import RooflineExecutor
from engines.dllm.plan import Request, StepPlan
from engines.models.shape import ModelShape


def step_work(step: CacheStep, members: int, shape: ModelShape) -> StepWork:
    """One forward of a static batch, padding included; logits of all response rows at once, as published."""
    return packed_work([(step, members)], shape, logit_rows=members * step.gen_length)


def packed_work(
    steps: Iterable[tuple[CacheStep, int]], shape: ModelShape, *, logit_rows: int, logit_chunks: int = 1
) -> StepWork:
    """One forward of requests, each at its own step; a step is given with the number of requests at it.

    The rows whose query path is recomputed pass through every layer alike and are the forward's
    ``query_rows``; what the first layer (all rows, always) and the value projections of compared
    rows add to that goes into the ``extra`` fields. Cached outputs are read for every row that is
    not recomputed and written for every one that is; compared rows read their old value too.
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
        # Without a query past the first layer, nothing is read there.
        read_rows += count * step.total_width if step.query_rows else 0
    later = shape.n_layers - 1

    # First layer: every row. Query rows of later layers are in query_rows already, and count once less here.
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


class FeatureCacheRooflineExecutor(RooflineExecutor):
    """Charges what ``feature_cache_executor`` computes."""

    def __init__(
        self, roofline: StepPrice, config: EngineConfig, cache: FeatureCacheConfig, *, copied_bytes_per_logit: int = 0
    ) -> None:
        super().__init__(roofline, config, copied_bytes_per_logit=copied_bytes_per_logit)
        self._clock = BatchClock(cache)

    def validate(self, request: Request) -> None:
        super().validate(request)
        refuse_unsupported(request)

    def work(self, plan: StepPlan) -> StepWork:
        return step_work(self._clock.tick(plan), len(plan.items), self.roofline.shape)


class PackedFeatureCacheRooflineExecutor(RooflineExecutor):
    """dLLM-Cache without padding or batch: every request's steps are counted from its own first one, and
    logits are those of the active blocks, in chunks."""

    def __init__(self, roofline: StepPrice, config: EngineConfig, cache: FeatureCacheConfig) -> None:
        super().__init__(roofline, config)
        self.cache = cache
        self._steps: dict[int, int] = {}
        self._gen_lengths: dict[int, int] = {}

    def validate(self, request: Request) -> None:
        super().validate(request)
        refuse_unsupported(request)

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
