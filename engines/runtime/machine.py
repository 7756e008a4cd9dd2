"""What this machine has."""

from __future__ import annotations

import os


def machine_memory_bytes() -> int | None:
    """None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" not in names or "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
