"""Causal flash attention that reads the blocks in place: one launch for all sequences of a step, through the block table.

Which kernel an installed package has, what it calls its arguments and which block sizes it takes is found out by a
small fixed example on the device (``probe``), as for the kernels of ``engines.attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.ar.torch.blocks import BlockTables
from engines.ar.torch.rows import CausalRows, Members
from engines.attention.kernels import KernelSpans, TorchVarlenKernel, flash_attn_kernels, torch_varlen_kernels
from engines.attention.probe import TOLERANCE
from engines.kernels import available
from engines.kernels.paged import paged_attention, paged_attention_reference
from engines.models.protocol import Attend
from engines.runtime.pool import PoolTensors, Store
from engines.runtime.rows import Ints
from engines.runtime.staging import Staging

_BLOCK_SIZES = (16, 64, 256)
"""Tried in this order: FlashAttention 2 takes multiples of 256 only, others smaller ones."""


PagedKernel = Callable[[Tensor, Tensor, Tensor, KernelSpans], Tensor]
"""A ``VarlenKernel`` that takes a table."""


@dataclass(frozen=True)
class ReferenceKernel:
    """The same in torch's operators, one sequence after the other: what the others are compared with."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
        return _by(paged_attention_reference, q, k, v, spans)


@dataclass(frozen=True)
class TritonKernel:
    """Our own, where no package brings one."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
        return _by(paged_attention, q, k, v, spans)


def _by(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans) -> Tensor:
    assert spans.used_k is not None
    assert spans.table is not None
    return attention(q, k, v, spans.cu_q, spans.used_k, spans.table, max_q=spans.max_q)


class PagedAttention:
    """A ``StepAttention`` by one such kernel; K and V go to the pool first, then everything is read from there."""

    is_captured: ClassVar[bool] = True

    def __init__(self, name: str, kernel: PagedKernel, store: Store, staging: Staging, *, block_size: int) -> None:
        self.name, self.kernel, self.block_size = name, kernel, block_size
        self._store, self._staging = store, staging

    def attend(self, rows: CausalRows, tables: BlockTables, pool: PoolTensors) -> Attend:
        members = rows.members
        # For max_q of 1 FlashAttention takes q for one row per sequence, which with padding is wrong.
        max_q = max(int(members.tokens.max()), 1 if rows.is_grid else 2)
        pool_row, *spans = self._staging.send(rows.pool_row, *span_arrays(members, tables))
        return self.over(spans_of(spans, max_q=max_q, max_k=int(members.end.max())), pool_row, pool)

    def over(self, spans: KernelSpans, pool_row: Tensor, pool: PoolTensors) -> Attend:
        """Attention of the layers, from metadata on the device."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(*pool.rows(layer), pool_row, k, v)
            return self.kernel(q, pool.k[layer], pool.v[layer], spans)

        return attend


def span_arrays(members: Members, tables: BlockTables) -> tuple[Ints, ...]:
    """cu_q, cu_k, used_k and table on the host."""
    return _spans_on_host(members.tokens, members.end, tables.table[members.slot])


def _spans_on_host(count: Ints, end: Ints, table: np.ndarray) -> tuple[Ints, ...]:
    """The same from the queries and keys of each sequence."""
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(lengths))) for lengths in (count, end))
    return cu_q, cu_k, end, table.astype(np.int64)


def spans_of(arrays: list[Tensor], *, max_q: int, max_k: int) -> KernelSpans:
    cu_q, cu_k, used_k, table = (array.to(torch.int32) for array in arrays)
    return KernelSpans(cu_q, cu_k, used_k, table, max_q, max_k)


def kernels() -> Iterator[tuple[str, PagedKernel]]:
    """Kernels that are there, in order of preference."""
    with suppress(ImportError):
        yield from (("flash-attn", kernel) for kernel in flash_attn_kernels() if kernel.takes_table)
    with suppress(ImportError):
        for kernel in torch_varlen_kernels():
            if isinstance(kernel, TorchVarlenKernel) and kernel.takes_table:
                yield "torch-varlen", replace(kernel, gives_cu_k=False)
                yield "torch-varlen", kernel
    if available(torch.device("cuda")):
        yield "triton", TritonKernel()


class Served(NamedTuple):
    """A kernel that gives the reference's numbers on this device, with blocks of that size."""

    name: str
    kernel: PagedKernel
    block_size: int


@lru_cache(maxsize=16)
def probe(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Served | str:
    """The first kernel and block size that are right, or why there is none."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "flash kernels take bfloat16 and float16 on CUDA devices"
    faults = []
    for name, kernel in kernels():
        for block_size in _BLOCK_SIZES:
            found = fault(kernel, device, dtype, head_dim, group, block_size)
            if found is None:
                return Served(name, kernel, block_size)
            faults.append(f"{name} with blocks of {block_size}: {found}")
    return "; ".join(faults) or "no kernel with a block table is installed"


def fault(
    kernel: PagedKernel, device: torch.device, dtype: torch.dtype, head_dim: int, group: int, block_size: int
) -> str | None:
    """What is wrong with a kernel on four sequences: a prefill, a chunk over history, a decode, and none at all.

    Blocks lie in no order, what no sequence holds is huge, and rows past the last sequence are padding.
    """
    random = torch.Generator().manual_seed(0)
    count, end = np.array([150, 70, 1, 0]), np.array([150, 300, 290, 0])
    width = -(-int(end.max()) // block_size)
    order = (torch.randperm(3 * width, generator=random) + 1).numpy().reshape(3, width)
    table = np.zeros((4, width), dtype=np.int64)
    k, v = torch.full((2, 3 * width + 1, block_size, 2, head_dim), 1e3, dtype=torch.float32).unbind()
    for i, used in enumerate(end[:3]):
        held = -(-int(used) // block_size)
        table[i, :held] = order[i, :held]
        for x in (k, v):
            rows = x.view(-1, 2, head_dim)
            places = torch.from_numpy(
                np.repeat(table[i, :held], block_size) * block_size + np.tile(np.arange(block_size), held)
            )
            rows[places[:used]] = torch.randn(int(used), 2, head_dim, generator=random)
    q = torch.randn(int(count.sum()) + 3, 2 * group, head_dim, generator=random)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    tensors = [torch.from_numpy(array) for array in _spans_on_host(count, end, table)]
    spans = spans_of(tensors, max_q=150, max_k=300)
    real = int(count.sum())
    expected = ReferenceKernel()(q.float(), k.float(), v.float(), spans)[:real]
    try:
        there = spans_of([array.to(device) for array in tensors], max_q=150, max_k=300)
        found = kernel(q.to(device), k.to(device), v.to(device), there)[:real].float().cpu()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    difference = (found - expected).abs().max().item()
    return None if difference <= TOLERANCE[dtype] else f"it is off by {difference:.2g}"
