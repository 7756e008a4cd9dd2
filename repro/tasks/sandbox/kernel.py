"""System calls that the standard library does not offer, through libc. Linux only."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A libc function that answers -1 and errno; raises OSError with the function's name."""
    ctypes.set_errno(0)
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    return call("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero)


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets: root without them is an ordinary user."""
    version_3, this_thread = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_thread)
    call("capset", header, (ctypes.c_uint32 * 6)())
