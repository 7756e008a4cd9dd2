"""Places the rows of a step on the device: all of its metadata in one transfer, shared by the steps of a block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import Run, SpanMetadata, Spans
from engines.dllm.config import SparsityConfig
from engines.dllm.executor.graphs import StepGraphs
from engines.dllm.executor.output import first_places
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import (
    AttendFactory,
    BlockPlaces,
    BlockRows,
    BuildRows,
    EagerRows,
    Fresh,
    FreshRows,
    GraphRows,
    ItemTable,
    Pack,
    PackedRows,
    SelectAndPack,
    StepLayout,
    StepRows,
)
from engines.dllm.plan import PlanItem
from engines.models.protocol import DiffusionModel
from engines.runtime.device import Staging, store_by_index
from engines.runtime.rows import MIN_ROWS, Ints
from engines.runtime.step_timer import StepTimer


class HostRows(NamedTuple):
    """The rows of a step before they are sent to the device."""

    packed: PackedRows
    arrays: Sequence[Ints] = ()
    on_device: Callable[[Sequence[Tensor], Fresh | None], EagerRows | GraphRows | None] = lambda *_: None
    """Makes the rows from ``arrays`` on the device and the fresh rows that the device found."""


class RowLayout(Protocol):
    """Turns a system's requests into rows of a forward."""

    def of(self, items: Sequence[PlanItem], table: ItemTable, pad_to: int | None) -> HostRows: ...


@dataclass(eq=False, kw_only=True)
class Layouts:
    """Keeps the last step's layout for the next step if that computes the same rows."""

    state: RequestState
    rows: RowLayout
    staging: Staging
    timer: StepTimer
    shifts_logits: bool
    wants_every_place: bool
    """Whether committed positions get logits too."""
    _last: tuple[object, StepLayout] | None = field(default=None, init=False)

    def of(self, items: Sequence[PlanItem], pad_to: int | None) -> StepLayout:
        slots = self.state.slots(items)
        key = (
            pad_to,
            self.timer.detailed,
            slots,
            [(i.phase, i.total_len, i.block_start, i.block_end, i.window_end, i.kept_rows, i.kv_start) for i in items],
            # Rows settle from step to step, and the device must know the step in which a token was committed.
            [i[_FROM:] for i in items] if self.state.settles else [i[_CHOICES:] for i in items],
        )
        if self._last is None or self._last[0] != key:
            self._last = key, self._new(items, ItemTable.of(items, slots), pad_to)
        return self._last[1]

    def forget(self) -> None:
        self._last = None

    def _new(self, items: Sequence[PlanItem], table: ItemTable, pad_to: int | None) -> StepLayout:
        """Send all metadata in one transfer, except the candidates'."""
        host = self.rows.of(items, table, pad_to)
        block_rows = BlockRows.of(table, host.packed.base, width=self.state.width, shifts_logits=self.shifts_logits)
        arrays = [block_rows.position, block_rows.packed, block_rows.flat, table.slot]
        if self.state.settles:
            arrays.append(table.step_in_block[:, None])
        if block_rows.inside is not None:
            arrays.append((~block_rows.inside).astype(np.int64))
        fresh_arrays = FreshRows.of(table, host.packed.base) or ()
        sent = self.staging.send(*arrays, *host.arrays, *fresh_arrays)
        positions, block_packed, flat, slot, *others = sent[: len(arrays)]
        step = others.pop(0) if self.state.settles else None
        block = BlockPlaces(positions, block_packed, flat, others[0] != 0 if others else None, slot, step)
        fresh = None
        if fresh_arrays:
            fresh = self.state.fresh_rows(block, sent[-len(fresh_arrays) :])
            block = block._replace(packed=fresh.packed)
        all_cells = None
        if self.wants_every_place:
            row = block_rows.packed.ravel()
            is_every_row = len(row) == host.packed.num_rows >= MIN_ROWS and bool((row == np.arange(len(row))).all())
            all_cells = first_places(table.block_end - table.block_start, block, None, self.staging)
            all_cells = all_cells._replace(is_every_row=is_every_row)
        return StepLayout(
            num_rows=host.packed.num_rows, rows=host.on_device(sent[len(arrays) :], fresh), block=block, every=all_cells
        )


_FROM, _CHOICES = PlanItem._fields.index("step_in_block"), PlanItem._fields.index("suffix")


RowLengths = Callable[[Sequence[PlanItem], int | None], Ints]
"""Returns the packed rows of each request, from the items and the length they are padded to."""


class Keys(TypedDict):
    """The fields of ``StepRows`` that depend on how many rows layers retain."""

    reuse_k_runs: list[Run]
    spans: tuple[Spans, Spans] | None
    pack: Pack | None
    key_rows: Tensor | None


class HostKeys(NamedTuple):
    """The keys and packing of layers that retain equally many rows, before they are sent."""

    arrays: Sequence[Ints]
    on_device: Callable[[Sequence[Tensor]], Keys]


