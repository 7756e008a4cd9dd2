"""What a step of dLLM-Cache asks of the hardware, and its simulated executor."""

from __future__ import annotations

from baselines.dllm_cache.schedule import BatchClock, CacheStep, FeatureCacheConfig, refuse_unsupported
from engines.dllm.config import EngineConfig
from engines.dllm.plan import StepOutcome, StepPlan
from engines.dllm.request import Request
from engines.dllm.roofline_executor import RooflineExecutor
from engines.models.shape import ModelShape
from engines.roofline import Roofline, StepWork


def step_work(step: CacheStep, members: int, shape: ModelShape) -> StepWork:
    """One forward of a batch, padding included.

    The rows whose query path is recomputed pass through every layer alike and are the step's
    ``query_rows``; what the first layer (all rows, always) and the value projections of compared
    rows add to that goes into the ``extra`` fields. Cached outputs are read for every row that is
    not recomputed and written for every one that is; compared rows read their old value too.
    """
    width, later = members * step.total_width, shape.n_layers - 1
    rows, fresh = members * step.query_rows, members * step.fresh_rows
    compared, selected = members * step.gen_length * step.compares, members * step.num_selected

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
    read = 2 * one_row * (0 if rows else width) + outputs * later * (width - rows) + one_row * later * compared
    written = 2 * one_row * (width - fresh) + outputs * (width + later * rows)
    written += one_row * later * (compared + selected)
    return StepWork(
        query_rows=rows,
        attention_pairs=rows * step.total_width,
        logit_rows=members * step.gen_length,
        kv_read_rows=width if rows else 0,
        kv_written_rows=fresh,
        num_sequences=members,
        extra_linear_flops=layer_flops * (width - rows) + value_flops * later * (compared - selected),
        extra_weight_bytes=weights,
        extra_attention_flops=pair_flops * (width - rows) * step.total_width,
        extra_cache_bytes=read + written,
    )


class FeatureCacheRooflineExecutor(RooflineExecutor):
    """Charges what ``FeatureCacheTorchExecutor`` computes."""

    def __init__(self, roofline: Roofline, config: EngineConfig, cache: FeatureCacheConfig) -> None:
        super().__init__(roofline, config)
        self._clock = BatchClock(cache)

    def validate(self, request: Request) -> None:
        super().validate(request)
        refuse_unsupported(request)

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = step_work(self._clock.tick(plan), len(plan.items), self.roofline.shape)
        duration = self.roofline.step_time(work).total_s
        return StepOutcome(
            committed=tuple(item.commit for item in plan.items),
            query_rows=work.query_rows,
            logit_rows=work.logit_rows,
            forward_s=duration,
            duration_s=duration,
        )
