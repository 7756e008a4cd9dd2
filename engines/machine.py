"""This process on this machine: how much memory there is and how it is kept, and signals held back while something has to be whole."""

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
    mallopt = _of_c_library("mallopt")
    # The first before the second: either alone ends what glibc learns by itself, and is slower than nothing.
    return mallopt is not None and (
        any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)) and bool(mallopt(M_TRIM_THRESHOLD, 1 << 30))
    )


def give_back_freed_memory() -> None:
    """Have the system take what this process has freed and keeps, where the C library knows how."""
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _of_c_library(name: str) -> Any:
    import ctypes

    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come in the body take effect after it. A child that is being started reads from its parent what it
    is: where that ends before it is told, the child says so in a traceback, and nobody knows that it has to be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    # One that is ignored, here and in children, or not Python's to handle stays as it is.
    before = {number: found for number in _ENDING if (found := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Cores that the process may run on, and no more than its control groups give it time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(share) for share in _quotas(groups, own))]))


def _quotas(groups: Path, own: Path) -> list[float]:
    """Cores' worth of time that the process's groups and those above them have, where they are bounded."""
    found = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers
        # In a container the path may be the host's, of which nothing is there: the root is the container's own group.
        folder = Path(os.path.normpath(f"{root}/{path}"))
        for each in [folder, *folder.parents]:
            if controllers:
                quota, period = _text(each / "cpu.cfs_quota_us"), _text(each / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(each / "cpu.max").partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                found.append(int(quota) / int(period))
            if each == root:
                break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
