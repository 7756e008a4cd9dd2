"""Ragged attention problems, their solution in float64, and flash kernels' contract in plain torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import Spans, VarlenAttention

FILL = -3.0
"""What rows of ``out`` hold that no sequence owns."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Runs of keys as (first row, rows); rows of k and v outside them are NaN."""

    q_len: Sequence[int]
    k_runs: Sequence[tuple[int, int]]
    head_dim: int = 16
    kv_heads: int = 2
    group: int = 1
    padding_rows: int = 0
    padding_sequences: int = 0
    seed: int = 0

    def tensors(self, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, self.head_dim, generator=random, dtype=torch.float64).to(dtype)

        num_keys = max((start + length for start, length in self.k_runs), default=0) + 3
        q = draw(sum(self.q_len) + self.padding_rows, self.kv_heads * self.group)
        k, v = draw(num_keys, self.kv_heads), draw(num_keys, self.kv_heads)
        outside = torch.ones(num_keys, dtype=torch.bool)
        for start, length in self.k_runs:
            outside[start : start + length] = False
        k[outside], v[outside] = torch.nan, torch.nan
        return q.to(device), k.to(device), v.to(device)

    def spans(self, device: torch.device | str) -> Spans:
        starts, lengths = (np.array([run[i] for run in self.k_runs], dtype=np.int64) for i in range(2))
        return Spans.of_lengths(
            np.array(self.q_len, dtype=np.int64),
            starts,
            lengths,
            device=device,
            size=len(self.q_len) + self.padding_sequences,
        )

    def expected(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the definition, in float64 on the CPU; of the rows that belong to a sequence."""
        q, k, v = (x.double().cpu() for x in (q, k, v))
        out = torch.full((sum(self.q_len), *q.shape[1:]), FILL, dtype=torch.float64)
        row = 0
        for length, (start, keys) in zip(self.q_len, self.k_runs, strict=True):
            for head in range(q.shape[1]):
                own = k[start : start + keys, head // self.group]
                scores = torch.exp(q[row : row + length, head] @ own.T / math.sqrt(self.head_dim))
                weights = scores / scores.sum(dim=1, keepdim=True)
                out[row : row + length, head] = weights @ v[start : start + keys, head // self.group]
            row += length
        return out

    def error(self, backend: VarlenAttention, device: torch.device | str, dtype: torch.dtype) -> float:
        """Largest difference to the definition, in a tensor of the backend's and in one that it is given; NaN where the
        backend gives one."""
        q, k, v = self.tensors(device, dtype)
        expected, spans, given = self.expected(q, k, v), self.spans(device), torch.full_like(q, FILL)
        own = backend(q, k, v, spans)
        assert backend(q, k, v, spans, given) is given
        assert own.shape == q.shape
        return max((difference(out, expected) for out in (own, given)), key=lambda error: (error != error, error))


def difference(out: Tensor, expected: Tensor) -> float:
    """Largest, of the rows that belong to a sequence."""
    found = (out[: len(expected)].double().cpu() - expected).abs()
    return float(found.max()) if found.numel() else 0.0


def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """What FlashAttention 2's varlen forward reads and writes; rows that it does not write are NaN."""
    batch = cu_seqlens_q.numel() - 1
    assert dropout_p == 0
    assert not causal
    sizes = [(cu_seqlens_q, batch + 1), (cu_seqlens_k, batch + 1)]
    if seqused_k is not None:
        sizes.append((seqused_k, batch))
    for lengths, size in sizes:
        if lengths.dtype != torch.int32 or lengths.shape != (size,) or not lengths.is_contiguous():
            raise RuntimeError("sequence lengths must be contiguous int32")
    if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and q.shape[0] != batch:
        raise RuntimeError("folding grouped heads takes one query row per sequence")
    out = torch.full_like(q, torch.nan)
    group = q.shape[1] // k.shape[1]
    for i in range(batch):
        q0, q1 = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
        k0 = int(cu_seqlens_k[i])
        used = int(cu_seqlens_k[i + 1]) - k0 if seqused_k is None else int(seqused_k[i])
        assert q1 - q0 <= max_seqlen_q
        assert used <= max_seqlen_k
        if q1 == q0:
            continue
        if used <= 0:
            out[q0:q1] = 0
            continue
        keys, values = (x[k0 : k0 + used].repeat_interleave(group, dim=1) for x in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q[q0:q1], keys).mul(softmax_scale).softmax(dim=-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", weights, values)
    return out, None


CASES = {
    "one": Case(q_len=(7,), k_runs=((0, 7),)),
    "ragged": Case(q_len=(5, 33, 1), k_runs=((2, 40), (50, 150), (201, 3))),
    "descending": Case(q_len=(4, 4, 4), k_runs=((300, 17), (150, 129), (1, 64))),
    "shared keys": Case(q_len=(3, 6), k_runs=((10, 90), (40, 20))),
    "padding": Case(q_len=(9, 2), k_runs=((30, 12), (5, 20)), padding_rows=5, padding_sequences=3),
    "grouped": Case(
        q_len=(8, 19, 2), k_runs=((70, 31), (0, 65), (103, 2)), group=4, padding_rows=2, padding_sequences=1
    ),
    "single key head": Case(q_len=(6, 11), k_runs=((20, 40), (0, 13)), kv_heads=1, group=7),
    "single queries": Case(
        q_len=(1, 1, 1), k_runs=((9, 5), (0, 8), (20, 70)), group=2, padding_rows=1, padding_sequences=2
    ),
    "wide": Case(q_len=(40, 70), k_runs=((0, 200), (210, 90)), head_dim=128, kv_heads=4),
}
