"""Has the C library keep what is freed: without it a step of a thousand rows takes up to a third longer on a CPU.

Activations of that size come from the system anew for every operator, and each page of them is cleared when it is first
touched. How often depends on the sizes of the steps before, which a comparison of step times would read as an effect.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of ``mallopt``, as in glibc's malloc.h."""
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """For this process, for good. False where the C library has no ``mallopt``."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(option, _LARGEST) == 1 for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
