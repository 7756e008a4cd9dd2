"""Varlen attention over packed rows: one call for a whole batch of ragged sequences.

``sdpa`` is the reference backend and the CPU's: each sequence is a zero-copy view of the packed
rows, so its result cannot depend on which other sequences share the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

Run = tuple[int, int]
"""(first row, end row) of one sequence in a packed tensor."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Bidirectional attention, scale 1/sqrt(D); q [n, Lq, H, D], k and v [n, Lk, Hkv, D], mask [n, 1, 1, Lk]."""
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.transpose(1, 2)


def varlen_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run], k_runs: Sequence[Run]
) -> None:
    """Attend each q run to its k run, into ``out``; q, out [Nq, H, D], k and v [Nk, Hkv, D].

    Runs of k may lie anywhere (a KV pool), in any order; nothing is gathered or concatenated.
    """
    for (q0, q1), (k0, k1) in zip(q_runs, k_runs, strict=True):
        out[q0:q1] = sdpa(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])[0]