class SelectingLayers(NamedTuple):
    """The layers that select, if one layer keeps every row."""

    sparsity: SparsityConfig
    selection: SelectAndPack


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedLayout:
    """Lays out one forward over all requests' rows, those of Refresh requests first; a captured graph replays it if one holds them."""

    model: DiffusionModel
    state: RequestState
    timer: StepTimer
    selection: SelectAndPack
    attend: AttendFactory
    sends_spans: bool
    selecting: SelectingLayers | None = None
    graphs: StepGraphs | None = None
    row_lengths: RowLengths | None = None
    """Without it, a request's rows are its query tokens, without padding."""

    def of(self, items: Sequence[PlanItem], table: ItemTable, pad_to: int | None) -> HostRows:
        lengths = None if self.row_lengths is None else self.row_lengths(items, pad_to)
        packed = PackedRows.of(table, lengths, width=self.state.width, least=MIN_ROWS)
        build = BuildRows.of(table, items, packed.base)
        is_plain = build is None and not self.state.guided and table.keys()[2] is None
        if self.graphs is not None and is_plain and not self.timer.detailed:
            key = self.graphs.key_of(table, packed)
            if key is not None:
                graph = GraphRows(key, table, packed)
                return HostRows(packed, on_device=lambda _, fresh: graph._replace(fresh=fresh))
        arrays = [packed.position, packed.flat, packed.pool_row]
        keys = [self._keys(items, table, packed, self.selection)]
        if self.selecting is not None:
            selecting_table = table.selecting(self.selecting.sparsity)
            keys.append(self._keys(items, selecting_table, packed, self.selecting.selection))

        def on_device(sent: Sequence[Tensor], fresh: Fresh | None) -> EagerRows:
            if fresh is not None:
                fresh.write(packed.num_rows, sent[0], sent[1], sent[2], packed.num_refresh_rows)
            runs, others = list(pairwise(packed.base.tolist())), sent[len(arrays) :]
            bounds = pairwise(accumulate((len(part.arrays) for part in keys), initial=0))
            first, *rest = (part.on_device(others[start:end]) for part, (start, end) in zip(keys, bounds, strict=True))
            rows = StepRows(
                num_rows=packed.num_rows,
                num_refresh_rows=packed.num_refresh_rows,
                position=sent[0],
                flat=sent[1],
                pool_row=sent[2],
                refresh_runs=runs[: table.num_refresh],
                reuse_q_runs=runs[table.num_refresh :],
                **first,
            )
            rows = rows._replace(selecting=rows._replace(**rest[0]) if rest else None)
            return EagerRows(rows, self.model.rotary(rows.position), self.attend(items, rows, pad_to))

        return HostRows(packed, [*arrays, *(array for part in keys for array in part.arrays)], on_device)

    def _keys(
        self, items: Sequence[PlanItem], table: ItemTable, packed: PackedRows, selection: SelectAndPack
    ) -> HostKeys:
        m, arrays = table.num_refresh, list[Ints]()
        start, key_len, gathered = table.keys()
        start, key_len = start[m:], key_len[m:]
        if self.sends_spans:
            # ``Spans`` of the Refresh sequences, then of the Reuse sequences, whose queries count from their own first row.
            lengths = np.diff(packed.base)
            reuse = SpanMetadata.of_lengths(lengths[m:], start, key_len)
            arrays.append(np.concatenate((*SpanMetadata.of_lengths(lengths[:m]), *reuse)).astype(np.int64))
        num_span_arrays, build = len(arrays), BuildRows.of(table, items, packed.base)
        if build is not None:
            if self.state.settles:
                arrays += build.kept_blocks()
            arrays += selection.arrays(build)
        arrays += [] if gathered is None else [gathered]

        def on_device(sent: Sequence[Tensor]) -> Keys:
            return {
                "reuse_k_runs": list(zip(start.tolist(), (start + key_len).tolist(), strict=True)),
                "spans": _spans(sent[0], packed, table, key_len) if self.sends_spans else None,
                "pack": None if build is None else self._pack(build, selection, sent[num_span_arrays:]),
                "key_rows": None if gathered is None else sent[-1],
            }

        return HostKeys(arrays, on_device)

    def _pack(self, build: BuildRows, selection: SelectAndPack, sent: Sequence[Tensor]) -> Pack:
        """Make the packing. If rows may settle, it also keeps the block's rows: the next step may leave out some."""
        if not self.state.settles:
            return selection.pack(build, sent)
        source, target, *others = sent
        select = selection.pack(build, others)

        def pack(pool_k: Tensor, pool_v: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
            select(pool_k, pool_v, q, k, v)
            store_by_index(pool_k, pool_v, target, k.index_select(0, source), v.index_select(0, source))

        return pack


def _spans(sent: Tensor, packed: PackedRows, table: ItemTable, key_len: Ints) -> tuple[Spans, Spans]:
    m, n = table.num_refresh, len(table.slot) - table.num_refresh
    lengths = np.diff(packed.base)
    parts = sent.to(torch.int32).split([m + 1, m + 1, m, n + 1, n + 1, n])
    max_q, max_window = int(lengths[:m].max(initial=0)), int(lengths[m:].max(initial=0))
    return (
        Spans(cu_q=parts[0], k_start=parts[1], k_len=parts[2], max_q=max_q, max_k=max_q),
        Spans(cu_q=parts[3], k_start=parts[4], k_len=parts[5], max_q=max_window, max_k=int(key_len.max(initial=0))),
    )
