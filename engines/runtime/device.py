"""Device work of both token engines: make it the current one, hold the pool's K and V, and send a step's arrays to it."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engines.errors import UserError, first_line
from engines.runtime.rows import BlockTables


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one: launches, events and allocations that name no device go to it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Model(Protocol):
    """The attributes of a model that the pool reads."""

    kv_heads_here: int

    @property
    def config(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class PoolTensors:
    """The memory of K and V that an allocator hands out, as rows of a ``KvPool`` or blocks of ``BlockTables``.

    ``k`` and ``v`` are [layers, *places, Hkv, D], with the heads that this process holds.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        # Making views in each step would cost more than using them.
        self._rows = [(k[layer].flatten(0, -3), v[layer].flatten(0, -3)) for layer in range(len(k))]

    @classmethod
    def of(cls, model: Model, *places: int) -> "PoolTensors":
        """Make a pool in the model's dtype and on its device; its memory is unwritten."""
        return cls._allocate(torch.empty, model, places)

    @classmethod
    def _allocate(cls, make: Callable[..., Tensor], model: Model, places: Sequence[int]) -> "PoolTensors":
        shape, weight = model.config, next(model.parameters())
        size = (shape.n_layers, *places, model.kv_heads_here, shape.head_dim)
        k, v = (make(size, dtype=weight.dtype, device=weight.device) for _ in "kv")
        return cls(k, v)

    @classmethod
    def of_blocks(cls, model: Model, tables: BlockTables) -> "PoolTensors":
        """Make the memory of every block, padding's included, filled with zeros. Raises UserError if it does not fit.

        The memory must be written: padding attends to its own block. A NaN there would reach no token, but padding's own next layer. From
        there a kernel that multiplies masked weights by V would fetch it.
        """
        try:
            return cls._allocate(zeros, model, (tables.num_blocks + 1, tables.block_size))
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise UserError(
                f"num_tokens={tables.num_blocks * tables.block_size}: their K/V do not fit the device ({first_line(error)}): lower it"
            ) from error

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [rows, Hkv, D]."""
        return self._rows[layer]

    @property
    def num_rows(self) -> int:
        return self.k.shape[1:-2].numel()

    def fill_with_zeros(self) -> None:
        self.k.zero_()
        self.v.zero_()

    def close(self) -> None:
        """Give the memory back; the rows are gone."""
        self._rows = []
        self.k = self.v = self.k.new_empty((self.k.shape[0], 0, *self.k.shape[2:]))


CACHE_LINE = 64


def zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like ``torch.zeros``. A CPU's system provides memory only as it is written, so a pool takes only what it has used."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(*size)


Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Called with pool_k, pool_v [R, Hkv, D] of a layer, rows [M], k, v [M, Hkv, D]; does pool[rows[i]] = row i."""


def store_by_index(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    pool_k.index_copy_(0, rows, k)
    pool_v.index_copy_(0, rows, v)


class Staging:
    """Sends host arrays to the device, all of a step's in one transfer. In a CPU's memory it uses the arrays as they are."""

    def send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """Return the arrays as int64 tensors of the same shapes."""
        return [torch.from_numpy(array) for array in arrays]

    def fill(self, target: Tensor, arrays: Sequence[NDArray[np.int64]]) -> None:
        """Write the arrays, one after the other, to the start of ``target`` [at least their sizes]."""
        flat = np.concatenate([array.ravel() for array in arrays])
        target[: len(flat)] = torch.from_numpy(flat)

    def ints(self, values: Sequence[int] | NDArray[Any]) -> Tensor:
        """Return the values as int64 on the device."""
        return self.send(np.array(values, dtype=np.int64))[0]

    def floats(self, values: NDArray[Any]) -> Tensor:
        """Return the values as float64 on the device."""
        (bits,) = self.send(np.ascontiguousarray(values, dtype=np.float64).view(np.int64))
        return bits.view(torch.float64)


class PinnedStaging(Staging):
    """Sends from page-locked memory without waiting; tensors of one ``send`` share memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        sizes = [array.size for array in arrays]
        target = torch.empty(sum(sizes), dtype=torch.int64, device=self.device)
        self.fill(target, arrays)
        return [part.view(array.shape) for part, array in zip(target.split(sizes), arrays, strict=True)]

    def fill(self, target: Tensor, arrays: Sequence[NDArray[np.int64]]) -> None:
        size = sum(array.size for array in arrays)
        if size == 0:
            return
        buffer, transfer = self._free_buffer(size)
        np.concatenate([array.ravel() for array in arrays], out=buffer[:size].numpy())
        target[:size].copy_(buffer[:size], non_blocking=True)
        transfer.record()

    def _free_buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a buffer whose transfer is over. There are as many as the device's lag ever needed (``step_timer.MAX_IN_FLIGHT``)."""
        for i, (buffer, transfer) in enumerate(self._buffers):
            if buffer.numel() >= size and transfer.query():
                # The least recently used comes first.
                self._buffers.append(self._buffers.pop(i))
                return buffer, transfer
        self._buffers.append(self._new_buffer(1 << max(12, (size - 1).bit_length())))
        return self._buffers[-1]

    def _new_buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        return torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event()


def staging_to(device: torch.device) -> Staging:
    return PinnedStaging(device) if device.type == "cuda" else Staging()


SMALLER_THAN_NAMED = 0.93
"""A card may report up to 7 % less memory than it is sold with (ECC, driver)."""


def check_memory(device: torch.device, memory_bytes: int | None, allocator: Any = torch.cuda) -> int:
    """Return the bytes of memory of a CUDA device. Raises UserError for a limit above that."""
    index = allocator.current_device() if device.index is None else device.index
    total = int(allocator.get_device_properties(index).total_memory)
    if memory_bytes is not None and total < SMALLER_THAN_NAMED * memory_bytes:
        raise UserError(
            f"memory_bytes={memory_bytes}: the device has {total}: give a --memory-limit of at most {total / 1e9:.0f}GB"
        )
    return total


def limit_memory(device: torch.device, memory_bytes: int | None, allocator: Any = torch.cuda) -> int | None:
    """Let torch allocate at most ``memory_bytes`` on a CUDA device from here on; None allows all of it.

    The parts of a memory plan sum to that: weights, activations, logits, KV and the guard band, which serves fragmentation and workspaces.
    The CUDA context, some 0.5 GB outside torch's allocator, comes on top. Blocks that torch keeps for later count too, so we give them back
    first. Returns the bytes allowed, None without a limit: on a CPU the plan alone holds.

    Raises UserError for a limit that the card does not have.
    """
    if device.type != "cuda":
        return None
    index = allocator.current_device() if device.index is None else device.index
    total = check_memory(device, memory_bytes, allocator)
    # Unreachable objects count until they are collected.
    gc.collect()
    allocator.empty_cache()
    allowed = total if memory_bytes is None else min(memory_bytes, total)
    allocator.set_per_process_memory_fraction(allowed / total, index)
    return None if memory_bytes is None else allowed
