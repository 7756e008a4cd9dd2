"""Origin of a run: code, machine, libraries, times. No user names, host names or absolute paths, except of what plug-ins read elsewhere."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from engines.machine import machine_memory_bytes
from repro.paths import REPO
from repro.runs.clean import REDACTED, clean_command, clean_text, is_secret
from repro.runs.environment import instructions, numeric_variables, processor_facts, threads_set
from repro.runs.record import Obtained

LIBRARIES = ("torch", "numpy", "pandas", "pyarrow")
COMMIT_VARIABLE = "REPRO_COMMIT"


@dataclass(frozen=True, kw_only=True)
class GitState:
    """Both are None outside a checkout of this repository. ``commit`` is None before the first commit."""

    commit: str | None
    dirty: bool | None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the machine was while a run was measured, in seconds."""

    cpu_s: float
    """Processor seconds of this process, over all its threads."""
    wall_s: float
    loop_before_s: float
    loop_after_s: float
    best_loop_s: float
    """Seconds of the fastest loop of the sitting so far."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    started_utc: str
    finished_utc: str
    elapsed_s: float
    load: Load | None = None
    """How busy the machine was during a measured run."""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def collect(
    *,
    obtained: Obtained,
    timing: Timing,
    git: GitState | None = None,
    calibration: str | None = None,
    dataset: Any = None,
    argv: Sequence[str] | None = None,
    sitting: str | None = None,
    busy_s: float | None = None,
) -> dict[str, Any]:
    """Collect a run's provenance. ``calibration`` is the id of a simulated run's calibration; None means it has none. For a measured run,
    ``sitting`` is the id of its sitting, and ``busy_s`` the seconds of its steps if the CPU computed them."""
    state = git or git_state()
    return {
        "obtained": obtained,
        **({"calibration": calibration} if obtained != "measured" else {}),
        **({} if timing.load is None else {"sitting": sitting, "load": {**asdict(timing.load), "busy_s": busy_s}}),
        "dataset": dataset,
        "command": clean_command(sys.argv if argv is None else argv),
        "git": {"commit": state.commit, "dirty": state.dirty},
        "started_utc": timing.started_utc,
        "finished_utc": timing.finished_utc,
        "elapsed_s": timing.elapsed_s,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "cpu": _cpu(),
        "memory_bytes": machine_memory_bytes(),
        "gpu": _gpu(sys.modules["torch"]) if sys.modules.get("torch") is not None else None,
    }


def machine_identity(device: str) -> dict[str, Any]:
    """Identity of the machine, equal for two runs on one machine with one setup, whose times are comparable. For ``device`` cpu it needs no
    torch, so looking up a run is fast. ``torch_threads`` is None unless a script has set it."""
    cpu = _cpu()
    identity: dict[str, Any] = {
        "cpu": cpu["model"],
        "cores": cpu["usable"],
        "threads": os.environ.get("OMP_NUM_THREADS") or str(cpu["usable"]),
        "torch": version_of("torch"),
        "instructions": instructions(),
        "torch_threads": threads_set(),
        "environment": {
            name: REDACTED if is_secret(name) else clean_text(value) for name, value in numeric_variables().items()
        },
    }
    if device.startswith("cuda"):
        import torch

        identity["gpu"] = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    return identity


_TOLD_LATELY = ("instructions", "torch_threads", "environment")
"""Facts that older stored runs may lack. A missing fact is unknown and counts as equal."""


def differing_facts(machines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return how machines differ: the values, as text, of each fact that is not the same on all. For the environment, the values of each
    variable that differs."""
    differences: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for machine in machines for name in machine):
        reporting = [machine for machine in machines if name in machine or name not in _TOLD_LATELY]
        values: list[Any] = [machine.get(name) for machine in reporting]
        if all(value == values[0] for value in values):
            continue
        if name != "environment":
            differences[name] = [str(value) for value in values]
            continue
        for variable in sorted({key for value in values for key in value}):
            settings = [value.get(variable, "not set") for value in values]
            if len(set(settings)) > 1:
                differences[variable] = settings
    return differences


def git_state(root: Path = REPO) -> GitState:
    """The environment's commit has priority over git's, because a copied checkout may have a ``.git`` of another time."""
    commit = os.environ.get(COMMIT_VARIABLE, "")
    if re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return GitState(commit=commit, dirty=None)
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        # This package lies in another project's checkout, whose commit says nothing about us.
        return GitState(commit=None, dirty=None)
    changes = _git(root, "status", "--porcelain")
    return GitState(
        commit=_git(root, "rev-parse", "--verify", "HEAD"), dirty=None if changes is None else bool(changes)
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None


@cache
def version_of(package: str) -> str | None:
    """Version of an installed package. It is not imported, because a folder of the same name is not the library."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """``usable`` counts the CPUs that this process may run on now, which a container often limits, and a script may change."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = processor_facts().get("model name") or platform.processor() or None
    return {"model": model, "count": os.cpu_count(), "usable": usable}


def _gpu(torch: Any) -> dict[str, Any] | None:
    """Facts of the GPU, by the torch that the run has already imported: looking up must not import torch."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


@cache
def _driver() -> str | None:
    """Version of the NVIDIA driver."""
    return nvidia_smi("driver_version")


def nvidia_smi(fields: str, *options: str) -> str | None:
    """The driver's answer for its first card, separated by commas, with sizes in MiB; None if it cannot tell."""
    command = ["nvidia-smi", *options, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout.strip() else None


# -- whether the machine was busy besides ---------------------------------------------------------------------

MIN_CPU_SHARE = 0.9
"""With fewer processor seconds per second of steps, a run on a CPU was kept waiting. A step never sleeps, so a free machine gives it at
least one. With several threads it gets more, which makes this bound generous."""
MAX_SLOWDOWN = 1.25
"""Largest time of the calibration loop over the fastest of its sitting. Frequency and caches move it by a few percent on a quiet machine. A
neighbour that takes a quarter of a core or more moves it by 25 % and more. A larger disturbance also outgrows the differences between
systems that the figures show."""


def contention(load: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Signs that the machine was busy with something else, a clause each. ``load`` is a stored run's: the fields of ``Load``, and
    ``busy_s``, the seconds of its steps if the CPU computed them."""
    if load is None:
        return ()
    signs = []
    slowest = max(load["loop_before_s"], load["loop_after_s"])
    if slowest > MAX_SLOWDOWN * load["best_loop_s"]:
        signs.append(
            f"contended: the calibration loop took {slowest / load['best_loop_s']:.2f} times the sitting's best"
        )
    busy_s = load.get("busy_s")
    if busy_s and load["cpu_s"] < MIN_CPU_SHARE * busy_s:
        signs.append(f"contended: {load['cpu_s'] / busy_s:.2f} processor seconds per second of steps")
    return tuple(signs)
