"""Landlock: name the files a process may use; all others are closed to it. Linux 5.13, no privileges needed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable

from repro.tasks.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE, _MAKE_SYMLINK = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _DEVICE_IOCTL = 1 << 13, 1 << 14, 1 << 15
_FIRST_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _DEVICE_IOCTL}

_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_SYMLINK | _REFER | _TRUNCATE
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE

_TCP_SINCE, _TCP = 4, 3  # bind, connect
_SCOPES_SINCE, _SCOPES = 6, 3  # abstract unix sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The kernel's version of the interface, 0 without one."""
    try:
        return kernel.system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):  # too old, switched off, a container's filter
            return 0
        raise


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Bind this process and its descendants, for good; the ABI version in force, 0 if there is none.

    TCP and abstract sockets and signals to processes outside are closed too where the version knows them.
    """
    version = abi()
    if version == 0:
        return 0
    handled = _FIRST_RIGHTS
    for since, right in _RIGHTS_SINCE.items():
        handled |= right if version >= since else 0
    attributes = _Ruleset(handled, _TCP if version >= _TCP_SINCE else 0, _SCOPES if version >= _SCOPES_SINCE else 0)
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    ruleset = kernel.system_call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for rights, paths in ((_READ, readable), (_WRITE, writable)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.ExitStack() as stack:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, parent)
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, parent)
        kernel.system_call(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
        )
