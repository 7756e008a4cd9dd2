"""``sdpa-padded``: ragged sequences as one padded batch with a key mask, where no flash kernel serves.

It costs copies of the keys, the masked work of sequences shorter than the longest, and for grouped heads a
copy of the keys per group: ``enable_gqa`` would have the fused kernel that takes a mask refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engines.attention.reference import sdpa
from engines.attention.spans import Spans, placed


@dataclass(frozen=True)
class SdpaPadded:
    """``memory_limit`` bounds the bytes of gathered keys and scores: sequences beyond go into further calls."""

    memory_limit: int = 1 << 30

    name: ClassVar[str] = "sdpa-padded"
    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        n, max_q, max_k = spans.size, spans.max_q, spans.max_k
        if min(n, max_q, max_k, q.shape[0]) == 0:
            return torch.empty_like(q) if out is None else out
        place = torch.arange(max(max_q, max_k, q.shape[0]), dtype=torch.int32, device=q.device)
        # Past its end a run repeats its last row: whatever lies behind it may be NaN, which no mask removes.
        last_key = (spans.k_len - 1).clamp_(min=0)
        key_rows = (spans.k_start[:-1, None] + torch.minimum(place[:max_k], last_key[:, None])).clamp_(
            max=k.shape[0] - 1
        )
        mask = (place[:max_k] < spans.k_len[:, None])[:, None, None, :]
        query_rows = (spans.cu_q[:-1, None] + place[:max_q]).clamp_(max=q.shape[0] - 1)

        step = self._sequences_at_once(q, k, spans)
        parts = [
            sdpa(
                take(q, query_rows[i : i + step]),
                take(k, key_rows[i : i + step]),
                take(v, key_rows[i : i + step]),
                mask[i : i + step],
            ).flatten(0, 1)
            for i in range(0, n, step)
        ]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)

        row = place[: q.shape[0]]
        # Rows past cu_q[-1] belong to no sequence: n.
        sequence = torch.searchsorted(spans.cu_q[1:], row, right=True, out_int32=True)
        where = (sequence * max_q + row - spans.cu_q.index_select(0, sequence)).clamp_(max=n * max_q - 1)
        return placed(padded.index_select(0, where), out)

    def _sequences_at_once(self, q: Tensor, k: Tensor, spans: Spans) -> int:
        heads, width = q.shape[1], q.shape[2]
        copies = 2 if k.shape[1] == heads else 2 + 2 * k.shape[1] / heads
        keys = copies * heads * width * q.element_size()
        # Without a fused kernel, scores and their softmax are held in float32.
        scores = 2 * heads * spans.max_q * 4
        return max(1, int(self.memory_limit // (spans.max_k * (keys + scores))))


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [n, L] of x [N, H, D]: [n, L, H, D]."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
