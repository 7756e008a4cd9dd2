"""Half-split rotary embedding of q and k, in place and in one launch.

Shapes: N packed rows, H / Hkv heads of width D. cos and sin are those of
``engines.models.layers.rotary_tables``: the halves of cos are equal, those of sin opposite; one of each is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.kernels.launch import DTYPES, expect, expect_alike, power_of_two, tiles
from engines.models.layers import rotate_halves
from engines.runtime.device import on

HEADS = 16
"""Heads a program rotates."""


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, full_precision: bool) -> None:
    """q [N, H, D] and k [N, Hkv, D], rows of any stride, by cos and sin [N, 1, D].

    ``full_precision`` rotates in float32 and rounds once (LLaDA); else cos, sin and every operation are rounded to
    q's dtype (Dream).
    """
    _check(q, k, cos, sin)
    from engines.kernels.jit.rotary import rotate_rows

    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    if rows == 0:
        return
    with on(q.device):
        # Products and sums are rounded one by one, as torch does.
        rotate_rows[(rows, tiles(heads, HEADS) + tiles(kv_heads, HEADS))](
            q,
            k,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(0),
            sin.stride(0),
            Q_HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=width // 2,
            FULL=full_precision,
            HEADS=HEADS,
            WIDTH=power_of_two(width // 2),
            num_warps=4,
            enable_fp_fusion=False,
        )


def rotate_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, full_precision: bool) -> None:
    """As ``rotate``."""
    _check(q, k, cos, sin)
    dtype = torch.float32 if full_precision else q.dtype
    cos, sin = cos.to(dtype), sin.to(dtype)
    for x in (q, k):
        x.copy_(rotate_halves(x.to(dtype), cos, sin))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    rows, _, width = q.shape
    expect(
        k.dim() == 3 and k.shape[0] == rows and k.shape[2] == width and width % 2 == 0,
        "q [N, H, D] and k [N, Hkv, D], even D",
    )
    expect_alike("q and k", q, k)
    expect(q.stride(2) == k.stride(2) == 1, "q and k with contiguous D")
    expect(
        cos.shape == sin.shape
        and cos.shape == (rows, 1, width)
        and cos.dtype == sin.dtype
        and cos.dtype in DTYPES
        and cos.device == sin.device == q.device
        and cos.stride(2) == sin.stride(2) == 1,
        "cos and sin [N, 1, D] on the device of q, with contiguous D",
    )
