"""Sizes that the wrappers share, and the requests of a step that build their cache (dLLM-Serve §4.5)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def power_of_two(count: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, count - 1).bit_length()


def tiles(count: int, size: int) -> int:
    return -(-count // size)


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

    def rows(self, i: int, context: Tensor) -> Tensor:
        """Packed rows of context indices of request i."""
        behind = context >= self.block_start[i]
        return self.run_start[i] + context + torch.where(behind, self.window_len[i], 0)
