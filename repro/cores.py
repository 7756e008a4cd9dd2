"""How many cores this process may use, which a container, a batch system or taskset makes fewer than the machine has."""

import math
import os
from pathlib import Path

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
