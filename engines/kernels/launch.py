"""What the wrappers share."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def power_of_two(count: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, count - 1).bit_length()


def tiles(count: int, size: int) -> int:
    return -(-count // size)


def expect(condition: bool, wanted: str) -> None:
    """Raises ValueError: a caller's mistake, no user's."""
    if not condition:
        raise ValueError(f"wanted {wanted}")


def expect_alike(names: str, first: Tensor, *others: Tensor) -> None:
    """One floating dtype and device for all."""
    expect(
        first.dtype in DTYPES and all(t.dtype == first.dtype and t.device == first.device for t in others),
        f"{names} in one floating dtype, on one device",
    )
