"""Processes that work for another one, and never outlive it."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process

_PR_SET_PDEATHSIG = 1
LOST = "a process of this machine ended (it was killed, for want of memory say)"


def begin_worker(parent_pid: int) -> None:
    """Called first in a process that ``parent_pid`` has started: it ends when that does, however and whenever that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel tells of a death to come; here is asked for one that was, and where there is no such kernel.
    threading.Thread(target=_end_with_parent, args=(parent_pid,), name="end-with-parent", daemon=True).start()
    # A terminal's Ctrl-C reaches the whole process group: workers end at once, without a traceback each. Where the
    # parent ignores it (a job in the background), so do they.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent(parent_pid: int) -> None:
    parent = parent_process()
    if parent is not None and os.getppid() == parent_pid:
        parent.join()
    os._exit(1)


@contextmanager
def worker_processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """At most so many, which start as they are needed and end with the body."""
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    pool = ProcessPoolExecutor(num, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(os.getpid(),))
    with ending_with_its_workers(pool):
        yield pool


@contextmanager
def ending_with_its_workers(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """The pool, shut down at the end; after an error (Ctrl-C, SIGTERM) its workers are killed, whatever they do."""
    before = {child.pid for child in active_children()}
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            if child.pid not in before:
                with suppress(OSError):
                    child.kill()
        raise
    pool.shutdown()
