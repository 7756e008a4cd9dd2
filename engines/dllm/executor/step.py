"""The data that the parts of the torch executor hand to each other in one step.

Shapes: n requests or plan items, those in a Refresh first; N packed rows; B the longest active block. Row indices are int64. Plain arrays
over the items, built once per step, say where its packed rows lie.

Select-and-pack (dLLM-Serve §4.5) packs the retained rows of building requests densely into the KV pool; nothing keeps the index map. There
are two implementations of one rule: torch operators, and Triton kernels that store no index.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.attention.backends import Run, Spans
from engines.dllm.config import EngineConfig, Phase, SparsityConfig
from engines.dllm.denoise import Reduced, Sampling
from engines.dllm.plan import Chosen, PlanItem, StepPlan
from engines.dllm.rows import array_of
from engines.kernels.pack import Building
from engines.kernels.scores import ContextRows, attention_importance, importance
from engines.models.protocol import Attend, Ranks, Rotary
from engines.runtime.device import store_by_index
from engines.runtime.rows import Ints, ranks

_FIRST, _END = PlanItem._fields.index("total_len"), PlanItem._fields.index("suffix")


@dataclass(frozen=True, kw_only=True)
class ItemTable:
    """The items of a step as columns [n]."""

    slot: Ints
    num_refresh: int
    total_len: Ints
    block_start: Ints
    block_end: Ints
    window_end: Ints
    masks_left: Ints
    kept: Ints
    kv_start: Ints
    step_in_block: Ints
    first: Ints
    """Position of each item's first row, if none has settled."""
    num_rows: Ints
    """Query tokens of each item."""
    settled_before: Ints
    num_settling: int = 0
    """How many items leave out settled rows. They come last; only the device knows which rows those are."""
    suffixes: Sequence[bytes] = ()
    """The suffix of each item, if some item has one."""
    chosen: Sequence[Chosen] = ()
    """The chosen rows of each item, if a rule chooses rows."""

    @staticmethod
    def of(items: Sequence[PlanItem], slots: Sequence[int]) -> "ItemTable":
        """Make the table of ``items``, those in a Refresh first and those with settled rows last."""
        numbers = np.array([item[_FIRST:_END] for item in items], dtype=np.int64)
        columns = numbers.reshape(-1, _END - _FIRST).T
        total_len, block_start, block_end, window_end, _, masks_left, kept, kv_start, step, _, *left_out = columns
        first, settled, settled_before = left_out
        num_refresh = sum([item.phase.is_refresh for item in items])
        is_reuse = np.arange(len(items)) >= num_refresh
        if first.any():  # a PARTIAL computes its rows to the end
            is_reuse &= first == 0
        first = np.where(is_reuse, block_start, first)
        num_rows = np.where(is_reuse, window_end, total_len) - first - settled
        chosen = [item.chosen for item in items] if items and items[0].chosen.rows else []
        return ItemTable(
            slot=np.array(slots, dtype=np.int64),
            num_refresh=num_refresh,
            total_len=total_len,
            block_start=block_start,
            block_end=block_end,
            window_end=window_end,
            masks_left=masks_left,
            kept=kept,
            kv_start=kv_start,
            step_in_block=step,
            first=first,
            num_rows=np.array([choice.num_rows for choice in chosen]) if chosen else num_rows,
            settled_before=settled_before,
            num_settling=int(np.count_nonzero(settled)),
            suffixes=[item.suffix for item in items] if any(item.suffix for item in items) else (),
            chosen=chosen,
        )

    def keys(self) -> tuple[Ints, Ints, Ints | None]:
        """Return where each item's keys begin in the pool and how many there are, unless it is a Refresh. If some item attends to only some
        of its keys, also return the pool rows to gather; the starts then refer to these."""
        if not any(choice.keys for choice in self.chosen):
            return self.kv_start, self.kept + self.window_end - self.block_start, None
        pairs = zip(self.chosen, self.total_len, strict=True)
        places = [array_of(choice.keys) if choice.keys else np.arange(length) for choice, length in pairs]
        counts = np.array([len(part) for part in places])
        rows = np.concatenate([part + start for part, start in zip(places, self.kv_start, strict=True)])
        return np.cumsum(counts) - counts, counts, rows

    def selecting(self, sparsity: SparsityConfig) -> "ItemTable":
        """Return the table for the layers that select while one keeps every row. Their retained rows end where that layer's do, right
        before the block, whose rows are the same in all layers."""
        kept = np.array([sparsity.selected_rows(outside) for outside in self.kept.tolist()], dtype=np.int64)
        return replace(self, kept=kept, kv_start=self.kv_start + self.kept - kept)

    def pool_rows(self, item: int, position: Ints) -> Ints:
        """Return the pool rows of an item's positions, if it keeps every row of its context: prefix, suffix, window."""
        start, end, kv_start = self.block_start[item], self.window_end[item], self.kv_start[item]
        offset = np.where(position < start, position, self.kept[item] + position - start)
        return kv_start + np.where(position < end, offset, position - (end - start))


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The packed rows of a step, and the keys they attend to."""

    num_rows: int
    num_refresh_rows: int
    base: Ints
    """[n + 1] first packed row of every item, and the end of the last."""
    position: Ints
    """[max(N, least)]; rows past N repeat token 0 of slot 0."""
    flat: Ints
    """[max(N, least)] index into the token store, ``width`` columns a slot."""
    pool_row: Ints
    """[N - num_refresh_rows] where a Reuse row's K and V go: right behind the retained rows. If rows have settled, the entries of other
    rows of the block stand here, in ``position`` and in ``flat``. The device later says which are computed (``FreshRows``)."""
    key_len: Ints
    """[n - num_refresh] how many rows of the pool each Reuse attends to, from its ``kv_start``."""

    @staticmethod
    def of(table: ItemTable, lengths: Ints | None, *, width: int, least: int) -> "PackedRows":
        """``lengths`` holds the number of packed rows of each item; None packs query tokens without padding."""
        num_refresh, first = table.num_refresh, table.first
        lengths = table.num_rows if lengths is None else lengths
        base = np.zeros(len(lengths) + 1, dtype=np.int64)
        lengths.cumsum(out=base[1:])
        num_rows, num_refresh_rows = int(base[-1]), int(base[num_refresh])
        rows = np.arange(num_rows)
        packed = np.zeros((2, max(num_rows, least)), dtype=np.int64)
        position = packed[0, :num_rows]
        if table.chosen:  # K and V of a position lie at its place
            np.concatenate([array_of(choice.rows) for choice in table.chosen], out=position)
            pool_row = position + table.kv_start.repeat(lengths)
        else:
            np.add(rows, (first - base[:-1]).repeat(lengths), out=position)
            pool_start = table.kv_start[num_refresh:] + table.kept[num_refresh:]
            pool_row = rows[num_refresh_rows:] + (pool_start - base[num_refresh:-1]).repeat(lengths[num_refresh:])
            is_partial = table.num_rows > table.window_end - table.block_start
            for item in (np.flatnonzero(is_partial[num_refresh:]) + num_refresh).tolist():
                span = slice(base[item] - num_refresh_rows, base[item + 1] - num_refresh_rows)
                pool_row[span] = table.pool_rows(item, position[base[item] : base[item + 1]])
        for item, suffix in enumerate(table.suffixes):
            positions = position[base[item] : base[item + 1]]
            behind_block = positions - table.block_end[item]
            if suffix and (is_behind := behind_block >= 0).any():
                positions[is_behind] = array_of(suffix)[behind_block[is_behind]]
        np.add(position, (table.slot * width).repeat(lengths), out=packed[1, :num_rows])
        return PackedRows(
            num_rows=num_rows,
            num_refresh_rows=num_refresh_rows,
            base=base,
            position=packed[0],
            flat=packed[1],
            pool_row=pool_row,
            key_len=table.keys()[1][num_refresh:],
        )


@dataclass(frozen=True, kw_only=True)
class BlockRows:
    """The places [n, B] of the active blocks: position, packed row, index into the token store."""

    position: Ints
    packed: Ints
    flat: Ints
    inside: NDArray[np.bool_] | None
    """False past the end of a block shorter than the longest; None if all are equally long."""

    @staticmethod
    def of(table: ItemTable, base: Ints, *, width: int, shifts_logits: bool) -> "BlockRows":
        """Places past a block's end have position ``width - 1``, which is no token's. If logits are shifted, row i predicts token i + 1;
        the first forwarded row predicts its own."""
        start = table.block_start[:, None]
        length = table.block_end - table.block_start
        offset = np.arange(length.max())
        position = start + offset
        if table.chosen:
            return BlockRows._of_chosen(table, base, position, width=width, shift=int(shifts_logits))
        in_run = position - table.first[:, None]
        if shifts_logits:
            in_run = np.maximum(in_run - 1, 0)
        inside = None
        if length.min() < len(offset):
            inside = offset < length[:, None]
            position = np.where(inside, position, width - 1)
            in_run = np.where(inside, in_run, 0)
        return BlockRows(
            position=position,
            packed=base[:-1, None] + in_run,
            flat=table.slot[:, None] * width + position,
            inside=inside,
        )

    @staticmethod
    def _of_chosen(table: ItemTable, base: Ints, position: Ints, *, width: int, shift: int) -> "BlockRows":
        """Only the places that get logits are inside; the row that predicts each is among the item's rows."""
        packed, inside = np.repeat(base[:-1, None], position.shape[1], axis=1), np.zeros(position.shape, dtype=np.bool_)
        for item, choice in enumerate(table.chosen):
            places = array_of(choice.places)
            offset = places - table.block_start[item]
            packed[item, offset] += np.searchsorted(array_of(choice.rows), places - shift)
            inside[item, offset] = True
        is_real = position < table.block_end[:, None]
        position = np.where(is_real, position, width - 1)
        return BlockRows(position=position, packed=packed, flat=table.slot[:, None] * width + position, inside=inside)


