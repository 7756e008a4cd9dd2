"""Causal attention of a step over the paged pool, in torch's own operators: the CPU's backend and the reference.

A query at position p of its sequence sees the keys at positions 0 … p. Sequences whose sizes are alike are padded to
one call, on a CPU those that decode; a sequence without history reads the step's own K and V, the others the pool.
Nothing here is per token.

Shapes: N rows; a group has g sequences, padded to Lq queries and Lk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.ar.torch.blocks import BlockTables
from engines.ar.torch.rows import CausalRows, Members
from engines.attention import sdpa
from engines.models.protocol import Attend
from engines.runtime.pool import PoolTensors, Store
from engines.runtime.rows import Ints
from engines.runtime.staging import Staging

_ALIKE = 3
"""Sequences are alike if the logarithms of their sizes to the base 2 ** _ALIKE round to the same: padding costs at most
that factor, where a call more costs every layer a launch."""
_MULTIPLE = 16
"""Keys are padded to a multiple of it, so that a row is summed in the same lanes alone and in company."""


DecodePlace = tuple[Tensor, Tensor, Tensor, int]
"""Slots and lengths [n], the table, and the size of its blocks."""


class DecodeKernels(NamedTuple):
    """``engines.kernels.host``'s."""

    store: Store
    decode: Callable[..., Tensor]
    attend: Callable[..., Tensor]


class StepAttention(Protocol):
    """How the layers of a step attend."""

    @property
    def name(self) -> str: ...
    @property
    def is_captured(self) -> bool:
        """Whether its launches depend on the step's sizes alone, so that a graph may hold them."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block, of the tables and the pool it is given."""
        ...

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend: ...


class _Group(NamedTuple):
    """Sequences of one call: where their queries and keys are, and which keys a query sees."""

    queries: slice | Tensor
    """Rows of the step, [g * Lq]."""
    keys: slice | Tensor
    """Rows of the step, or of the pool where there is a mask, [g * Lk]."""
    size: int
    mask: Tensor | None
    """[g, 1, Lq, Lk] to be added to the scores; None without history: query i sees keys 0 … i."""

    @property
    def reads_pool(self) -> bool:
        return self.mask is not None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[g * Lq, H, D]"""
        q, k, v = (
            (x[rows] if isinstance(rows, slice) else x.index_select(0, rows)).unflatten(0, (self.size, -1))
            for x, rows in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        return sdpa(q, k, v, self.mask, is_causal=self.mask is None).flatten(0, 1)


class _Decodes(NamedTuple):
    """Sequences with one query each, by a kernel that reads the pool in place."""

    kernel: Callable[..., Tensor]
    queries: Tensor
    """Rows of the step, [g]."""
    at: DecodePlace
    reads_pool: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[g, H, D]"""
        return self.kernel(q.index_select(0, self.queries), k, v, *self.at)


