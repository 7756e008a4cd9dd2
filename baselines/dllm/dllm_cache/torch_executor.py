"""dLLM-Cache on a torch model: static batches, per-layer feature caches of the whole sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from baselines.dllm.dllm_cache.forward import FeatureForward, Residual
from baselines.dllm.dllm_cache.head import logits_with_residual, reduce_by_exponentials, reduce_wanted
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig, refuse_unsupported
from baselines.dllm.static.head import MonolithicHead
from engines.attention import batch_attention
from engines.dllm.config import EngineConfig
from engines.dllm.executor.compose import Shared
from engines.dllm.executor.layout import HostRows
from engines.dllm.executor.rows import ItemTable, PackedRows
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import PlanItem, Request
from engines.errors import require
from engines.models.protocol import DiffusionModel


def feature_cache_executor(
    model: DiffusionModel,
    config: EngineConfig,
    cache: FeatureCacheConfig,
    *,
    batch_size: int,
    masked_attention: bool | None = None,
    stop_ids: Collection[int] | None = None,
    profile_every: int = 0,
) -> TorchExecutor:
    """Each member gets the ids it would get alone, on CPU bit for bit.

    There, members of unequal length attend one by one over their own columns; ``masked_attention``
    (the default elsewhere) is one call for the batch with a mask over the padding, which rounds
    differently. At a temperature above zero the noise is the engine's, a function of the request
    alone; published code draws it in the logits' dtype from a global generator.
    """
    decode, shifts_logits = config.decode, model.config.shifts_logits
    require(
        decode.first_step == "ranked",
        f"first_step={decode.first_step!r} is not implemented for dLLM-Cache, which has no first step of a block: "
        f"use 'ranked'",
    )
    require(
        shifts_logits or (decode.confidence, decode.confidence_dtype) == ("max_prob", "native"),
        f"confidence={decode.confidence!r} in {decode.confidence_dtype!r} is not LLaDA's under dLLM-Cache: "
        f"use 'max_prob' in 'native'",
    )
    attention = batch_attention(next(model.parameters()), model.config.head_dim)
    # Which rows it recomputes hangs on how similar values are, and now and then on their last bits: norms stay torch's.
    shared = Shared.of(model, config, num_slots=batch_size, attention=attention, host_norms=False)
    residual, reduction = Residual(), shared.kernels.reduction
    forward = FeatureForward(
        model,
        cache,
        shared.state,
        shared.staging,
        shared.timer,
        residual,
        attention,
        masked_attention=shared.device.type != "cpu" if masked_attention is None else masked_attention,
        is_parity=config.tie_policy == "parity",
    )
    reduce = reduce_wanted(reduction) if shifts_logits else reduce_by_exponentials(reduction)
    return shared.executor(
        pool=shared.pool(0),
        rows=ResponseLayout(shared.state, shifts_logits=shifts_logits),
        forward=forward,
        head=MonolithicHead(logits_with_residual(model, residual), reduce),
        ranked_span=response_span,
        also_validate=refuse_unsupported,
        stop_ids=stop_ids,
        profile_every=profile_every,
    )


class ResponseLayout:
    """The hidden rows are the responses', end to end; a run starts where its position 0 would lie."""

    def __init__(self, state: RequestState, *, shifts_logits: bool) -> None:
        self._state, self._shift = state, int(shifts_logits)

    def of(self, items: Sequence[PlanItem], table: ItemTable, pad_to: int | None) -> HostRows:
        gen_length = self._state.request(items[0]).generation.gen_length
        starts = np.arange(len(items)) * gen_length - (table.total_len - gen_length - self._shift)
        num_rows, none = len(items) * gen_length, np.empty(0, dtype=np.int64)
        packed = PackedRows(
            num_rows=num_rows,
            num_refresh_rows=num_rows,
            base=np.append(starts, starts[-1] + table.total_len[-1]),
            position=none,
            flat=none,
            pool_row=none,
            key_len=none,
        )
        return HostRows(packed)


def response_span(item: PlanItem, request: Request) -> tuple[int, int]:
    """Published code ranks the response alone."""
    return item.block_start - request.prompt_len, request.generation.gen_length
