"""``repro serve`` as a process under measurement, and what the system says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    url: str
    engine_pid: int

    def metrics(self) -> dict[str, float]:
        """By name and labels, as they are written, without their common beginning."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if line[0] != "#"]
        found = (line.rpartition(" ") for line in lines)
        return {name.removeprefix("repro_"): float(value) for name, _, value in found}


@contextmanager
def serving(*options: str, cores: tuple[int, int] | None = None) -> Iterator[ServerProcess]:
    """``cores`` are those of the engine and of the server."""
    log_r, log_w = os.pipe()
    command = [sys.executable, "-m", "repro", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=log_w, env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(log_w)
    try:
        log = os.fdopen(log_r)
        line = next(line for line in log if line.startswith("ready: "))
        # What it says from now on nobody needs, but unread it would hold it up.
        Thread(target=log.read, daemon=True).start()
        url = line.split()[1].removesuffix("/v1,")
        (engine_pid,) = children(process.pid)
        if cores is not None:
            os.sched_setaffinity(engine_pid, {cores[0]})
            os.sched_setaffinity(process.pid, {cores[1]})
        yield ServerProcess(process, url, engine_pid)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait()


def children(pid: int) -> list[int]:
    """Whichever of its threads has started them."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