class _DecodeStep(NamedTuple):
    """``AttendProducts`` of a step in which every sequence decodes; rows of padding come last."""

    kernels: DecodeKernels
    pool: PoolTensors
    rows: Tensor
    at: DecodePlace

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self.pool.rows(layer)
        self.kernels.store(*pool, self.rows, k, v)
        return self.kernels.decode(q, *pool, *self.at)

    def of_products(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.kernels.attend(qkv, cos, sin, *self.pool.rows(layer), self.rows, self.at)


class SdpaAttention:
    """``block_size`` is free: rows of the pool are fetched one by one. ``kernels`` serve sequences with one query each."""

    name: ClassVar[str] = "sdpa"
    is_captured: ClassVar[bool] = False

    def __init__(
        self, store: Store, staging: Staging, *, block_size: int = 16, kernels: DecodeKernels | None = None
    ) -> None:
        self.block_size = block_size
        self._store, self._staging, self._kernels = store, staging, kernels

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend:
        members = rows.members
        if self._kernels is not None and members.start.all() and bool((members.tokens == 1).all()):
            return _DecodeStep(self._kernels, pool, self._staging.ints(rows.pool_row), self._place(members, tables))
        groups: list[_Group | _Decodes] = []
        order = []
        is_alone = pool.k.device.type == "cpu"
        for which in [np.arange(len(members.slot))] if rows.is_grid else _alike(members, is_alone=is_alone):
            group, places = self._group(Members(*(column[which] for column in members)), tables, pool)
            groups.append(group)
            order.append(places)
        is_whole = len(groups) == 1 and isinstance(groups[0].queries, slice) and len(order[0]) == rows.num_rows
        if is_whole:
            return self._attend(rows, pool, groups, None)
        # Where each row of the step lies among the groups' results; a row of padding takes any.
        where = np.zeros(rows.num_rows, dtype=np.int64)
        offset = 0
        for found in order:
            real = found >= 0
            where[found[real]] = np.flatnonzero(real) + offset
            offset += len(found)
        return self._attend(rows, pool, groups, self._staging.ints(where))

    def _attend(
        self, rows: CausalRows, pool: PoolTensors, groups: Sequence[_Group | _Decodes], where: Tensor | None
    ) -> Attend:
        store = self._store
        pool_row = self._staging.ints(rows.pool_row)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool_k, pool_v = pool.rows(layer)
            store(pool_k, pool_v, pool_row, k, v)
            parts = [group(q, *((pool_k, pool_v) if group.reads_pool else (k, v))) for group in groups]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out if where is None else out.index_select(0, where)

        return attend

    def _group(self, members: Members, tables: BlockTables, pool: PoolTensors) -> tuple[_Group | _Decodes, Ints]:
        """The group, and by place of its result the row of the step that it is of; -1 for padding."""
        slot, first, start, count = members
        longest = int(count.max())
        if self._kernels is not None and longest == 1 and start.all():
            rows = self._staging.ints(first)
            return _Decodes(self._kernels.decode, rows, self._place(members, tables)), first
        place = np.arange(longest)
        # Past its end a sequence repeats its last row.
        grid = first[:, None] + np.minimum(place, count[:, None] - 1)
        order = np.where(place < count[:, None], grid, -1).ravel()
        is_run = len(slot) == 1 or (bool((count == longest).all()) and bool((np.diff(first) == longest).all()))
        queries = slice(int(first[0]), int(first[0]) + grid.size) if is_run else self._staging.ints(grid.ravel())
        if not start.any():
            return _Group(queries, queries, len(slot), None), order
        keys, mask = self._keys(slot, start, longest, int(members.end.max()), tables, pool)
        return _Group(queries, keys, len(slot), mask), order

    def _place(self, members: Members, tables: BlockTables) -> DecodePlace:
        slots, lengths = self._staging.send(np.ascontiguousarray(members.slot), members.end)
        return slots, lengths, torch.from_numpy(tables.table), tables.block_size

    def _keys(
        self, slot: Ints, start: Ints, num_queries: int, num_keys: int, tables: BlockTables, pool: PoolTensors
    ) -> tuple[Tensor, Tensor]:
        """Pool rows [g * Lk] of the sequences' tokens, and the mask."""
        num_keys = -(-num_keys // _MULTIPLE) * _MULTIPLE
        position = np.broadcast_to(np.arange(num_keys), (len(slot), num_keys))
        keys, first_hidden = self._staging.send(
            tables.rows(np.broadcast_to(slot[:, None], position.shape), position).ravel(), start + 1
        )
        device = keys.device
        seen = torch.arange(num_keys, device=device) < (
            first_hidden[:, None, None] + torch.arange(num_queries, device=device)[:, None]
        )
        mask = torch.zeros(seen.shape, dtype=pool.k.dtype, device=device).masked_fill_(~seen, -torch.inf)
        return keys, mask.unsqueeze(1)


def _alike(members: Members, *, is_alone: bool) -> list[Ints]:
    """The sequences in groups of one call each. ``is_alone`` has a prefill keep to itself: padded to another's length its
    rows would be summed in other pieces."""
    if len(members.slot) == 1:
        return [np.zeros(1, dtype=np.int64)]
    sizes = np.log2(np.stack([members.tokens, members.end])) // _ALIKE
    key = (sizes[0] * 64 + sizes[1]) * 2 + (members.start > 0)
    # Decodes keep to themselves, so that their company does not say which kernel they get.
    one = members.tokens == 1
    key = np.where(one, key - (1 << 20), key + (np.arange(len(one)) << 20) * is_alone)
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)
