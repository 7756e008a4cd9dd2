"""CUDA graphs of a step: the grid of buckets (LAPS §3.1) and a ladder of packed sizes, captured beforehand.

A graph holds the layers and the head on each sequence's newest row, and nothing that depends on a step's sizes.
"""

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.ar.torch.attention import PagedAttention, span_arrays, spans_of
from engines.ar.torch.rows import PackedWork, Size, flat_index, most_sequences, rows_in
from engines.models.decoder import CausalModel
from engines.policies.views import Bucket
from engines.runtime.device import PoolTensors, Staging
from engines.runtime.graphs import Graphs, Recorder
from engines.runtime.rows import BlockTables, Ints


class CaptureCost(NamedTuple):
    seconds: float
    num_bytes: int
    """Device memory that was reserved for it; 0 where it fits into what larger graphs left, or without a device."""


class CausalGraphs(Graphs[Size]):
    def __init__(
        self,
        model: CausalModel,
        attention: PagedAttention,
        tables: BlockTables,
        pool: PoolTensors,
        tokens: Tensor,
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """``tokens`` [slots + 1, width] is the executor's store."""
        super().__init__(recorder, staging, tokens.device)
        self._model, self._attention, self._tables, self._pool = model, attention, tables, pool
        self._tokens = tokens
        self._costs: dict[Size, CaptureCost] = {}

    @property
    def costs(self) -> Mapping[Size, CaptureCost]:
        return self._costs

    def capture(self, size: Size) -> None:
        if size in self:
            return
        device = self._tokens.device
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        began = perf_counter()
        self.record(size, self._metadata(size, PackedWork.of([])), partial(self._forward, size))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_reserved(device) - before
        self._costs[size] = CaptureCost(perf_counter() - began, before)

    def run(self, size: Size, work: PackedWork) -> Tensor:
        """[sequences of the size, V] logits, those of ``work`` first; overwritten by the next step of this size."""
        return self.replay(size, self._metadata(size, work))

    def _metadata(self, size: Size, work: PackedWork) -> tuple[Ints, ...]:
        n = most_sequences(size)
        rows = rows_in(size, work, self._tables, sequences=n)
        members = rows.members
        last = np.zeros(n, dtype=np.int64)
        last[: work.size] = rows.last
        return (
            rows.position,
            flat_index(rows, self._tokens.shape[1]),
            rows.pool_row,
            last,
            *span_arrays(members.tokens, members.end, self._tables.table[members.slot]),
        )

    def _forward(self, size: Size, numbers: Tensor) -> Tensor:
        n = most_sequences(size)
        # As ``_metadata`` has them.
        lengths = [size.tokens] * 3 + [n, n + 1, n + 1, n, n * self._tables.table.shape[1]]
        position, flat, pool_row, last, *spans = numbers.split(lengths)
        spans[-1] = spans[-1].view(n, -1)
        max_q = size.length if isinstance(size, Bucket) else max(size.tokens, 2)
        max_k = self._tables.max_len + (size.length if isinstance(size, Bucket) else 0)
        attend = self._attention.over(spans_of(spans, max_q=max_q, max_k=max_k), pool_row, self._pool)
        hidden = self._model.hidden(self._tokens.take(flat), self._model.rotary(position), attend)
        return self._model.logits(hidden.index_select(0, last))
