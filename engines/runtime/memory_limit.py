"""Holds a process to a part of a GPU's memory, so that a large card stands in for a smaller one."""

import gc
from typing import Any

import torch

from engines.errors import UserError

SMALLER_THAN_NAMED = 0.93
"""A card reports up to 7 % less memory than it is sold with (ECC, driver)."""


def check_memory(device: torch.device, memory_bytes: int | None, allocator: Any = torch.cuda) -> int:
    """The bytes that a CUDA device has. Refuses a limit that it does not have."""
    index = allocator.current_device() if device.index is None else device.index
    total = int(allocator.get_device_properties(index).total_memory)
    if memory_bytes is not None and total < SMALLER_THAN_NAMED * memory_bytes:
        raise UserError(
            f"memory_bytes={memory_bytes}: the device has {total}: give a --memory-limit of at most {total / 1e9:.0f}GB"
        )
    return total


def limit_memory(device: torch.device, memory_bytes: int | None, allocator: Any = torch.cuda) -> int | None:
    """Let torch allocate at most ``memory_bytes`` on a CUDA device from here on, None for all there is.

    A memory plan's parts (weights, activations, logits, KV and the guard band, which fragmentation and workspaces
    live in) sum to that; the CUDA context, some 0.5 GB outside torch's allocator, comes on top. Blocks torch keeps
    for later are given back first: they count too. Returns the bytes allowed, None without a limit: on a CPU the
    plan alone holds.

    Refuses a limit that the card does not have.
    """
    if device.type != "cuda":
        return None
    index = allocator.current_device() if device.index is None else device.index
    total = check_memory(device, memory_bytes, allocator)
    # What nobody can reach any more counts until it is collected.
    gc.collect()
    allocator.empty_cache()
    allowed = total if memory_bytes is None else min(memory_bytes, total)
    allocator.set_per_process_memory_fraction(allowed / total, index)
    return None if memory_bytes is None else allowed
