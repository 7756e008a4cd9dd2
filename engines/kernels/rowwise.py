"""Row-wise parts of a layer: RMSNorm, with or without a residual addition before it, rotary embedding, and the MLP's gated activation. The
embedding is half-split, of q and k in place in one launch.

Shapes: N packed rows of width d, H / Hkv heads of width D, F hidden values. cos and sin come from ``engines.models.layers.rotary_tables``.
The halves of cos are equal and those of sin opposite, so kernels read one half of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.pack import power_of_two, tiles
from engines.models.layers import rotate_halves
from engines.runtime.device import on


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Return [N, d] weight * cast(x / rms(x)), normalised in float32, like ``engines.models.layers.RMSNorm``.

    x is [N, d] with rows of any stride, weight [d]. With delta [N, d], x first becomes x + delta in place, rounded to its dtype.
    """
    from engines.kernels.jit import normalize_rows

    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows > 0:
        padded = power_of_two(width)
        with on(x.device):
            normalize_rows[(rows,)](
                out,
                x,
                weight,
                delta,
                x.stride(0),
                0 if delta is None else delta.stride(0),
                eps,
                D=width,
                ADDS=delta is not None,
                WIDTH=padded,
                num_warps=min(16, max(1, padded // 512)),
                enable_fp_fusion=False,
            )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    if delta is not None:
        x += delta
    y = F.rms_norm(x.float(), (x.shape[1],), None, eps)
    return weight * y.to(x.dtype)


HEADS = 16
"""Heads that a program rotates."""


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, full_precision: bool) -> None:
    """Rotate q [N, H, D] and k [N, Hkv, D], rows of any stride, in place, by cos and sin [N, 1, D].

    ``full_precision`` rotates in float32 and rounds once (LLaDA). Otherwise cos, sin and every operation are rounded to q's dtype (Dream).
    """
    from engines.kernels.jit import rotate_rows

    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    if rows == 0:
        return
    with on(q.device):
        # Products and sums are rounded one by one, as torch does.
        rotate_rows[(rows, tiles(heads, HEADS) + tiles(kv_heads, HEADS))](
            *(q, k, cos, sin),
            *(*q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0)),
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
    dtype = torch.float32 if full_precision else q.dtype
    cos, sin = cos.to(dtype), sin.to(dtype)
    for x in (q, k):
        x.copy_(rotate_halves(x.to(dtype), cos, sin))


TILE = 2048


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return [N, F] silu(gate) * up, with silu rounded to the dtype before the product; gate, up [N, F], rows of any stride."""
    from engines.kernels.jit import gate_rows

    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    count = tiles(width, TILE)
    with on(gate.device):
        gate_rows[(rows * count,)](
            out, gate, up, gate.stride(0), up.stride(0), width, count, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
    return out


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
