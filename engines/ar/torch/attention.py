"""Causal attention of a step over the paged pool, in torch's own operators: the CPU's backend and the reference.

A query at position p of its sequence sees the keys at positions 0 … p. Sequences of similar sizes are padded to one call;
on a CPU only those that decode. A sequence without history reads the step's own K and V, the others read the pool.
Nothing here is per token.

Shapes: N rows; a group has g sequences, padded to Lq queries and Lk keys.

Causal flash attention reads the blocks in place: one launch for all sequences of a step, through the block table.

A small fixed example on the device (``probe``) shows which kernel an installed package has, how it names its arguments and
which block sizes it takes. The kernels of ``engines.attention`` are found in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.ar.torch.rows import CausalRows, Members
from engines.attention.backends import sdpa
from engines.attention.flash import KernelSpans, TorchVarlenKernel, flash_attn_kernels, torch_varlen_kernels
from engines.attention.registry import TOLERANCE
from engines.errors import first_line
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, Staging, Store
from engines.runtime.rows import BlockTables, Ints

_ALIKE = 3
"""Sequences are alike if the logarithms of their sizes to the base 2 ** _ALIKE round to the same number. Padding costs at
most that factor, while one more call costs every layer a launch."""
_MULTIPLE = 16
"""Keys are padded to a multiple of this, so that a row is summed in the same lanes whatever the other rows are."""


DecodePlace = tuple[Tensor, Tensor, Tensor, int]
"""Slots and lengths [n], the table, and the size of its blocks."""


class DecodeKernels(NamedTuple):
    """The kernels of ``engines.kernels.host``."""

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

    @property
    def block_size(self) -> int:
        """Tokens of a block in the tables and the pool that it gets."""

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend: ...


class _Group(NamedTuple):
    """The sequences of one call: where their queries and keys are, and which keys a query sees."""

    queries: slice | Tensor
    """Rows of the step, [g * Lq]."""
    keys: slice | Tensor
    """Rows of the step, or of the pool if there is a mask, [g * Lk]."""
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
    whole: Callable[..., tuple[Tensor, Tensor]] | None = None

    @property
    def all_layers(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Replaces all layers: it takes x [N, d], cos and sin, and returns the residual stream and a delta to be added to it."""
        return None if self.whole is None else partial(self.whole, rows=self.rows, place=self.at)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self.pool.rows(layer)
        self.kernels.store(*pool, self.rows, k, v)
        return self.kernels.decode(q, *pool, *self.at)

    def attend_products(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.kernels.attend(qkv, cos, sin, *self.pool.rows(layer), self.rows, self.at)


class SdpaAttention:
    """Attention by torch. Any ``block_size`` will do, as rows of the pool are fetched one by one. ``kernels`` serve single queries."""

    name: ClassVar[str] = "sdpa"
    is_captured: ClassVar[bool] = False

    def __init__(
        self, store: Store, staging: Staging, *, block_size: int = 16, kernels: DecodeKernels | None = None
    ) -> None:
        self.block_size = block_size
        self._store, self._staging, self._kernels = store, staging, kernels
        self.whole: Callable[..., tuple[Tensor, Tensor]] | None = None
        """Runs all layers of a decode step over this pool in one call, if the model can (``engines.kernels.whole``)."""

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend:
        members = rows.members
        if self._kernels is not None and members.start.all() and bool((members.tokens == 1).all()):
            place = self._place(members, tables)
            return _DecodeStep(self._kernels, pool, self._staging.ints(rows.pool_row), place, self.whole)
        groups: list[_Group | _Decodes] = []
        group_rows = []
        is_alone = pool.k.device.type == "cpu"
        for indices in [np.arange(len(members.slot))] if rows.is_grid else _similar_groups(members, is_alone=is_alone):
            group, step_row = self._group(Members(*(column[indices] for column in members)), tables, pool)
            groups.append(group)
            group_rows.append(step_row)
        is_whole = len(groups) == 1 and isinstance(groups[0].queries, slice) and len(group_rows[0]) == rows.num_rows
        if is_whole:
            return self._attend(rows, pool, groups, None)
        # The place of each row of the step among the groups' results; a row of padding takes any.
        index = np.zeros(rows.num_rows, dtype=np.int64)
        offset = 0
        for row in group_rows:
            is_real = row >= 0
            index[row[is_real]] = np.flatnonzero(is_real) + offset
            offset += len(row)
        return self._attend(rows, pool, groups, self._staging.ints(index))

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
        """Return the group, and the step's row of each row of its result, -1 for padding."""
        slot, first, start, count = members
        longest = int(count.max())
        if self._kernels is not None and longest == 1 and start.all():
            rows = self._staging.ints(first)
            return _Decodes(self._kernels.decode, rows, self._place(members, tables)), first
        offset = np.arange(longest)
        # Past its end a sequence repeats its last row.
        grid = first[:, None] + np.minimum(offset, count[:, None] - 1)
        order = np.where(offset < count[:, None], grid, -1).ravel()
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
        """Return the pool rows [g * Lk] of the sequences' tokens, and the mask."""
        num_keys = -(-num_keys // _MULTIPLE) * _MULTIPLE
        position = np.broadcast_to(np.arange(num_keys), (len(slot), num_keys))
        keys, first_hidden = self._staging.send(
            tables.rows(np.broadcast_to(slot[:, None], position.shape), position).ravel(), start + 1
        )
        device = keys.device
        visible = torch.arange(num_keys, device=device) < (
            first_hidden[:, None, None] + torch.arange(num_queries, device=device)[:, None]
        )
        mask = torch.zeros(visible.shape, dtype=pool.k.dtype, device=device).masked_fill_(~visible, -torch.inf)
        return keys, mask.unsqueeze(1)


def _similar_groups(members: Members, *, is_alone: bool) -> list[Ints]:
    """Return the sequences in groups of one call each. With ``is_alone`` a prefill is a group of its own: padded to another's
    length, its rows would be summed in other pieces."""
    if len(members.slot) == 1:
        return [np.zeros(1, dtype=np.int64)]
    sizes = np.log2(np.stack([members.tokens, members.end])) // _ALIKE
    key = (sizes[0] * 64 + sizes[1]) * 2 + (members.start > 0)
    # Decodes have groups of their own, so that other sequences do not change which kernel they get.
    is_decode = members.tokens == 1
    key = np.where(is_decode, key - (1 << 20), key + (np.arange(len(is_decode)) << 20) * is_alone)
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


_BLOCK_SIZES = (16, 64, 256)
"""Tried in this order: FlashAttention 2 takes multiples of 256 only, others smaller ones."""


PagedKernel = Callable[[Tensor, Tensor, Tensor, KernelSpans], Tensor]
"""A ``VarlenKernel`` that takes a table."""


def reference_kernel(q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    """The reference for other kernels, in torch's operators, one sequence after the other. Rows of no sequence are zero."""
    assert spans.used_k is not None
    assert spans.table is not None
    out = torch.zeros_like(q)
    group, block = q.shape[1] // k.shape[2], k.shape[1]
    starts = spans.cu_q.tolist()
    for i, num_keys in enumerate(spans.used_k.tolist()):
        rows = slice(starts[i], starts[i + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        blocks = spans.table[i, : -(-num_keys // block)].long()
        keys, values = (x[blocks].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1).float() for x in (k, v))
        hidden = torch.ones(count, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - count).logical_not()
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * q.shape[2] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


class PagedAttention:
    """A ``StepAttention`` by a ``PagedKernel``. K and V go to the pool first, and the kernel reads everything from there."""

    is_captured: ClassVar[bool] = True

    def __init__(self, name: str, kernel: PagedKernel, store: Store, staging: Staging, *, block_size: int) -> None:
        self.name, self.kernel, self.block_size = name, kernel, block_size
        self._store, self._staging = store, staging

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend:
        members = rows.members
        # With max_q of 1 FlashAttention takes q to have one row per sequence, which is wrong with padding.
        max_q = max(int(members.tokens.max()), 1 if rows.is_grid else 2)
        pool_row, *spans = self._staging.send(
            rows.pool_row, *span_arrays(members.tokens, members.end, tables.table[members.slot])
        )
        return self.over(spans_of(spans, max_q=max_q, max_k=int(members.end.max())), pool_row, pool)

    def over(self, spans: KernelSpans, pool_row: Tensor, pool: PoolTensors) -> Attend:
        """Return the attention of the layers, from metadata on the device."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(*pool.rows(layer), pool_row, k, v)
            return self.kernel(q, pool.k[layer], pool.v[layer], spans)

        return attend


def span_arrays(count: Ints, end: Ints, table: np.ndarray) -> tuple[Ints, ...]:
    """Return cu_q, cu_k, used_k and table on the host, from the queries, the keys and the blocks of each sequence."""
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(lengths))) for lengths in (count, end))
    return cu_q, cu_k, end, table.astype(np.int64)


def spans_of(arrays: list[Tensor], *, max_q: int, max_k: int) -> KernelSpans:
    cu_q, cu_k, used_k, table = (array.to(torch.int32) for array in arrays)
    return KernelSpans(cu_q, cu_k, used_k, table, max_q, max_k)


def kernels() -> Iterator[tuple[str, PagedKernel]]:
    """Yield the kernels that are installed, in order of preference."""
    with suppress(ImportError):
        yield from (("flash-attn", kernel) for kernel in flash_attn_kernels() if kernel.takes_table)
    with suppress(ImportError):
        for kernel in torch_varlen_kernels():
            if isinstance(kernel, TorchVarlenKernel) and kernel.takes_table:
                yield "torch-varlen", replace(kernel, gives_cu_k=False)
                yield "torch-varlen", kernel


class DeviceKernel(NamedTuple):
    """A kernel that gives the reference's numbers on this device, with blocks of that size."""

    name: str
    kernel: PagedKernel
    block_size: int


@lru_cache(maxsize=16)
def probe(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> DeviceKernel | str:
    """Return the first kernel and block size that compute correctly, or why there is none."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "flash kernels take bfloat16 and float16 on CUDA devices"
    faults = []
    for name, kernel in kernels():
        for block_size in _BLOCK_SIZES:
            reason = fault(kernel, device, dtype, head_dim, group, block_size)
            if reason is None:
                return DeviceKernel(name, kernel, block_size)
            faults.append(f"{name} with blocks of {block_size}: {reason}")
    return "; ".join(faults) or "no kernel with a block table is installed"


def fault(
    kernel: PagedKernel, device: torch.device, dtype: torch.dtype, head_dim: int, group: int, block_size: int
) -> str | None:
    """Return what is wrong with a kernel on four sequences: a prefill, a chunk over history, a decode, and an empty one.

    Blocks lie in random order, places that no sequence holds have huge values, and rows past the last sequence are padding.
    """
    random = torch.Generator().manual_seed(0)
    count, end = np.array([150, 70, 1, 0]), np.array([150, 300, 290, 0])
    width = -(-int(end.max()) // block_size)
    order = (torch.randperm(3 * width, generator=random) + 1).numpy().reshape(3, width)
    table = np.zeros((4, width), dtype=np.int64)
    k, v = torch.full((2, 3 * width + 1, block_size, 2, head_dim), 1e3, dtype=torch.float32).unbind()
    for i, length in enumerate(end[:3]):
        num_blocks = -(-int(length) // block_size)
        table[i, :num_blocks] = order[i, :num_blocks]
        for x in (k, v):
            rows = x.view(-1, 2, head_dim)
            places = torch.from_numpy(
                np.repeat(table[i, :num_blocks], block_size) * block_size + np.tile(np.arange(block_size), num_blocks)
            )
            rows[places[:length]] = torch.randn(int(length), 2, head_dim, generator=random)
    q = torch.randn(int(count.sum()) + 3, 2 * group, head_dim, generator=random)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    tensors = [torch.from_numpy(array) for array in span_arrays(count, end, table)]
    spans = spans_of(tensors, max_q=150, max_k=300)
    num_real = int(count.sum())
    expected = reference_kernel(q.float(), k.float(), v.float(), spans)[:num_real]
    try:
        device_spans = spans_of([array.to(device) for array in tensors], max_q=150, max_k=300)
        result = kernel(q.to(device), k.to(device), v.to(device), device_spans)[:num_real].float().cpu()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    difference = (result - expected).abs().max().item()
    return None if difference <= TOLERANCE[dtype] else f"it is off by {difference:.2g}"
