"""Causal attention over paged K and V, for all sequences of a step in one launch: where no flash kernel reads block tables
(torch before 2.12 without flash-attn).

Shapes: N query rows of n sequences, H / Hkv heads of width D, blocks of B tokens of K and V [blocks, B, Hkv, D]. Sequence i has
the query rows ``cu_q[i]`` to ``cu_q[i + 1]``, the last of its ``used_k[i]`` tokens, which lie in the blocks ``table[i]``. Rows of no
sequence hold anything.
"""

from math import log2

import torch
from torch import Tensor

from engines.kernels.launch import expect, expect_alike, power_of_two, tiles
from engines.runtime.device import on

_KEYS = 64
_ROWS, _FEW_ROWS = 64, 16
"""Rows of a program, each a query of one head; few where a sequence has no more."""


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, used_k: Tensor, table: Tensor, *, max_q: int
) -> Tensor:
    """[N, H, D]; ``max_q`` bounds the queries of a sequence."""
    _check(q, k, v, cu_q, used_k, table)
    from engines.kernels.jit import paged_causal

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    n, kv_heads, width = len(used_k), k.shape[2], q.shape[2]
    if min(n, max_q, len(q)) == 0:
        return out
    group = q.shape[1] // kv_heads
    rows = _FEW_ROWS if max_q * group <= _FEW_ROWS else _ROWS
    with on(q.device):
        paged_causal[(tiles(max_q * group, rows), kv_heads, n)](
            out,
            q,
            k,
            v,
            cu_q,
            used_k,
            table,
            table.stride(0),
            log2(torch.e) * width**-0.5,
            q.stride(0),
            q.stride(1),
            k.stride(1),
            k.stride(2),
            BLOCK=k.shape[1],
            D=width,
            GROUP=group,
            ROWS=rows,
            KEYS=_KEYS,
            WIDTH=max(16, power_of_two(width)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
    return out


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, used_k: Tensor, table: Tensor, *, max_q: int
) -> Tensor:
    """As ``paged_attention``, one sequence after the other; rows of no sequence are zero."""
    _check(q, k, v, cu_q, used_k, table)
    out = torch.zeros_like(q)
    group, block = q.shape[1] // k.shape[2], k.shape[1]
    first = cu_q.tolist()
    for i, used in enumerate(used_k.tolist()):
        own = slice(first[i], first[i + 1])
        count = own.stop - own.start
        if count == 0:
            continue
        blocks = table[i, : tiles(used, block)].long()
        keys, values = (x[blocks].flatten(0, 1)[:used].repeat_interleave(group, dim=1).float() for x in (k, v))
        hidden = torch.ones(count, used, dtype=torch.bool, device=q.device).tril(used - count).logical_not()
        scores = torch.einsum("qhd,khd->hqk", q[own].float(), keys) * q.shape[2] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[own] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, used_k: Tensor, table: Tensor) -> None:
    expect(
        q.dim() == 3 and k.dim() == 4 and q.shape[2] == k.shape[3] and q.shape[1] % k.shape[2] == 0,
        "q [N, H, D] and k [blocks, B, Hkv, D], H a multiple of Hkv",
    )
    expect(k.shape == v.shape and k.stride() == v.stride(), "v as k")
    expect_alike("q, k and v", q, k, v)
    expect(
        q.stride(2) == k.stride(3) == 1 and k.stride(0) == k.shape[1] * k.stride(1),
        "rows of contiguous D, whole blocks",
    )
    bounds = (cu_q, used_k, table)
    expect(all(each.dtype == torch.int32 and each.device == q.device for each in bounds), "int32 bounds on the device")
    expect(len(cu_q) == len(used_k) + 1 == len(table) + 1 and table.stride(1) == 1, "bounds of as many sequences")