@dataclass(frozen=True, kw_only=True)
class Places:
    """The first ``counts`` places of each block, one block after the other."""

    size: int
    request: Ints
    rank: Ints
    """Both [max(size, least)]; entries past ``size`` repeat place 0 of block 0."""

    @staticmethod
    def of(counts: Ints, *, least: int) -> "Places":
        size = int(counts.sum())
        index = np.zeros((2, max(size, least)), dtype=np.int64)
        index[0, :size] = np.arange(len(counts)).repeat(counts)
        index[1, :size] = ranks(counts)
        return Places(size=size, request=index[0], rank=index[1])


@dataclass(frozen=True, kw_only=True)
class BuildRows:
    """The requests [m] of a step that build their cache."""

    run_start: Ints
    """Packed row of position 0."""
    block_start: Ints
    block_len: Ints
    window_len: Ints
    num_context: Ints
    """Number of positions outside the window: the prefix, then the suffix past the window."""
    kept: Ints
    kv_start: Ints

    @staticmethod
    def of(table: ItemTable, items: Sequence[PlanItem], base: Ints) -> "BuildRows | None":
        building = [i for i, item in enumerate(items[: table.num_refresh]) if item.phase is Phase.BUILD]
        if not building:
            return None
        window_len = (table.window_end - table.block_start)[building]
        return BuildRows(
            run_start=base[building],
            block_start=table.block_start[building],
            block_len=(table.block_end - table.block_start)[building],
            window_len=window_len,
            num_context=table.total_len[building] - window_len,
            kept=table.kept[building],
            kv_start=table.kv_start[building],
        )

    def kept_blocks(self) -> tuple[Ints, Ints]:
        """Packed rows of the blocks, one after the other, and their pool rows, behind the retained ones."""
        rank = ranks(self.block_len)
        source = (self.run_start + self.block_start).repeat(self.block_len) + rank
        return source, (self.kv_start + self.kept).repeat(self.block_len) + rank

    def block(self) -> tuple[Ints, NDArray[np.bool_]]:
        """[m, B] packed rows of the blocks, and which of these belong to the block."""
        b = np.arange(self.block_len.max())
        inside = b < self.block_len[:, None]
        return self.run_start[:, None] + np.where(inside, self.block_start[:, None] + b, 0), inside

    def context(self) -> tuple[Ints, NDArray[np.bool_]]:
        """[m, C] packed rows of the contexts, and which of these belong to the context."""
        j = np.arange(self.num_context.max())
        inside = j < self.num_context[:, None]
        position = np.where(j < self.block_start[:, None], j, j + self.window_len[:, None])
        return self.run_start[:, None] + np.where(inside, position, 0), inside


