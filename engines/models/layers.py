"""Layers the architectures share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedOps(NamedTuple):
    """Kernels that take the place of several operators each; None where torch's serve (``fuse``)."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    """(x [N, d], weight [d], eps) -> [N, d]"""
    rotate: Callable[..., None] | None = None
    """(q [N, H, D], k [N, Hkv, D], cos, sin [N, 1, D], full_precision=bool), in place"""
    swiglu: Callable[[Tensor, Tensor], Tensor] | None = None
    """(gate, up [N, hidden]) -> silu(gate) * up"""


def fuse(model: nn.Module, ops: FusedOps) -> None:
    """Have a model's layers use these kernels from now on."""
    for module in model.modules():
        if hasattr(type(module), "fused"):
            module.fused = ops  # type: ignore[assignment]


class RMSNorm(nn.Module):
    """y = w * cast(x / rms(x)), normalised in float32."""

    fused = FusedOps()

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.shape = (width,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.fused.rms_norm is not None:
            return self.fused.rms_norm(x.reshape(-1, self.shape[0]), self.weight, self.eps).view(x.shape)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        y = F.rms_norm(x.float(), self.shape, None, self.eps)
        return self.weight * y.to(x.dtype)

    __call__ = forward


class Linear(nn.Linear):
    """No bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    # A module's hooks take as long to look for as the product of a few rows takes.
    __call__ = forward


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) for i < D/2, in float32 and on the CPU, so that every device gets the same numbers."""
    exponent = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") * 2 / head_dim
    return 1.0 / theta**exponent


def rotary_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [N, 1, D] of angles [N, D/2] for ``rotate_halves``; sin is negated in its first half."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding in the dtype of its inputs; x [N, heads, D], cos and sin [N, 1, D] of
    ``rotary_tables``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1).mul_(sin).add_(x * cos)
