"""Static batching: request-level FCFS, a batch is padded to its longest member and runs to completion.

What the paper compares with (§3.1, §6.1): no admission while a batch runs, padded rows are computed,
and the output head materialises logits for every row of the batch at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from baselines.dllm.static.attend import PaddedAttend
from baselines.dllm.static.head import MonolithicHead, every_row_s_logits, reduce_every_row
from engines.attention import batch_attention
from engines.dllm.config import EngineConfig
from engines.dllm.executor.compose import Shared
from engines.dllm.executor.graphs import PackedForward
from engines.dllm.executor.layout import PackedLayout
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import PlanItem
from engines.models.protocol import DiffusionModel
from engines.runtime.rows import Ints


def padded_executor(
    model: DiffusionModel,
    config: EngineConfig,
    kv_rows: int,
    *,
    batch_size: int,
    stop_ids: Collection[int] | None = None,
    profile_every: int = 0,
) -> TorchExecutor:
    """Executes static batches as published code does: [n, T_max] rows and key-padding masks. Each
    member gets the ids it would get alone."""
    # Batches are attended to as they are, in one call; nothing here is ragged.
    attention = batch_attention(next(model.parameters()), model.config.head_dim)
    shared = Shared.of(model, config, num_slots=batch_size, attention=attention)
    kernels, state, staging, timer = shared.kernels, shared.state, shared.staging, shared.timer
    pool = shared.pool(kv_rows)
    pool.fill_with_zeros()
    rows = PackedLayout(
        model,
        state,
        timer,
        kernels.selection,
        PaddedAttend(model.config, pool, attention, staging, timer),
        sends_spans=False,
        row_lengths=padded_lengths,
    )
    return shared.executor(
        pool=pool,
        rows=rows,
        forward=PackedForward(model, state, staging),
        head=MonolithicHead(every_row_s_logits(model), reduce_every_row(kernels.reduction)),
        stop_ids=stop_ids,
        profile_every=profile_every,
    )


def padded_lengths(items: Sequence[PlanItem], pad_to: int | None) -> Ints:
    """A Refresh is as long as the longest member's; a Reuse has each member's window."""
    assert pad_to is not None, "a padded executor runs static batches only"
    return np.array([pad_to if item.phase.is_refresh else item.window_len for item in items])