class FreshRows(NamedTuple):
    """Data by which the device finds the rows to compute of the last c items of a step: those that have not settled, in order.

    Their packed rows are the step's last; B is the longest active block of the step.
    """

    settled_before: Ints
    """[c, 1]"""
    base: Ints
    """[c, 1] first packed row."""
    behind: Ints
    """[c, 1] pool row of the block's first position."""
    cell: Ints
    """[rows] for each packed row, the place of its item's first position in a flattened [c, B] grid ..."""
    rank: Ints
    """... and that place plus its rank among the fresh rows of its item."""

    @staticmethod
    def of(table: ItemTable, base: Ints) -> "FreshRows | None":
        count = table.num_settling
        if not count:
            return None
        width = int((table.block_end - table.block_start).max())
        counts = table.num_rows[-count:]
        cell = (np.arange(count) * width).repeat(counts)
        return FreshRows(
            settled_before=table.settled_before[-count:, None],
            base=base[-count - 1 : -1, None],
            behind=(table.kv_start + table.kept)[-count:, None],
            cell=cell,
            rank=cell + ranks(counts),
        )


Pack = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Called with pool_k, pool_v [rows, Hkv, D] of a layer, rotated q [N, H, D], k and v [N, Hkv, D] of the packed rows."""


class SelectAndPack(Protocol):
    def arrays(self, build: BuildRows) -> Sequence[Ints]:
        """The arrays that a step's packing needs on the device."""

    def pack(self, build: BuildRows, sent: Sequence[Tensor]) -> Pack:
        """Return the packing for the layers of one step, from the arrays on the device."""


