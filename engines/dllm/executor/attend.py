"""Attention of a packed step: a Refresh over its own rows, a Reuse over its run of the pool (dLLM-Serve §4.5)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.attention import Spans, VarlenAttention, varlen_attention
from engines.dllm.executor.step import StepRows
from engines.dllm.plan import PlanItem
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, Store
from engines.runtime.step_timer import StepTimer

Part = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attends the Refresh or the Reuse rows of q to k and v, into the given output or its own; returns which."""


class PackedAttend:
    """Writes the rows of Reuse requests, and the retained ones of requests that build their cache, to the pool. ``whole_layer``
    keeps every row where the others select."""

    def __init__(
        self,
        pool: PoolTensors,
        attention: VarlenAttention,
        store: Store,
        timer: StepTimer,
        whole_layer: int | None = None,
    ) -> None:
        self._pool, self._attention, self._store, self._timer = pool, attention, store, timer
        self._whole_layer = whole_layer

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        whole = self._layers(rows)
        if rows.selecting is None:
            return whole
        selecting, whole_layer = self._layers(rows.selecting), self._whole_layer
        return lambda layer, q, k, v: (whole if layer == whole_layer else selecting)(layer, q, k, v)

    def _layers(self, rows: StepRows) -> Attend:
        pool, timer, store = self._pool, self._timer, self._store
        own = slice(rows.num_refresh_rows, rows.num_rows)
        refresh, reuse = self._by_runs(rows) if rows.spans is None else self._by_spans(rows, rows.spans)
        joins = rows.spans is None or bool(rows.refresh_runs and rows.reuse_q_runs)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            out = torch.empty_like(q) if joins else q
            if joins and rows.num_rows < out.shape[0]:
                out[rows.num_rows :] = 0
            if rows.refresh_runs:
                out = refresh(q, k, v, out)
            if rows.pack is not None:
                timer.lap_inside("attention")
                rows.pack(pool.k[layer], pool.v[layer], q, k, v)
                timer.lap_inside("selection")
            if rows.reuse_q_runs:
                pool_k, pool_v = pool.k[layer], pool.v[layer]
                # The block's fresh rows go right behind the retained ones: one run, no concatenation.
                store(pool_k, pool_v, rows.pool_row, k[own], v[own])
                out = reuse(q, pool_k, pool_v, out)
            timer.lap_inside("attention")
            return out

        return attend

    def _by_runs(self, rows: StepRows) -> tuple[Part, Part]:
        def refresh(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            varlen_attention(out, q, k, v, rows.refresh_runs, rows.refresh_runs)
            return out

        def reuse(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            varlen_attention(out, q, k, v, rows.reuse_q_runs, rows.reuse_k_runs)
            return out

        return refresh, reuse

    def _by_spans(self, rows: StepRows, spans: tuple[Spans, Spans]) -> tuple[Part, Part]:
        """A step of one kind is attended whole, into the backend's own output."""
        attention = self._attention
        first, own = slice(0, rows.num_refresh_rows), slice(rows.num_refresh_rows, rows.num_rows)

        def refresh(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            if not rows.reuse_q_runs:
                return attention(q, k, v, spans[0])
            attention(q[first], k[first], v[first], spans[0], out[first])
            return out

        def reuse(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            if not rows.refresh_runs:
                return attention(q, k, v, spans[1])
            attention(q[own], k, v, spans[1], out[own])
            return out

        return refresh, reuse
