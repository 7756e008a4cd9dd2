"""``flash-attn`` and ``torch-varlen``: one launch for all sequences, in the layout of the keys that the kernel reads.

``runs`` hands over the starts of the runs as ``cu_seqlens_k`` and their lengths as ``seqused_k``. FlashAttention 2
takes the first key row of a sequence from the one and the number of its keys from the other, and
never looks at ``cu_seqlens_k[i + 1]``: runs may lie anywhere, in any order, and nothing is copied. It needs no
``block_table``, whose pages are multiples of 256 rows, where the KV pool hands out single rows.

``gather`` copies the runs into packed rows first, for kernels without ``seqused_k``. A third layout, in which
sequences without queries stand for the gaps, would need runs (and so queries) in ascending order, to
spare kernels that no supported version has the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention.kernels import KernelSpans, VarlenKernel
from engines.attention.spans import Spans, VarlenAttention

KeyLayout: TypeAlias = Literal["runs", "gather"]


@dataclass(frozen=True)
class FlashVarlen:
    """``repeats_heads`` copies grouped key heads for a kernel that wants as many as there are query heads."""

    name: str
    kernel: VarlenKernel
    layout: KeyLayout = "runs"
    repeats_heads: bool = False

    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        if min(spans.size, spans.max_q, spans.max_k, q.shape[0]) == 0:
            return torch.empty_like(q) if out is None else out
        # For max_q of 1 and grouped heads FlashAttention folds the group into the queries, and takes q for
        # one row per sequence, whatever cu_q says: with padding that is wrong.
        max_q = max(spans.max_q, 2)
        if self.layout == "runs":
            at = KernelSpans(spans.cu_q, spans.k_start, spans.k_len, None, max_q, spans.max_k)
            return self.kernel(q, k, v, at, out)
        rows, cu_k = packed_rows(spans, k.shape[0])
        k, v = k.index_select(0, rows), v.index_select(0, rows)
        if self.repeats_heads:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return self.kernel(q, k, v, KernelSpans(spans.cu_q, cu_k, None, None, max_q, spans.max_k), out)


def reads_pool_in_place(attention: VarlenAttention) -> bool:
    """Whether a launch costs the same whatever bound on the keys it is given: nothing is gathered up to it."""
    return isinstance(attention, FlashVarlen) and attention.layout == "runs"


def packed_rows(spans: Spans, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows of k (``num_rows`` of them) that pack the runs, and ``cu_seqlens_k`` [n + 1].

    Without host runs the number of rows is the bound n * max_k: what follows the last run is any row.
    """
    bound = spans.size * spans.max_k if spans.k_runs is None else sum(end - start for start, end in spans.k_runs)
    cu_k = F.pad(spans.k_len.cumsum(0, dtype=torch.int32), (1, 0))
    place = torch.arange(bound, dtype=torch.int32, device=cu_k.device)
    sequence = torch.searchsorted(cu_k[1:], place, right=True, out_int32=True).clamp_(max=spans.size - 1)
    rows = spans.k_start.index_select(0, sequence) + place - cu_k.index_select(0, sequence)
    return rows.clamp_(max=num_rows - 1), cu_k
