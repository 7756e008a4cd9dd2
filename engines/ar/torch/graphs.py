"""CUDA graphs of a step: the grid of buckets (LAPS §3.1) and a ladder of packed sizes, captured beforehand.

All share one pool of memory and one stream, which is right because they never run at once. A graph holds the layers,
the head on each sequence's newest row, and nothing that depends on a step's sizes: its metadata is copied into a buffer
of its own, padded to the graph's size, and one launch does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.ar.torch.blocks import BlockTables, Ints
from engines.ar.torch.paged import PagedAttention, padded_span_arrays, span_arrays, spans_of
from engines.ar.torch.pool import PagedPool
from engines.ar.torch.rows import StepRows, StepWork, packed_rows, padded_rows
from engines.models.decoder import CausalModel
from engines.policies.step import Bucket, Rung
from engines.runtime.recorder import Recorder, Recording
from engines.runtime.staging import Staging

RUNG_SEQUENCES = 64
"""Sequences a rung holds at most."""

Size = Bucket | Rung


class CaptureCost(NamedTuple):
    seconds: float
    num_bytes: int
    """Device memory that was reserved for it; 0 where it fits into what larger graphs left, or without a device."""


class StepGraphs:
    def __init__(
        self,
        model: CausalModel,
        attention: PagedAttention,
        tables: BlockTables,
        pool: PagedPool,
        tokens: Tensor,
        staging: Staging,
        recorder: Recorder,
    ) -> None:
        """``tokens`` [slots + 1, width] is the executor's store."""
        self._model, self._attention, self._tables, self._pool = model, attention, tables, pool
        self._tokens, self._staging, self._recorder = tokens, staging, recorder
        self._graphs: dict[Size, tuple[Tensor, Recording]] = {}
        self._costs: dict[Size, CaptureCost] = {}

    def __contains__(self, size: object) -> bool:
        return size in self._graphs

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(self._graphs)

    @property
    def costs(self) -> Mapping[Size, CaptureCost]:
        return self._costs

    def capture(self, size: Size) -> None:
        """Its memory and the compilation of its kernels are paid for here, not in a step."""
        if size in self._graphs:
            return
        device = self._tokens.device
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        began = perf_counter()
        numbers = torch.zeros(sum(self._lengths(size)), dtype=torch.int64, device=device)
        nothing = StepWork.of([])
        self._staging.fill(numbers, self._metadata(size, nothing, self._rows(size, nothing)))
        self._graphs[size] = numbers, self._recorder.record(partial(self._forward, size, numbers))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_reserved(device) - before
        self._costs[size] = CaptureCost(perf_counter() - began, before)

    def run(self, size: Size, work: StepWork) -> Tensor:
        """[sequences of the size, V] logits, those of ``work`` first; overwritten by the next step of this size."""
        numbers, recording = self._graphs[size]
        self._staging.fill(numbers, self._metadata(size, work, self._rows(size, work)))
        return recording.replay()

    def close(self) -> None:
        """Release every graph."""
        while self._graphs:
            _, (_, recording) = self._graphs.popitem()
            recording.release()

    def _rows(self, size: Size, work: StepWork) -> StepRows:
        if isinstance(size, Bucket):
            return padded_rows(work, self._tables, size.length, size.batch)
        return packed_rows(work, self._tables, least=size.tokens)

    def _lengths(self, size: Size) -> list[int]:
        """Of position, flat and pool_row, of last, and of cu_q, cu_k, used_k and table."""
        n = sequences(size)
        return [size.tokens] * 3 + [n, n + 1, n + 1, n, n * self._tables.table.shape[1]]

    def _metadata(self, size: Size, work: StepWork, rows: StepRows) -> tuple[Ints, ...]:
        n = sequences(size)
        last = np.zeros(n, dtype=np.int64)
        last[: work.size] = rows.last
        flat = flat_index(rows, self._tokens.shape[1])
        if isinstance(size, Bucket):
            spans = padded_span_arrays(work, self._tables, size.length, size.batch)
        else:
            empty = np.zeros(n - work.size, dtype=np.int64)
            slot = np.concatenate((work.slot, np.full_like(empty, self._tables.padding_slot)))
            spans = span_arrays(
                np.concatenate((work.tokens, empty)), np.concatenate((work.end, empty)), self._tables.table[slot]
            )
        return rows.position, flat, rows.pool_row, last, *spans

    def _forward(self, size: Size, numbers: Tensor) -> Tensor:
        position, flat, pool_row, last, *spans = numbers.split(self._lengths(size))
        spans[-1] = spans[-1].view(sequences(size), -1)
        max_q = size.length if isinstance(size, Bucket) else max(size.tokens, 2)
        max_k = self._tables.max_len + (size.length if isinstance(size, Bucket) else 0)
        attend = self._attention.over(spans_of(spans, max_q=max_q, max_k=max_k), pool_row, self._pool)
        hidden = self._model.hidden(self._tokens.take(flat), self._model.rotary(position), attend)
        return self._model.logits(hidden.index_select(0, last))


def sequences(size: Size) -> int:
    return size.batch if isinstance(size, Bucket) else min(size.tokens, RUNG_SEQUENCES)


def flat_index(rows: StepRows, width: int) -> Ints:
    """Places in the flattened token store; past its end, a row's last column, which is no token's."""
    return rows.slot * width + np.minimum(rows.position, width - 1)
