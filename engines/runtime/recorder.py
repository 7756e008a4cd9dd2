"""What captures a forward once and does it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Recording(Protocol):
    """A forward that can be done again, on the same memory."""

    def replay(self) -> Tensor:
        """What the forward returned; overwritten by the next replay."""
        ...

    def release(self) -> None:
        """Give the memory back, and whatever a communicator waits for; it cannot be replayed any more."""
        ...


class Recorder(Protocol):
    def record(self, forward: Callable[[], Tensor]) -> Recording: ...


@lru_cache(maxsize=64)
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all captures on a device: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream it has
    met, until the process ends."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """All graphs share one pool of memory, which is right because they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(device)

    def record(self, forward: Callable[[], Tensor]) -> Recording:
        # Once outside: libraries set up and kernels compile on first use, which a capture forbids.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, go on asking the device.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = forward()
        return _CudaRecording(graph, out)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, out: Tensor) -> None:
        self._graph, self._out = graph, out

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._out

    def release(self) -> None:
        self._graph.reset()
        del self._out
