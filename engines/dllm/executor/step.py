"""What the parts of the torch executor hand each other in one step.

Shapes: n requests, those in a Refresh first; N packed rows; B the longest active block.

Select-and-pack (dLLM-Serve §4.5): the retained rows of building requests go densely into the KV pool; the index
map ends here. Two executions of one rule: torch operators, and Triton kernels that store no index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.attention import Run, Spans
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduced, Sampling
from engines.dllm.executor.rows import BuildRows, ItemTable, PackedRows
from engines.dllm.plan import PlanItem, StepPlan
from engines.kernels.pack import Building
from engines.kernels.scores import ContextRows, attended, importance
from engines.models.protocol import Attend, Ranks, Rotary
from engines.runtime.rows import Ints, ranks

Pack = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(pool_k, pool_v [rows, Hkv, D] of a layer, rotated q [N, H, D], k and v [N, Hkv, D] of the packed rows)"""


class SelectAndPack(Protocol):
    def arrays(self, build: BuildRows) -> Sequence[Ints]:
        """What a step's packing needs on the device."""

    def pack(self, build: BuildRows, sent: Sequence[Tensor]) -> Pack:
        """For the layers of one step, from the arrays on the device."""


class TorchSelectAndPack:
    """The reference, and the CPU's."""

    def __init__(self, config: EngineConfig, ranks: Ranks | None) -> None:
        self.sparsity, self.is_parity = config.sparsity, config.tie_policy == "parity"
        self.ranks = ranks

    def arrays(self, build: BuildRows) -> Sequence[Ints]:
        """Rows of block and context padded to the longest, of every entry its request, rank, context row kept in order,
        and row of the pool; then which rows of blocks and of contexts are theirs, where not all are."""
        (block, is_block), (context, is_context) = build.block(), build.context()
        flags = [inside.astype(np.int64) for inside in (is_block, is_context) if not inside.all()]
        request = np.arange(len(build.kept)).repeat(build.kept)
        rank = ranks(build.kept)
        pool_row = build.kv_start.repeat(build.kept) + rank
        return block, context, request, rank, context[request, rank], pool_row, *flags

    def pack(self, build: BuildRows, sent: Sequence[Tensor]) -> Pack:
        flags = iter(sent[6:])
        is_block, is_context = (
            next(flags) != 0 if length.min() < length.max() else None for length in (build.block_len, build.num_context)
        )
        rows = ContextRows(block_rows=sent[0], block_valid=is_block, context_rows=sent[1], context_valid=is_context)
        write = _Write(rows, *sent[2:6])
        kept, num_context, block_len = build.kept.tolist(), build.num_context.tolist(), build.block_len.tolist()
        selection, pool_kernel = self.sparsity.selection, self.sparsity.pool_kernel

        def pack(pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
            if selection == "dense":
                pool_k.index_copy_(0, write.pool_row, k[write.in_order])
                pool_v.index_copy_(0, write.pool_row, v[write.in_order])
                return
            if selection == "attended":
                score = attended(q, k, write.rows, block_len, num_context, pool_kernel, self.ranks)
            else:
                score = importance(q, k, write.rows, selection, pool_kernel, self.ranks)
            chosen = top_rows_parity(score, kept, num_context) if self.is_parity else top_rows(score, max(kept))
            index = chosen[write.request, :, write.rank]
            source = write.rows.context_rows[write.request.unsqueeze(1), index]
            if source.shape[1] == 1:  # one set for all heads
                source = source.squeeze(1)
                pool_k.index_copy_(0, write.pool_row, k.index_select(0, source))
                pool_v.index_copy_(0, write.pool_row, v.index_select(0, source))
                return
            # Row j of head h is head h's own j-th token.
            head = torch.arange(k.shape[1], device=k.device).unsqueeze(0)
            pool_k.index_copy_(0, write.pool_row, k[source, head])
            pool_v.index_copy_(0, write.pool_row, v[source, head])

        return pack


class _Write(NamedTuple):
    rows: ContextRows
    request: Tensor
    rank: Tensor
    in_order: Tensor
    pool_row: Tensor


class TritonSelectAndPack:
    """Scores and packing are a launch each, from a few numbers per request."""

    def __init__(self, config: EngineConfig) -> None:
        self.sparsity = config.sparsity

    def arrays(self, build: BuildRows) -> Sequence[Ints]:
        return (np.stack([getattr(build, name) for name in Building._fields]),)

    def pack(self, build: BuildRows, sent: Sequence[Tensor]) -> Pack:
        from engines.kernels.pack import pack as pack_rows
        from engines.kernels.scores import scores

        selection, kernel = self.sparsity.selection, self.sparsity.pool_kernel
        assert selection != "attended", "no kernel scores attention probabilities"
        building = Building.of(sent[0])
        max_block, max_context = int(build.block_len.max()), int(build.num_context.max())
        max_kept = int(build.kept.max())

        def pack(pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
            chosen = None
            if selection != "dense":
                chosen = top_rows(scores(q, k, building, selection, kernel, max_block, max_context), max_kept)
            pack_rows(pool_k, pool_v, k, v, building, chosen, max_kept)

        return pack


def top_rows(score: Tensor, num_kept: int) -> Tensor:
    """[n, heads, num_kept] context indices, most important first, ties to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :num_kept]


def top_rows_parity(score: Tensor, kept: list[int], num_context: list[int]) -> Tensor:
    """As ``top_rows`` by ``torch.topk`` on each request's own [1, N] list: the library's order of
    ties, which is what the published samplers get. For comparisons only."""
    width = max(kept)
    chosen = score.new_zeros((score.shape[0], score.shape[1], width), dtype=torch.int64)
    for i, (count, length) in enumerate(zip(kept, num_context, strict=True)):
        for head in range(score.shape[1]):
            chosen[i, head, :count] = torch.topk(
                score[i, head : head + 1, :length].contiguous(), count, dim=-1
            ).indices[0]
    return chosen


class StepRows(NamedTuple):
    """N packed rows on the device, the first ``num_refresh_rows`` of Refresh requests."""

    num_rows: int
    num_refresh_rows: int
    position: Tensor
    flat: Tensor
    """Index into the flattened token store."""
    pool_row: Tensor
    refresh_runs: list[Run]
    reuse_q_runs: list[Run]
    reuse_k_runs: list[Run]
    spans: tuple[Spans, Spans] | None
    """The same runs on the device, of Refresh and of Reuse requests; None where attention reads the host's."""
    pack: Pack | None
    """Where some requests build their cache."""
    selecting: StepRows | None = None
    """The same rows with the runs of keys of layers that select, where one keeps every row; None where all layers are alike."""


class BlockPlaces(NamedTuple):
    """[n, B] places of the active blocks on the device: position, packed row, index into the token store."""

    positions: Tensor
    packed: Tensor
    flat: Tensor
    padding: Tensor | None
    """Places past the end of a block shorter than the longest; None where all are equally long."""
    slot: Tensor
    """[n] of the requests."""
    step: Tensor | None = None
    """[n, 1] of the requests in their blocks; None where no row settles."""


class Fresh(NamedTuple):
    """Rows of the blocks that a step computes where others have settled: the last M of the packed rows."""

    position: Tensor
    """[M]; so the next two."""
    flat: Tensor
    pool_row: Tensor
    packed: Tensor
    """[n, B] as ``BlockPlaces.packed``, of all requests of the step; of a settled place any row."""

    def write(self, num_rows: int, position: Tensor, flat: Tensor, pool_row: Tensor, num_refresh_rows: int) -> None:
        """Into the rows of a step of so many, of which ``pool_row`` lacks those of Refresh requests."""
        first = num_rows - len(self.position)
        position[first:num_rows] = self.position
        flat[first:num_rows] = self.flat
        pool_row[first - num_refresh_rows : num_rows - num_refresh_rows] = self.pool_row


class Candidates(NamedTuple):
    """``size`` places that get logits: index into a flattened [n, B] grid, packed row, item of the step; padded to
    MIN_ROWS with repetitions of one."""

    size: int
    cell: Tensor
    row: Tensor
    item: Ints
    is_every_row: bool = False
    """Whether they are all of the packed rows, in order."""


class EagerRows(NamedTuple):
    """What a forward launched operator by operator runs on."""

    rows: StepRows
    rotary: Rotary
    attend: Attend


class GraphKey(NamedTuple):
    """The size of a captured graph."""

    rows: int
    sequences: int
    max_q: int
    has_refresh: bool
    """Full forwards among the rows, in front of those of Reuse requests."""

    def holds(self, other: GraphKey) -> bool:
        sizes = zip(self[:3], other[:3], strict=True)
        return self.has_refresh == other.has_refresh and all(size >= wanted for size, wanted in sizes)


class GraphRows(NamedTuple):
    """What a captured graph is replayed on."""

    key: GraphKey
    table: ItemTable
    packed: PackedRows
    fresh: Fresh | None = None


class StepLayout(NamedTuple):
    """What of a step follows from the rows it computes, whatever they hold: the steps of a block share it."""

    num_rows: int
    rows: EagerRows | GraphRows | None
    """None where the forward keeps its own."""
    block: BlockPlaces
    every: Candidates | None
    """All places of the blocks, where committed ones get logits too."""


class BlockTokens(NamedTuple):
    """[n, B] the active blocks as a step finds them."""

    ids: Tensor
    fixed: Tensor
    """Places that hold a token already, or belong to no position."""


class Guidance(NamedTuple):
    """Classifier-free guidance of one step, by packed row; scale 0 leaves a row as it is."""

    hidden: Tensor
    scale: Tensor


class Forwarded(NamedTuple):
    hidden: Tensor
    """[N, d] final-norm states, the step's rows first."""
    guidance: Guidance | None
    query_rows: int
    """Rows that were computed, padding of the system included."""


class Forward(Protocol):
    """The model's layers over a step's rows."""

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded: ...

    def rest(self) -> None:
        """No request is left: what was kept between steps may go."""


class AttendFactory(Protocol):
    """Attention of the layers of one step."""

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend: ...


class Head(Protocol):
    """The output head: hidden states to a token and a confidence per candidate."""

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        """[at least candidates.size] each."""

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        """Rows projected onto the vocabulary in a step of ``num_rows`` with ``wanted`` candidates."""
