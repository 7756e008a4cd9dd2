"""Captured forwards, one for each size of a step, each with a buffer for a step's metadata.

A step is padded to the size of a graph: its metadata is copied into the graph's buffer, and one launch does the rest. All graphs share one
pool of memory and one stream (``CudaRecorder``), which is right because they never run at once.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engines.runtime.device import Staging
from engines.runtime.rows import Ints


class Recording(Protocol):
    """A forward that can run again, on the same memory."""

    def replay(self) -> Tensor:
        """Run the forward again and return its result, which the next replay overwrites."""

    def release(self) -> None:
        """Free the memory, and anything that a communicator waits for; it cannot be replayed any more."""


class Recorder(Protocol):
    def record(self, forward: Callable[[], Tensor]) -> Recording: ...


@lru_cache(maxsize=64)
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all captures on a device. cuBLAS keeps a workspace (32 MiB on Hopper) for every stream it has met, until the
    process ends."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Captures CUDA graphs. All share one pool of memory, which is right because they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = capture_stream(device)

    def record(self, forward: Callable[[], Tensor]) -> Recording:
        # Run once outside the capture: libraries set up and kernels compile on first use, which a capture forbids.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, keep querying the device.
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
        """Capture ``forward`` over a buffer of metadata, which first holds that of a step of this size that computes nothing.

        This pays for memory and the compilation of kernels, so that no step does.
        """
        numbers = torch.zeros(sum(array.size for array in nothing), dtype=torch.int64, device=self._device)
        self._staging.fill(numbers, nothing)
        self._graphs[key] = numbers, self._recorder.record(partial(forward, numbers))

    def replay(self, key: Key, metadata: Sequence[Ints], amend: Callable[[Tensor], None] | None = None) -> Tensor:
        """Run a step and return the forward's result, which the next step of this size overwrites. ``amend`` writes the metadata that only
        the device knows to the buffer."""
        numbers, recording = self._graphs[key]
        self._staging.fill(numbers, metadata)
        if amend is not None:
            amend(numbers)
        return recording.replay()

    def close(self) -> None:
        """Release every graph; afterwards none can run a step."""
        while self._graphs:
            _, (_, recording) = self._graphs.popitem()
            recording.release()
