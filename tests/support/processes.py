"""Whether processes are there."""

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """One that has ended and was not waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int, within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while is_alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
