"""Attention of a step over the paged pool, by any of the backends of ``engines.attention``, in one call for all phases."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.attention import Spans, VarlenAttention
from engines.blockdiffusion.rows import StepRows
from engines.models.protocol import Attend
from engines.runtime.pool import PoolTensors, Store
from engines.runtime.staging import Staging


class GatheredAttention:
    """A layer's K and V go to the pool first; then every request's keys are fetched once, whatever number of its blocks reads
    them."""

    def __init__(self, attention: VarlenAttention, store: Store, staging: Staging) -> None:
        self._attention, self._store, self._staging = attention, store, staging

    @property
    def name(self) -> str:
        return self._attention.name

    def attend(self, rows: StepRows, pool: PoolTensors) -> Attend:
        pool_row, keys = self._staging.send(rows.pool_row, rows.keys)
        spans = Spans.of_lengths(rows.q_len, rows.k_start, rows.k_len, device=pool.k.device)
        attention, store, num_real = self._attention, self._store, int(rows.q_len.sum())

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool_k, pool_v = pool.rows(layer)
            store(pool_k, pool_v, pool_row, k, v)
            out = torch.empty_like(q)
            out[num_real:] = 0
            return attention(q, pool_k.index_select(0, keys), pool_v.index_select(0, keys), spans, out)

        return attend
