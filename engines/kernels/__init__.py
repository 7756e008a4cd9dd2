"""Triton kernels of the CUDA path (``jit``) and their wrappers, each beside its reference in torch. Kernels for CPUs, in C++, are in
``host``.

A wrapper launches, and never falls back; its docstring gives the shapes. Callers ask ``available``, and otherwise call the reference, which
has the same signature. Nothing here reads from the device. Wrappers may run inside CUDA graph capture, once a call of the same shapes
outside it has compiled them. Block sizes are fixed, so a row's numbers do not depend on the rest of the launch. Only importing ``jit``
imports triton.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def available(device: "torch.device") -> bool:
    """Whether the kernels can run on tensors of ``device``."""
    # Triton's interpreter, for tests, runs kernels on any device. Triton reads the variable once, at import.
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    return _installed() and (device.type == "cuda" or is_interpreted)
