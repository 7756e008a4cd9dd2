"""Linux namespaces without privileges: a network without devices, process ids of one's own, a small root file system.

A user namespace gives the right to make the others; where a distribution or a container forbids it
(AppArmor, seccomp), ``enter`` raises OSError.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from repro.tasks.sandbox import kernel

_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC, _NEW_UTS, _NEW_MOUNT = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
    0x04000000,
    0x00020000,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_KEPT_FLAGS = ((8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
"""statvfs flag -> mount flag (noexec, noatime, nodiratime, relatime) of what a user namespace may not take away from
an inherited mount."""

SCRATCH_BYTES = 64 << 20
SCRATCH_FILES = 4096
HOME = "/tmp"
"""The writable folder in the new root."""


def enter() -> None:
    """Process ids change for the children forked from now on. A failure may come half-way: try it in a fork first."""
    user, group = os.getuid(), os.getgid()
    kernel.call("unshare", ctypes.c_int(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_MOUNT))
    # The kernel wants "deny" before an unprivileged process may map its group.
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def change_root(base: str, readable: Iterable[str]) -> bool:
    """Replace the file system by a small one in memory: ``readable`` read-only, and an empty ``HOME``.

    ``base`` is an empty folder to build it in. On refusal the old root stays, and False is returned.
    """
    try:
        _mount(None, "/", None, _REC | _PRIVATE)
        options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=0755"
        _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, options)
    except OSError:
        return False
    try:
        for path in readable:
            _show(base, path)
        _show_null(base)
        home = base + HOME
        os.mkdir(home)
        _mount(home, home, None, _BIND)
        _mount(None, base, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
        os.chdir(base)
        # With both arguments the same the old root lies on the new one; see pivot_root(2).
        kernel.call("pivot_root", b".", b".")
        kernel.call("umount2", b".", ctypes.c_int(_DETACH))
        os.chdir(HOME)
    except OSError:
        kernel.call("umount2", os.fsencode(base), ctypes.c_int(_DETACH))
        return False
    return True


def _show(base: str, path: str) -> None:
    target = base + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        open(target, "x").close()
    _mount(path, target, None, _BIND | _REC)
    for mounted in _mounts_at(target):
        kept = sum(flag for seen, flag in _KEPT_FLAGS if os.statvfs(mounted).f_flag & seen)
        _mount(None, mounted, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | kept)


def _show_null(base: str) -> None:
    target = f"{base}/dev/null"
    os.mkdir(os.path.dirname(target))
    open(target, "x").close()
    _mount("/dev/null", target, None, _BIND)


def _mounts_at(target: str) -> list[str]:
    """The mount at ``target`` and those below it."""
    with open("/proc/self/mountinfo") as file:
        points = [os.fsdecode(line.split()[4].encode().decode("unicode_escape").encode("latin-1")) for line in file]
    return [point for point in points if point == target or point.startswith(target + "/")]


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encode = lambda text: None if text is None else os.fsencode(text)  # noqa: E731
    kernel.call("mount", encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(options))
