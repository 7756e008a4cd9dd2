"""dLLM-Cache on a torch model: static batches, and per-layer feature caches of the whole sequence. Its own output head takes the greedy
token of exponentials, and keeps the difference that guidance makes."""

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from baselines.dllm.dllm_cache.forward import FeatureForward
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig, refuse_unsupported
from baselines.dllm.static.executor import MonolithicHead, Reduce
from engines.attention.registry import batch_attention
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduced, Reduction, Sampling, reduce_in_parts
from engines.dllm.executor.compose import Shared
from engines.dllm.executor.layout import HostRows
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import ItemTable, PackedRows
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import PlanItem
from engines.errors import require
from engines.models.protocol import DiffusionModel


def reduce_by_exponentials(reduction: Reduction) -> Reduce:
    """Return LLaDA's rule; ``reduction`` reduces the rows that draw their token."""
    by_exponentials = partial(reduce_exponentials, suppress_id=reduction.suppress_id)

    def reduce(logits: Tensor, wanted: Tensor | slice, sampling: Sampling | None) -> Reduced:
        token, confidence = reduce_in_parts(by_exponentials, logits, None)
        token, confidence = token[wanted], confidence[wanted]
        if sampling is None:
            return token, confidence
        drawn_token, drawn_confidence = reduce_in_parts(reduction, logits[wanted], sampling)
        hot = sampling.temperature > 0
        drawn_confidence = drawn_confidence.to(confidence.dtype)
        return (
            torch.where(hot, drawn_token, token),
            torch.where(hot | sampling.random_remasking, drawn_confidence, confidence),
        )

    return reduce


def reduce_wanted(reduction: Reduction) -> Reduce:
    """Return Dream's own rule, which ranks probabilities."""
    return lambda logits, wanted, sampling: reduce_in_parts(reduction, logits[wanted], sampling)


def reduce_exponentials(logits: Tensor, _: Sampling | None = None, *, suppress_id: int | None) -> Reduced:
    """Return the greedy token and its probability, both in the logits' dtype.

    The token is the argmax of exp(logits), as published: if exp overflows or distinct logits share an exponential, the lowest id wins.
    """
    odds = logits.exp()
    if suppress_id is not None:
        odds[:, suppress_id] = -1
    token = odds.argmax(dim=-1)
    del odds
    return token, torch.softmax(logits, dim=-1).gather(1, token.unsqueeze(1)).squeeze(1)


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
    """Build an executor that gives each member the ids it would get alone, on CPU bit for bit.

    On CPU, members of unequal length attend one by one over their own columns. ``masked_attention`` (the default elsewhere) is one call
    for the batch with a mask over the padding, which rounds differently. At a temperature above zero the noise is the engine's and
    depends on the request alone. Published code draws it in the logits' dtype from a global generator.
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
    # Which rows it recomputes depends on how similar values are, sometimes on their last bits: norms stay torch's.
    shared = Shared(model, config, num_slots=batch_size, attention=attention, host_norms=False)
    reduction = shared.kernels.reduction
    forward = FeatureForward(
        shared,
        cache,
        attention,
        masked_attention=shared.device.type != "cpu" if masked_attention is None else masked_attention,
        is_parity=config.tie_policy == "parity",
    )
    reduce = reduce_wanted(reduction) if shifts_logits else reduce_by_exponentials(reduction)
    return shared.executor(
        pool=shared.pool(0),
        rows=ResponseLayout(shared.state, shifts_logits=shifts_logits),
        forward=forward,
        head=MonolithicHead(forward.logits, reduce),
        # The whole response, like published code.
        ranked_span=lambda i, request: (i.block_start - request.prompt_len, request.generation.gen_length),
        also_validate=refuse_unsupported,
        stop_ids=stop_ids,
        profile_every=profile_every,
    )


class ResponseLayout:
    """The hidden rows are the responses, end to end; a member's run starts where its position 0 would lie."""

    def __init__(self, state: RequestState, *, shifts_logits: bool) -> None:
        self._state, self._shift = state, int(shifts_logits)

    def of(self, items: Sequence[PlanItem], table: ItemTable, pad_to: int | None) -> HostRows:
        gen_length = self._state.request(items[0]).generation.gen_length
        starts = np.arange(len(items)) * gen_length - (table.total_len - gen_length - self._shift)
        num_rows, empty = len(items) * gen_length, np.empty(0, dtype=np.int64)
        packed = PackedRows(
            num_rows=num_rows,
            num_refresh_rows=num_rows,
            base=np.append(starts, starts[-1] + table.total_len[-1]),
            position=empty,
            flat=empty,
            pool_row=empty,
            key_len=empty,
        )
        return HostRows(packed)
