"""What a confined server may be able to put around a program, from the outside in."""

from __future__ import annotations

NAMESPACES = "namespaces"
"""Own user, process, network, IPC and host-name namespaces."""
PRIVATE_ROOT = "private-root"
"""A small file system in memory instead of the machine's; needs the namespaces."""
LANDLOCK = "landlock"
SECCOMP = "seccomp"
LIMITS = "limits"
"""Own session, empty environment, fresh folder, time, memory and file limits."""

LAYERS = (NAMESPACES, PRIVATE_ROOT, LANDLOCK, SECCOMP, LIMITS)
