"""The memory of this machine, and how this process keeps it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SETTLED = "REPRO_SETTLED"
"""The variable that lists those of the environment which we set and no user."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of two settings."""


def settled(environment: Mapping[str, str]) -> set[str]:
    """Names of the variables that we set and no user, and of the one that lists them; not for the programs of others."""
    return {SETTLED, *filter(None, environment.get(SETTLED, "").split(","))}


def machine_memory_bytes() -> int | None:
    """None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" not in names or "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def without_collection() -> Iterator[None]:
    """Put off collecting garbage in this process.

    Only a caller that finds the collector on turns it off, and on again: callers within each other, and those of several threads, leave
    it as it was before the first.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_freed_memory() -> bool:
    """Have this process keep what a step frees for the next one; whether the C library knows how.

    glibc gives large blocks back at once, and the system clears every page of them when it is asked again: a tenth of the
    time of a CPU's steps.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # The first before the second: either alone ends what glibc learns by itself, and is slower than nothing.
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)) and bool(
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
    )
