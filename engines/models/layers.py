"""Layers the architectures share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = w * cast(x / rms(x)), normalised in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * y.to(x.dtype)


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) for i < D/2, in float32 and on the CPU, so that every device gets the same numbers."""
    exponent = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") * 2 / head_dim
    return 1.0 / theta**exponent


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding in the dtype of its inputs; x [N, heads, D], cos and sin [N, 1, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
