"""This process, its packages and its machine: memory and how a process keeps it, usable cores, and signals that we delay."""

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any

SETTLED = "REPRO_SETTLED"
"""Name of the environment variable that lists those variables that we set, not the user."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of two ``mallopt`` settings."""


def our_variables(environment: Mapping[str, str]) -> set[str]:
    """Names of the variables that we set, not the user, and of the one that lists them. Other projects' programs should not get them."""
    return {SETTLED, *filter(None, environment.get(SETTLED, "").split(","))}


@cache
def version_of(package: str) -> str | None:
    """Version of an installed package. It is not imported, because a folder of the same name is not the library."""
    from importlib.metadata import PackageNotFoundError, version  # importing it takes some 50 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine_memory_bytes() -> int | None:
    """Bytes of memory of this machine; None if the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" not in names or "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def without_collection() -> Iterator[None]:
    """Put off collecting garbage in this process.

    Only a caller that finds the collector on turns it off and on again. So nested callers, and callers in several threads, leave it as
    it was before the first.
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
    """Make this process keep memory that a step frees for the next step. Returns whether the C library can do so.

    By default glibc gives large blocks back at once, and the system clears every page when we ask for them again. That took a
    tenth of the time of a CPU's steps.
    """
    mallopt = _libc_function("mallopt")
    # We set the second only after the first: either alone stops glibc from tuning itself, and is slower than none.
    return mallopt is not None and (
        any(mallopt(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)) and bool(mallopt(M_TRIM_THRESHOLD, 1 << 30))
    )


def give_back_freed_memory() -> None:
    """Give memory that this process has freed but keeps back to the system, if the C library can do so."""
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def _libc_function(name: str) -> Any:
    import ctypes

    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the body. A starting child process reads from its parent what to run. If the parent
    ended before that, the child would print a traceback, and nobody would know that it must be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    # We do not touch a signal that is ignored, here and in children, or whose handler is not Python's.
    handlers = {number: old for number in _ENDING if (old := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


def end_with_parent(exit_code: int = 1) -> None:
    """Wait for the parent's end, and end this process with it: nobody else would stop it. Call this in a thread."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(exit_code)


GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Number of cores that the process may run on, at most as many as its control groups give it time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(share) for share in _quotas(groups, own_groups))]))


def _quotas(groups: Path, own_groups: Path) -> list[float]:
    """Limits, in cores' worth of time, of the process's control groups and their parents, as far as they have one."""
    limits = []
    for line in _text(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers
        # In a container the path may be the host's and not exist here: then the root is the container's own group.
        folder = Path(os.path.normpath(f"{root}/{path}"))
        for group in [folder, *folder.parents]:
            if controllers:
                quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(group / "cpu.max").partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                limits.append(int(quota) / int(period))
            if group == root:
                break
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
