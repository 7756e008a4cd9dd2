"""``host``, a CPU's: one call for all sequences of a step, by a kernel that is compiled for the machine.

``sdpa``, the reference backend, and a CPU's that has no compiler: each sequence is a zero-copy view of the packed rows, so
its result cannot depend on which other sequences share the step.

``sdpa-padded``: ragged sequences as one padded batch with a key mask, where no flash kernel serves.

It costs copies of the keys, the masked work of sequences shorter than the longest, and for grouped heads a
copy of the keys per group: ``enable_gqa`` would have the fused kernel that takes a mask refuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention.spans import Run, Spans, placed
from engines.kernels.host import Runs, attend_runs


@dataclass(frozen=True, kw_only=True)
class HostVarlen:
    """A sequence's result does not depend on which others share the step."""

    name: ClassVar[str] = "host"
    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
            out[spans.cu_q[-1] :] = 0  # whatever lies there may be slow to compute with
        return attend_runs(q, k, v, Runs(spans.cu_q[:-1], spans.cu_q[1:], spans.k_start[:-1], spans.k_len), out)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Scale 1/sqrt(D); q [n, Lq, H, D], k and v [n, Lk, Hkv, D]; a mask [n, 1, 1 or Lq, Lk] is of keys that are seen, or
    to be added to the scores. ``is_causal``: query i sees keys 0 … i."""
    group = q.shape[2] // k.shape[2]
    shares_keys = group > 1 and q.device.type == "cpu"
    if group > 1 and not shares_keys:  # CUDA's fused kernels refuse grouped heads together with a mask
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=shares_keys,
    )
    return out.transpose(1, 2)


def varlen_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run], k_runs: Sequence[Run]
) -> None:
    """Attend each q run to its k run, into ``out``; q, out [Nq, H, D], k and v [Nk, Hkv, D].

    Runs of k may lie anywhere (a KV pool), in any order; nothing is gathered or concatenated.
    """
    for (q0, q1), (k0, k1) in zip(q_runs, k_runs, strict=True):
        if q0 < q1:
            out[q0:q1] = sdpa(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])[0]


@dataclass(frozen=True)
class Sdpa:
    """``varlen_attention`` behind the protocol: one launch per sequence."""

    name: ClassVar[str] = "sdpa"
    needs_host_runs: ClassVar[bool] = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        assert spans.q_runs is not None, "sdpa needs host runs"
        assert spans.k_runs is not None
        out = torch.empty_like(q) if out is None else out
        varlen_attention(out, q, k, v, spans.q_runs, spans.k_runs)
        return out


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