class TorchSelectAndPack:
    """Select-and-pack by torch operators: the reference, and the one for CPUs."""

    def __init__(self, config: EngineConfig, ranks: Ranks | None) -> None:
        self.sparsity, self.is_parity = config.sparsity, config.tie_policy == "parity"
        self.ranks = ranks

    def arrays(self, build: BuildRows) -> Sequence[Ints]:
        """Rows of block and context, padded to the longest. For each retained entry: its request, its rank, the context row of that rank in
        order, and its pool row. Last come flags for rows that are no padding, if there is padding."""
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
        request, rank, in_order, pool_row = sent[2:6]
        kept, num_context, block_len = build.kept.tolist(), build.num_context.tolist(), build.block_len.tolist()
        selection, pool_kernel = self.sparsity.selection, self.sparsity.pool_kernel

        def pack(pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
            if selection == "dense":
                store_by_index(pool_k, pool_v, pool_row, k[in_order], v[in_order])
                return
            if selection == "attended":
                score = attention_importance(q, k, rows, block_len, num_context, pool_kernel, self.ranks)
            else:
                score = importance(q, k, rows, selection, pool_kernel, self.ranks)
            chosen = top_rows_parity(score, kept, num_context) if self.is_parity else top_rows(score, max(kept))
            source = rows.context_rows[request.unsqueeze(1), chosen[request, :, rank]]
            if source.shape[1] == 1:  # one set for all heads
                source = source.squeeze(1)
                store_by_index(pool_k, pool_v, pool_row, k.index_select(0, source), v.index_select(0, source))
                return
            # Row j of head h is head h's own j-th token.
            head = torch.arange(k.shape[1], device=k.device).unsqueeze(0)
            store_by_index(pool_k, pool_v, pool_row, k[source, head], v[source, head])

        return pack


class TritonSelectAndPack:
    """Scores in one launch and packs in another, from a few numbers per request."""

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
    """[n, heads, num_kept] context indices, most important first; ties go to the lower index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :num_kept]


def top_rows_parity(score: Tensor, kept: list[int], num_context: list[int]) -> Tensor:
    """Like ``top_rows``, but by ``torch.topk`` on each request's own [1, N] list. Ties follow the library's order, as in the published
    samplers. For comparisons only."""
    width = max(kept)
    chosen = score.new_zeros((score.shape[0], score.shape[1], width), dtype=torch.int64)
    for i, (count, length) in enumerate(zip(kept, num_context, strict=True)):
        for head in range(score.shape[1]):
            chosen[i, head, :count] = torch.topk(
                score[i, head : head + 1, :length].contiguous(), count, dim=-1
            ).indices[0]
    return chosen


class StepRows(NamedTuple):
    """The N packed rows on the device; the first ``num_refresh_rows`` belong to Refresh requests."""

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
    """The same runs on the device, of Refresh and of Reuse requests; None if attention reads the host's runs."""
    pack: Pack | None
    """Packs retained rows, if some requests build their cache."""
    key_rows: Tensor | None = None
    """Rows of the pool to gather keys from, if they do not lie together."""
    selecting: "StepRows | None" = None
    """The same rows with the key runs of layers that select, if one layer keeps every row; None if all layers are alike."""


class BlockPlaces(NamedTuple):
    """[n, B] places of the active blocks on the device: position, packed row, index into the token store."""

    positions: Tensor
    packed: Tensor
    flat: Tensor
    padding: Tensor | None
    """Places past the end of a block shorter than the longest; None if all are equally long."""
    slot: Tensor
    """[n] the slot of each request."""
    step: Tensor | None = None
    """[n, 1] the step of each request in its block; None if no row settles."""


class Fresh(NamedTuple):
    """The rows that a step computes of blocks in which other rows have settled: the last M of the packed rows."""

    position: Tensor
    """[M], like ``flat`` and ``pool_row``."""
    flat: Tensor
    pool_row: Tensor
    packed: Tensor
    """[n, B] like ``BlockPlaces.packed``, for all requests of the step; a settled place has any row."""

    def write(self, num_rows: int, position: Tensor, flat: Tensor, pool_row: Tensor, num_refresh_rows: int) -> None:
        """Write them into the arrays of a step of ``num_rows`` rows; ``pool_row`` has none for the Refresh rows."""
        first = num_rows - len(self.position)
        position[first:num_rows] = self.position
        flat[first:num_rows] = self.flat
        pool_row[first - num_refresh_rows : num_rows - num_refresh_rows] = self.pool_row


class Candidates(NamedTuple):
    """The ``size`` places that get logits: index into a flattened [n, B] grid, packed row, item of the step. One place is repeated up to
    MIN_ROWS."""

    size: int
    cell: Tensor
    row: Tensor
    item: Ints
    is_every_row: bool = False
    """Whether they are all of the packed rows, in order."""


class EagerRows(NamedTuple):
    """The input of a forward that is launched operator by operator."""

    rows: StepRows
    rotary: Rotary
    attend: Attend


class GraphKey(NamedTuple):
    """The size of a captured graph."""

    rows: int
    sequences: int
    max_q: int
    has_refresh: bool
    """Whether rows of full forwards come before those of Reuse requests."""

    def holds(self, smaller: "GraphKey") -> bool:
        sizes = zip(self[:3], smaller[:3], strict=True)
        return self.has_refresh == smaller.has_refresh and all(size >= wanted for size, wanted in sizes)


class GraphRows(NamedTuple):
    """The input of a captured graph's replay."""

    key: GraphKey
    table: ItemTable
    packed: PackedRows
    fresh: Fresh | None = None


class StepLayout(NamedTuple):
    """The part of a step that depends only on which rows it computes, not on their tokens: the steps of a block share it."""

    num_rows: int
    rows: EagerRows | GraphRows | None
    """None if the forward keeps its own rows."""
    block: BlockPlaces
    every: Candidates | None
    """All places of the blocks, if committed ones get logits too."""


class BlockTokens(NamedTuple):
    """The active blocks [n, B] as a step finds them."""

    ids: Tensor
    fixed: Tensor
    """Places that already hold a token, or have no position."""


class Guidance(NamedTuple):
    """Classifier-free guidance of one step, for each packed row; scale 0 leaves a row as it is."""

    hidden: Tensor
    scale: Tensor


class Forwarded(NamedTuple):
    hidden: Tensor
    """[N, d] final-norm states, the step's rows first."""
    guidance: Guidance | None
    query_rows: int
    """Rows that were computed, including the system's padding."""


class Forward(Protocol):
    """The model's layers over a step's rows."""

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded: ...

    def rest(self) -> None:
        """No request is left: free what was kept between steps."""


class AttendFactory(Protocol):
    """Makes the attention of the layers of one step."""

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend: ...


class Head(Protocol):
    """The output head: turns hidden states into a token and a confidence per candidate."""

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        """Token and confidence, [at least candidates.size] each."""

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        """How many rows are projected onto the vocabulary in a step of ``num_rows`` with ``wanted`` candidates."""
