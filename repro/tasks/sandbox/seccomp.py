"""A seccomp filter that lets a Python program compute and use files, and nothing else.

What is not listed fails with EPERM: sockets, new processes, exec, signals to anybody, ptrace, mounts,
namespaces, io_uring, chmod and times of files (which Landlock does not govern), shared memory.
A system call newer than this table answers ENOSYS, so that libc falls back to one that is in it.
"""

from __future__ import annotations

import csv
import ctypes
import errno
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from repro.tasks.sandbox import kernel


class Instruction(NamedTuple):
    """One classic BPF instruction, ``struct sock_filter``: on a jump, how many instructions to skip."""

    code: int
    if_true: int
    if_false: int
    value: int


LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT = 0x15, 0x35, 0x45
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16  # in struct seccomp_data

_X32_NUMBERS = 0x40000000
_NEWEST_NUMBER = 451
"""The last number a filter author could know of here (cachestat, Linux 6.5)."""

_SET_MODE_FILTER = 1
_O_ACCMODE, _O_TRUNC = 3, 0o1000
_CLONE_THREAD = 0x10000
_IOCTLS = (0x5401, 0x5450, 0x5451)  # TCGETS (isatty), FIONCLEX, FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, SETLK, SETLKW, DUPFD_CLOEXEC

with Path(__file__).with_name("syscalls.csv").open(encoding="utf-8", newline="") as _file:
    _CALLS = tuple(csv.DictReader(_file))
    """Their number on each architecture, empty where it has no such call."""
_NAMED = "named in the filter"
_ALLOWED = tuple(row for row in _CALLS if row["group"] != _NAMED)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    name: str
    seccomp: int
    clone: int
    ioctl: int
    fcntl: int
    prlimit64: int
    openat: int
    open: int | None = None
    clone3: int

    def allowed(self) -> tuple[int, ...]:
        return tuple(sorted(int(row[self.name]) for row in _ALLOWED if row[self.name]))


def _architecture(name: str, audit: int) -> Architecture:
    known = {row["name"]: int(row[name]) for row in _CALLS if row["group"] == _NAMED and row[name]}
    return Architecture(name=name, audit=audit, **known)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: _architecture(name, audit) for name, audit in (("x86_64", 0xC000003E), ("aarch64", 0xC00000B7))}
)


def build_filter(machine: Architecture) -> tuple[Instruction, ...]:
    """The filter, cases in the order they are asked; every case returns or falls through to the next."""
    program = [
        _load(_ARCH_OFFSET),
        # Another architecture's numbers (32-bit calls of a 64-bit process) would mean other calls.
        Instruction(JUMP_EQUAL, 1, 0, machine.audit),
        _return(KILL_PROCESS),
        _load(_NUMBER_OFFSET),
        Instruction(JUMP_GREATER_EQUAL, 0, 1, _X32_NUMBERS),
        _return(_fail(errno.EPERM)),
        Instruction(JUMP_GREATER_EQUAL, 0, 1, _NEWEST_NUMBER + 1),
        _return(_fail(errno.ENOSYS)),
        # Its flags lie in memory, where a filter cannot look; libc then uses clone.
        Instruction(JUMP_EQUAL, 0, 1, machine.clone3),
        _return(_fail(errno.ENOSYS)),
    ]
    program += _case(machine.clone, [_load_argument(0), Instruction(JUMP_ANY_BIT, 0, 1, _CLONE_THREAD), _return(ALLOW)])
    for call, values in ((machine.ioctl, _IOCTLS), (machine.fcntl, _FCNTLS)):
        # fcntl: F_SETOWN would let the kernel send a signal to another process.
        body = [_load_argument(1)]
        for value in values:
            body += [Instruction(JUMP_EQUAL, 0, 1, value), _return(ALLOW)]
        program += _case(call, body)
    # Reading limits only: the address of the new ones must be null.
    program += _case(
        machine.prlimit64,
        [
            _load_argument(2),
            Instruction(JUMP_EQUAL, 0, 3, 0),
            _load_argument(2, high=True),
            Instruction(JUMP_EQUAL, 0, 1, 0),
            _return(ALLOW),
        ],
    )
    program += _case(machine.openat, _open_case(2))
    if machine.open is not None:
        program += _case(machine.open, _open_case(1))
    for number in machine.allowed():
        program += [Instruction(JUMP_EQUAL, 0, 1, number), _return(ALLOW)]
    return (*program, _return(_fail(errno.EPERM)))


def install() -> None:
    """Bind this process and its descendants, for good; raises OSError where the kernel or the CPU has no support."""
    machine = ARCHITECTURES.get(platform.machine())
    if machine is None or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, f"no seccomp table for {platform.machine()}")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    program = build_filter(machine)
    filters = (_SockFilter * len(program))(*(_SockFilter(*instruction) for instruction in program))
    pointer = ctypes.byref(_SockFprog(len(program), filters))
    kernel.system_call(machine.seccomp, ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(0), pointer)


class _SockFilter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_SockFilter))]


def _load(offset: int) -> Instruction:
    return Instruction(LOAD, 0, 0, offset)


def _load_argument(index: int, *, high: bool = False) -> Instruction:
    """One 32-bit half of a 64-bit argument; both architectures are little-endian."""
    return _load(_ARGUMENTS_OFFSET + 8 * index + 4 * high)


def _return(action: int) -> Instruction:
    return Instruction(RETURN, 0, 0, action)


def _fail(error: int) -> int:
    return FAIL | error


def _case(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run ``body`` for one system call and deny what it does not allow."""
    complete = [*body, _return(_fail(errno.EPERM))]
    return [Instruction(JUMP_EQUAL, 0, len(complete), number), *complete]


def _open_case(flags_argument: int) -> list[Instruction]:
    """All but truncating without writing: Landlock before ABI 3 takes it for reading."""
    return [
        _load_argument(flags_argument),
        Instruction(JUMP_ANY_BIT, 0, 3, _O_TRUNC),
        Instruction(AND, 0, 0, _O_ACCMODE),
        Instruction(JUMP_EQUAL, 0, 1, 0),
        _return(_fail(errno.EPERM)),
        _return(ALLOW),
    ]
