"""The memory behind ``BlockTables``: K and V of every block, of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.errors import require
from engines.models.decoder import CausalModel


class PagedPool:
    """``k`` and ``v`` [layers, blocks, block_size, Hkv, D], nobody's block included; zeros at first.

    Not unwritten memory: padding attends to nobody's block, and a NaN there would spread to no token but to its own
    next layer, from where a kernel that multiplies masked weights by V would fetch it.
    """

    def __init__(self, model: CausalModel, *, num_blocks: int, block_size: int) -> None:
        config = model.config
        shape = (config.n_layers, num_blocks + 1, block_size, config.n_kv_heads, config.head_dim)
        num_bytes = 2 * model.dtype.itemsize * config.n_layers * (num_blocks + 1) * block_size
        num_bytes *= config.n_kv_heads * config.head_dim
        try:
            self.k, self.v = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in "kv")
        except RuntimeError as error:  # of which torch.OutOfMemoryError is one
            require(
                False,
                f"num_blocks={num_blocks}: {num_bytes / 1e9:.1f} GB of K/V do not fit {model.device} ({_said(error)}): lower it",
            )
        self.block_size = block_size

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [rows, Hkv, D]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def close(self) -> None:
        """Give the memory back."""
        self.k = self.v = self.k.new_empty((self.k.shape[0], 0, *self.k.shape[2:]))


def _said(error: RuntimeError) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
