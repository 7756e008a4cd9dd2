"""The gated activation of the MLP; N rows of F hidden values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.launch import expect, expect_alike, tiles
from engines.runtime.device import on

TILE = 2048


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """[N, F] silu(gate) * up, silu rounded to the dtype before the product; gate, up [N, F], rows of any stride."""
    _check(gate, up)
    from engines.kernels.jit.swiglu import gate_rows

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
    """As ``swiglu``."""
    _check(gate, up)
    return F.silu(gate) * up


def _check(gate: Tensor, up: Tensor) -> None:
    expect(
        gate.dim() == 2 and gate.shape == up.shape and gate.stride(1) == up.stride(1) == 1,
        "gate and up [N, F] with contiguous F",
    )
    expect_alike("gate and up", gate, up)
