"""Triton kernels of the CUDA path (``jit``), their wrappers, each beside its reference in torch; those of a CPU are in ``host``, C++.

A wrapper launches, and never falls back; shapes are as its docstring says. Callers ask ``available`` and otherwise
call the reference, which has the same signature. Nothing here reads from the device: wrappers may run
inside CUDA graph capture once a call of the same shapes outside it has compiled them. Block sizes are
fixed, so a row's numbers do not depend on what else is in the launch. Importing a module other than
``jit`` does not import triton.
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
    # In its interpreter triton runs kernels on any device, for tests; it looks at the variable once, when it is imported.
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    return _installed() and (device.type == "cuda" or is_interpreted)
