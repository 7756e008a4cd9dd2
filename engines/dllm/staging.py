"""Host arrays to the device, all of a step's in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BUFFERS = 3
"""One being filled, and those of the steps a device may lag behind."""


class Staging:
    """On CUDA a transfer leaves from page-locked memory and is not waited for; on a CPU arrays are used as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._next = 0

    def send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """The arrays as int64 tensors of their shapes; those of one call share memory on CUDA."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [array.size for array in arrays]
        target = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self.fill(target, arrays)
        return [part.view(array.shape) for part, array in zip(target.split(sizes), arrays, strict=True)]

    def fill(self, target: Tensor, arrays: Sequence[NDArray[np.int64]]) -> None:
        """The arrays one behind the other, from the start of ``target`` [at least their sizes]."""
        size = sum(array.size for array in arrays)
        if self.device.type == "cpu":
            target[:size] = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
            return
        buffer, sent = self._free_buffer(size)
        np.concatenate([array.ravel() for array in arrays], out=buffer[:size].numpy())
        target[:size].copy_(buffer[:size], non_blocking=True)
        sent.record()

    def _free_buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        if not self._buffers:
            self._buffers = [torch.empty(0, dtype=torch.int64) for _ in range(NUM_BUFFERS)]
            self._sent = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        place, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        # Long over unless more transfers than buffers are made per step.
        self._sent[place].synchronize()
        if self._buffers[place].numel() < size:
            self._buffers[place] = torch.empty(max(size, 4096) * 2, dtype=torch.int64, pin_memory=True)
        return self._buffers[place], self._sent[place]
