"""RMSNorm of rows, alone or with the residual addition before it; N rows of width d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.launch import DTYPES, expect, power_of_two
from engines.runtime.device import on

_MAX_WIDTH = 32768
"""A row is held in registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """[N, d] weight * cast(x / rms(x)), normalised in float32; as ``engines.models.layers.RMSNorm``.

    x [N, d], rows of any stride; weight [d]. With delta [N, d], x becomes x + delta in place, rounded to its
    dtype, and that is normalised.
    """
    _check(x, weight, delta)
    from engines.kernels.jit.rmsnorm import normalize_rows

    rows, width = x.shape
    expect(width <= _MAX_WIDTH, f"rows of {_MAX_WIDTH} at most")
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
    """As ``rms_norm``."""
    _check(x, weight, delta)
    if delta is not None:
        x += delta
    y = F.rms_norm(x.float(), (x.shape[1],), None, eps)
    return weight * y.to(x.dtype)


def _check(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    expect(x.dim() == 2 and x.dtype in DTYPES and x.stride(1) == 1, "x [N, d] of a floating dtype with contiguous d")
    expect(
        weight.shape == x.shape[1:]
        and weight.is_contiguous()
        and weight.dtype == x.dtype
        and weight.device == x.device,
        "a contiguous weight [d] of the dtype and device of x",
    )
    if delta is not None:
        expect(
            delta.shape == x.shape and delta.stride(1) == 1 and delta.dtype == x.dtype and delta.device == x.device,
            "delta [N, d] of the dtype and device of x, with contiguous d",
        )
