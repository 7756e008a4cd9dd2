"""Forwards captured beforehand, by the size of the steps they hold, each with a buffer for the metadata of a step.

A step is padded to the size of a graph: its metadata is copied into the graph's buffer, and one launch does the rest.
All graphs share one pool of memory and one stream (``CudaRecorder``), which is right because they never run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engines.runtime.recorder import Recorder, Recording
from engines.runtime.rows import Ints
from engines.runtime.staging import Staging

Key = TypeVar("Key", bound=Hashable)


class Graphs(Generic[Key]):
    def __init__(self, recorder: Recorder, staging: Staging, device: torch.device) -> None:
        self._recorder, self._staging, self._device = recorder, staging, device
        self._graphs: dict[Key, tuple[Tensor, Recording]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._graphs

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self._graphs)

    def record(self, key: Key, nothing: Sequence[Ints], forward: Callable[[Tensor], Tensor]) -> None:
        """Capture ``forward`` over a buffer of metadata, at first that of a step of this size which computes nothing.

        Memory and the compilation of kernels are paid for here, not in a step.
        """
        numbers = torch.zeros(sum(array.size for array in nothing), dtype=torch.int64, device=self._device)
        self._staging.fill(numbers, nothing)
        self._graphs[key] = numbers, self._recorder.record(partial(forward, numbers))

    def replay(self, key: Key, metadata: Sequence[Ints]) -> Tensor:
        """What the forward returns of a step; overwritten by the next step of this size."""
        numbers, recording = self._graphs[key]
        self._staging.fill(numbers, metadata)
        return recording.replay()

    def close(self) -> None:
        """Release every graph; none holds a step any more."""
        while self._graphs:
            _, (_, recording) = self._graphs.popitem()
            recording.release()
