"""``sdpa``, the reference backend, and a CPU's that has no compiler: each sequence is a zero-copy view of the packed rows, so
its result cannot depend on which other sequences share the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention.spans import Run, Spans


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
