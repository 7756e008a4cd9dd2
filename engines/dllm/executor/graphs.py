"""CUDA graphs of a step's forward, captured beforehand for a few sizes.

For a step of few rows, a GPU takes less time than the host takes to launch its kernels one by one. We then replay its forward
(``engines.runtime.graphs``). Steps that build a cache are not captured: the rows they retain shape their work. Steps of more than MAX_ROWS
rows run longer than their launches take, and run eagerly.

Shapes: N rows and S sequences of a graph. The part that a step does not fill is padding, in a slot and a pool row that no request owns.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import SpanMetadata, Spans, VarlenAttention
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import (
    EagerRows,
    Forwarded,
    Fresh,
    GraphKey,
    GraphRows,
    Guidance,
    ItemTable,
    PackedRows,
    StepLayout,
)
from engines.dllm.plan import PlanItem, StepPlan
from engines.models.protocol import DiffusionModel
from engines.runtime.device import PoolTensors, Staging, Store
from engines.runtime.graphs import Graphs, Recorder

ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MAX_ROWS = ROWS[-1]
_MIXED_SEQUENCES = 16
_QUERY_TILE = 128
"""Query rows of a flash kernel's block: all bounds on the longest window up to this cost the same."""


class GraphForward:
    """The captured part of a step: the model over rows whose metadata lies in the graph's own buffer."""

    def __init__(
        self, model: DiffusionModel, attention: VarlenAttention, store: Store, tokens: Tensor, pool: PoolTensors
    ) -> None:
        self._model, self._attention, self._store = model, attention, store
        self.tokens, self.pool = tokens, pool

    def __call__(self, key: GraphKey, numbers: Tensor) -> Tensor:
        sizes = _sizes(key)
        position, flat, pool_row = numbers.split(sizes)[:3]
        spans = numbers[sum(sizes[:3]) :].to(torch.int32).split(sizes[3:])
        max_len = self.tokens.shape[1] - 1
        reuse = Spans(
            cu_q=spans[3],
            k_start=spans[4],
            k_len=spans[5],
            max_q=max(key.max_q, key.rows * key.has_refresh),
            max_k=max_len,
        )
        refresh = Spans(cu_q=spans[0], k_start=spans[1], k_len=spans[2], max_q=key.max_q, max_k=max_len)
        if key.has_refresh:
            row = torch.arange(key.rows, dtype=torch.int32, device=numbers.device)
            is_refresh = (row < refresh.cu_q[-1])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool_k, pool_v = self.pool.k[layer], self.pool.v[layer]
            self._store(pool_k, pool_v, pool_row, k, v)
            out = self._attention(q, pool_k, pool_v, reuse)
            return torch.where(is_refresh, self._attention(q, k, v, refresh), out) if key.has_refresh else out

        return self._model.hidden(self.tokens.take(flat), self._model.rotary(position), attend)


class StepGraphs(Graphs[GraphKey]):
    """The captured graphs. The last slot of the tokens [slots + 1, width] and the last row of the pool are for padding."""

    def __init__(self, forward: GraphForward, staging: Staging, recorder: Recorder) -> None:
        super().__init__(recorder, staging, forward.tokens.device)
        self._forward = forward

    def key_of(self, table: ItemTable, packed: PackedRows) -> GraphKey | None:
        """Return the key of the smallest captured graph that holds such a step, which builds no cache; None if there is none."""
        if packed.num_rows > MAX_ROWS:
            return None
        longest = int(np.diff(packed.base).max())
        needed = graph_key(packed.num_rows, len(table.slot), longest, has_refresh=table.num_refresh > 0)
        return min((key for key in self.keys if key.holds(needed)), default=None)

    def capture(self, key: GraphKey) -> None:
        if key in self:
            return
        no_items = ItemTable.of((), ())
        metadata = self._metadata(key, no_items, PackedRows.of(no_items, None, width=1, least=0))
        self.record(key, metadata, partial(self._forward, key))

    def run(self, key: GraphKey, table: ItemTable, packed: PackedRows, fresh: Fresh | None = None) -> Tensor:
        """Replay; return [N, d] hidden states, the step's rows first, which the next step of this size overwrites."""

        def amend(numbers: Tensor) -> None:
            if fresh is not None:
                position, flat, pool_row = numbers[: 3 * key.rows].view(3, key.rows)
                fresh.write(packed.num_rows, position, flat, pool_row, 0)

        return self.replay(key, self._metadata(key, table, packed), amend)

    def _metadata(self, key: GraphKey, table: ItemTable, packed: PackedRows) -> tuple[np.ndarray, ...]:
        """The step's metadata, padded to the graph's sizes."""
        slots, width = self._forward.tokens.shape
        padding_row = self._forward.pool.num_rows - 1
        m, num_refresh_rows, n = table.num_refresh, packed.num_refresh_rows, packed.num_rows
        position, flat, pool_row = np.zeros((3, key.rows), dtype=np.int64)
        position[:n], flat[:n] = packed.position[:n], packed.flat[:n]
        flat[n:] = (slots - 1) * width
        pool_row[:] = padding_row
        pool_row[num_refresh_rows:n] = packed.pool_row
        lengths = np.diff(packed.base)
        refresh = SpanMetadata.of_lengths(lengths[:m], size=key.sequences)
        # The first Reuse sequence stands for the rows of the Refresh sequences, whose attention comes after.
        reuse = SpanMetadata.of_lengths(
            np.append(num_refresh_rows, lengths[m:]),
            np.append(padding_row, table.kv_start[m:]),
            np.append(int(num_refresh_rows > 0), packed.key_len),
            size=key.sequences + 1,
        )
        return position, flat, pool_row, *refresh, *reuse


