"""The device that launches, events and allocations without a device of their own go to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, and its current stream the one that is launched to."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
