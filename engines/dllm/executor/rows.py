"""Where the rows of one packed step lie: plain arrays over its plan items, built once per step.

Shapes: n items, those in a Refresh first; N packed rows; B the longest active block. Row indices are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engines.dllm.config import Phase, SparsityConfig
from engines.dllm.plan import PlanItem
from engines.runtime.rows import Ints, ranks

_FIRST = PlanItem._fields.index("total_len")


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
    """Position of its first row, where none has settled."""
    num_rows: Ints
    """Query tokens."""
    settled_before: Ints
    num_settling: int = 0
    """The last items, whose steps leave out settled rows: which ones, the device knows."""

    @staticmethod
    def of(items: Sequence[PlanItem], slots: Sequence[int]) -> ItemTable:
        """``items`` with those in a Refresh first and those with settled rows last."""
        numbers = np.array([item[_FIRST:] for item in items], dtype=np.int64)
        columns = numbers.reshape(-1, len(PlanItem._fields) - _FIRST).T
        total_len, block_start, block_end, window_end, _, masks_left, kept, kv_start, step, _, *left_out = columns
        first, settled, before = left_out
        num_refresh = sum([item.phase.is_refresh for item in items])
        is_reuse = np.arange(len(items)) >= num_refresh
        if first.any():  # a PARTIAL is computed to the end
            is_reuse &= first == 0
        first = np.where(is_reuse, block_start, first)
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
            num_rows=np.where(is_reuse, window_end, total_len) - first - settled,
            settled_before=before,
            num_settling=int(np.count_nonzero(settled)),
        )

    def selecting(self, sparsity: SparsityConfig) -> ItemTable:
        """As layers see it that select where one keeps every row: their retained rows end where its do, right before the block, whose
        rows are the same in all."""
        kept = np.array([sparsity.selected_rows(outside) for outside in self.kept.tolist()], dtype=np.int64)
        return replace(self, kept=kept, kv_start=self.kv_start + self.kept - kept)

    def pool_rows(self, item: int, position: Ints) -> Ints:
        """Where K and V of an item's positions lie that keeps every row of its context: prefix, suffix, window."""
        start, end, kv_start = self.block_start[item], self.window_end[item], self.kv_start[item]
        place = np.where(position < start, position, self.kept[item] + position - start)
        return kv_start + np.where(position < end, place, position - (end - start))


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Packed rows and what they attend to."""

    num_rows: int
    num_refresh_rows: int
    base: Ints
    """[n + 1] first packed row of every item, and the end of the last."""
    position: Ints
    """[max(N, least)]; rows past N repeat token 0 of slot 0."""
    flat: Ints
    """[max(N, least)] index into the token store, ``width`` columns a slot."""
    pool_row: Ints
    """[N - num_refresh_rows] where a Reuse row's K and V go: right behind the retained rows. Where rows have settled, those of other
    rows of the block stand here and in ``position`` and ``flat``, until the device says which are computed (``FreshRows``)."""
    key_len: Ints
    """[n - num_refresh] rows of the pool that each Reuse attends to, from its ``kv_start``."""

    @staticmethod
    def of(table: ItemTable, lengths: Ints | None, *, width: int, least: int) -> PackedRows:
        """``lengths`` are the packed rows of each item; None packs query tokens without padding."""
        num_refresh, first = table.num_refresh, table.first
        lengths = table.num_rows if lengths is None else lengths
        base = np.zeros(len(lengths) + 1, dtype=np.int64)
        lengths.cumsum(out=base[1:])
        num_rows, num_refresh_rows = int(base[-1]), int(base[num_refresh])
        rows = np.arange(num_rows)
        packed = np.zeros((2, max(num_rows, least)), dtype=np.int64)
        np.add(rows, (first - base[:-1]).repeat(lengths), out=packed[0, :num_rows])
        np.add(packed[0, :num_rows], (table.slot * width).repeat(lengths), out=packed[1, :num_rows])
        behind = table.kv_start[num_refresh:] + table.kept[num_refresh:]
        pool_row = rows[num_refresh_rows:] + (behind - base[num_refresh:-1]).repeat(lengths[num_refresh:])
        is_partial = table.num_rows > table.window_end - table.block_start
        for item in (np.flatnonzero(is_partial[num_refresh:]) + num_refresh).tolist():
            own = slice(base[item] - num_refresh_rows, base[item + 1] - num_refresh_rows)
            pool_row[own] = table.pool_rows(item, packed[0, base[item] : base[item + 1]])
        return PackedRows(
            num_rows=num_rows,
            num_refresh_rows=num_refresh_rows,
            base=base,
            position=packed[0],
            flat=packed[1],
            pool_row=pool_row,
            key_len=(table.kept + table.window_end - table.block_start)[num_refresh:],
        )


@dataclass(frozen=True, kw_only=True)
class BlockRows:
    """[n, B] of the active blocks: position, packed row, index into the token store."""

    position: Ints
    packed: Ints
    flat: Ints
    inside: NDArray[np.bool_] | None
    """False past the end of a block shorter than the longest; None where all are equally long."""

    @staticmethod
    def of(table: ItemTable, base: Ints, *, width: int, shifts_logits: bool) -> BlockRows:
        """Places past a block's end have position ``width - 1``, which is no token's. Where logits are shifted, row
        i predicts token i + 1; the first row of whatever was forwarded keeps its own."""
        start = table.block_start[:, None]
        length = table.block_end - table.block_start
        offset = np.arange(length.max())
        position = start + offset
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


@dataclass(frozen=True, kw_only=True)
class Places:
    """The first ``counts`` places of every block, one behind the other."""

    size: int
    request: Ints
    rank: Ints
    """Both [max(size, least)]; what is past ``size`` repeats place 0 of block 0."""

    @staticmethod
    def of(counts: Ints, *, least: int) -> Places:
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
    """Positions outside the window: the prefix as it is, then the suffix past the window."""
    kept: Ints
    kv_start: Ints

    @staticmethod
    def of(table: ItemTable, items: Sequence[PlanItem], base: Ints) -> BuildRows | None:
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
        """Packed rows of the blocks end to end, and the rows of the pool behind the retained ones that are theirs."""
        rank = ranks(self.block_len)
        source = (self.run_start + self.block_start).repeat(self.block_len) + rank
        return source, (self.kv_start + self.kept).repeat(self.block_len) + rank

    def block(self) -> tuple[Ints, NDArray[np.bool_]]:
        """[m, B] packed rows of the blocks, and which are theirs."""
        b = np.arange(self.block_len.max())
        inside = b < self.block_len[:, None]
        return self.run_start[:, None] + np.where(inside, self.block_start[:, None] + b, 0), inside

    def context(self) -> tuple[Ints, NDArray[np.bool_]]:
        """[m, C] packed rows of the contexts, and which are theirs."""
        j = np.arange(self.num_context.max())
        inside = j < self.num_context[:, None]
        position = np.where(j < self.block_start[:, None], j, j + self.window_len[:, None])
        return self.run_start[:, None] + np.where(inside, position, 0), inside


@dataclass(frozen=True, kw_only=True)
class FreshRows:
    """What the device needs to say which rows of the last c items of a step are computed: those that have not settled, in order.

    Their packed rows are the step's last; B is the longest active block of the step.
    """

    settled_before: Ints
    """[c, 1]"""
    base: Ints
    """[c, 1] first packed row."""
    behind: Ints
    """[c, 1] row of the pool of the block's first position."""
    cell: Ints
    """[rows] of each packed row, the place of its item's first position in a flattened [c, B] grid ..."""
    rank: Ints
    """... and that place plus its rank among the fresh rows of its item."""

    @staticmethod
    def of(table: ItemTable, base: Ints) -> FreshRows | None:
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

    def arrays(self) -> tuple[Ints, ...]:
        return self.settled_before, self.base, self.behind, self.cell, self.rank