def metadata_size(key: GraphKey) -> int:
    """How many numbers a graph's buffer holds."""
    return sum(_sizes(key))


def _sizes(key: GraphKey) -> list[int]:
    """Lengths of position, flat and pool_row, then of the spans of Refresh sequences and of Reuse ones."""
    n = key.sequences
    return [key.rows] * 3 + [n + 1, n + 1, n, n + 2, n + 2, n + 1]


def graph_key(rows: int, sequences: int, longest: int, *, has_refresh: bool) -> GraphKey:
    """Return the smallest key that holds ``rows`` <= MAX_ROWS of ``sequences``, each with at most ``longest`` rows."""
    return GraphKey(
        rows=ROWS[bisect_left(ROWS, rows)],
        sequences=1 << (sequences - 1).bit_length(),
        max_q=-(-longest // _QUERY_TILE) * _QUERY_TILE,
        has_refresh=has_refresh,
    )


def mixed_keys(max_num_seqs: int) -> Iterator[GraphKey]:
    """Keys of steps that compute some requests in full and build no cache. One size of sequences and windows per number of rows is enough:
    empty blocks of a launch cost little beside a full forward."""
    for rows in ROWS:
        yield graph_key(rows, min(max_num_seqs, _MIXED_SEQUENCES), min(rows, MAX_ROWS), has_refresh=True)


def reuse_keys(max_num_seqs: int, block_length: int, *, settles: bool = False) -> Iterator[GraphKey]:
    """Keys of steps in which up to ``max_num_seqs`` requests reuse their caches. Each has a block of ``block_length`` rows, or any part of
    one if rows settle."""
    for sequences in range(1, max_num_seqs + 1):
        if sequences * block_length > MAX_ROWS:
            return
        if settles:
            for rows in ROWS[: bisect_left(ROWS, sequences * block_length)]:
                if rows >= sequences:
                    yield graph_key(rows, sequences, block_length, has_refresh=False)
        yield graph_key(sequences * block_length, sequences, block_length, has_refresh=False)


class PackedForward:
    """One packed forward, as a captured graph or operator by operator, and the second one that guidance needs."""

    def __init__(
        self, model: DiffusionModel, state: RequestState, staging: Staging, graphs: StepGraphs | None = None
    ) -> None:
        self._model, self._state, self._staging = model, state, staging
        self._graphs = graphs

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded:
        if isinstance(layout.rows, GraphRows):
            assert self._graphs is not None
            return Forwarded(self._graphs.run(*layout.rows), None, layout.num_rows)
        assert layout.rows is not None
        ids = self._state.tokens.take(layout.rows.rows.flat)
        hidden = self._model.hidden(ids, layout.rows.rotary, layout.rows.attend)
        guidance = self._unconditional(items, layout.rows, ids) if self._state.guided else None
        return Forwarded(hidden, guidance, layout.num_rows)

    def rest(self) -> None:
        return

    def _unconditional(self, items: Sequence[PlanItem], eager: EagerRows, ids: Tensor) -> Guidance:
        """Hidden states of a second forward with the prompts masked (classifier-free guidance)."""
        rows = eager.rows
        requests = [self._state.request(item) for item in items]
        lengths = [end - start for start, end in (*rows.refresh_runs, *rows.reuse_q_runs)]
        pad = (0, len(ids) - sum(lengths))
        prompt_len = np.pad(np.repeat([request.prompt_len for request in requests], lengths), pad)
        scale = np.pad(np.repeat([request.generation.cfg_scale for request in requests], lengths), pad)
        masked = torch.where(rows.position < self._staging.ints(prompt_len), self._model.config.mask_token_id, ids)
        hidden = self._model.hidden(masked, eager.rotary, eager.attend)
        return Guidance(hidden, self._staging.floats(scale).to(hidden.dtype))
