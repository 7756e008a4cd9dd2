"""Sizes and checks that the wrappers share, and the requests of a step that build their cache (dLLM-Serve §4.5)."""

from __future__ import annotations

from typing import NamedTuple

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


class Building(NamedTuple):
    """[n] int64 each, on the device.

    Context index c of a request is position c before its block and c + window_len behind; position p
    is packed row run_start + p. A request with kept 0 writes nothing, one with num_context 0 has no
    scores: padding of a fixed-size step is all zeros.
    """

    run_start: Tensor
    block_start: Tensor
    block_len: Tensor
    window_len: Tensor
    num_context: Tensor
    kept: Tensor
    kv_start: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Building:
        """Views of a [7, n] table, which one transfer brings to the device."""
        return cls(*table.unbind(0))

    def check(self, device: torch.device) -> None:
        shape = self.kept.shape
        expect(
            len(shape) == 1
            and all(t.shape == shape and t.dtype == torch.int64 and t.device == device for t in self)
            and all(t.stride(0) == 1 for t in self),
            "contiguous int64 [n] tensors of the requests, on the device of q, k and v",
        )

    def rows(self, i: int, context: Tensor) -> Tensor:
        """Packed rows of context indices of request i."""
        behind = context >= self.block_start[i]
        return self.run_start[i] + context + torch.where(behind, self.window_len[i], 0)
