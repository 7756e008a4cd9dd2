"""The environment variables that decide measured numbers. The first ``import repro`` settles them for every entry point: a command, Python,
a notebook, and the processes that these start. Runs record them by name and value.

With AMX, a row of a bfloat16 product depends on how many other rows are computed with it. We therefore keep oneDNN from using AMX, unless
the user set its limit. It reads its variable once, at its first product, not when torch is imported.
"""

import csv
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from engines.errors import UserError
from engines.machine import SETTLED

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN reads the first of these that is not empty."""
WITHOUT_AMX = "AVX512_CORE_FP16"

with Path(__file__).with_name("instructions.csv").open(newline="", encoding="utf-8") as _listed:
    _ROWS = tuple(csv.DictReader(_listed))
_ADDED = {row["name"]: row["flags"].split() for row in _ROWS if row["flags"]}
"""Instruction sets by oneDNN's names, each with the processor flags that it needs in addition to those above it."""
_ORDER = tuple(_ADDED)
_SPELT = {row["name"]: row["is"] for row in _ROWS}
"""Every name that oneDNN accepts, mapped to one of these instruction sets."""

_NUMERIC = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|ATEN|CUBLAS|CUBLASLT|CUDNN|NCCL|MALLOC|THP)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|GLIBC_TUNABLES|LD_PRELOAD"
)
_SILENT = re.compile(
    r"VERBOSE|_LOG|LOGS|_DEBUG|DISPLAY|WARNINGS|SETTINGS|STACKTRACES|_(HOME|DIR|PATH|CACHE|VERSION|ARCH_LIST)$|BUILD"
)
"""Variables that change no numbers: what libraries print, where they keep files, and what they were built for."""
_CONFIGURED = "OMP_NUM_THREADS"
"""Recorded apart, as a machine's threads."""

_at_start: tuple[str, bool] | None = None
"""The limit that oneDNN was given, and whether torch was imported before we set it."""


def settle() -> None:
    """Sets the variables, before torch computes. A variable that is already set stays, so a user may choose that a row's numbers depend on
    the other rows. A card's memory comes in growing segments: otherwise, memory freed by steps of other sizes stays in pieces that fit
    nothing."""
    global _at_start
    is_late = False
    if not any(os.environ.get(name) for name in VARIABLES):
        is_late = "torch" in sys.modules
        _set_variable(VARIABLES[0], WITHOUT_AMX)
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        _set_variable("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if "THP_MEM_ALLOC_ENABLE" not in os.environ:  # weights in pages of 2 MiB: a processor reads them a quarter faster
        _set_variable("THP_MEM_ALLOC_ENABLE", "1")
    if _at_start is None:
        _at_start = limit(), is_late


def _set_variable(name: str, value: str) -> None:
    """Sets a variable and lists it in ``SETTLED``, so that the servers of other projects start without it."""
    os.environ[name] = value
    os.environ[SETTLED] = ",".join(filter(None, (os.environ.get(SETTLED), name)))


def limit() -> str:
    """The largest instruction set that oneDNN may use, as the environment spells it."""
    return next((value for name in VARIABLES if (value := os.environ.get(name))), "DEFAULT")


def instructions() -> str | None:
    """The instruction set that oneDNN uses: the largest that the processor has and that ``limit`` allows. None if the processor has none of
    them."""
    largest = _SPELT.get(limit().upper(), _ORDER[-1])
    needed: set[str] = set()
    best = None
    for name, flags in _ADDED.items():
        needed |= set(flags)
        if not needed <= processor_flags():
            break
        best = name
        if name == largest:
            break
    return best


@cache
def processor_flags() -> frozenset[str]:
    return frozenset(processor_facts().get("flags", "").split())


@cache
def processor_facts() -> Mapping[str, str]:
    """The system's facts about its first processor, by lower-case names such as ``model name``; empty if it reports none."""
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip().lower(), value.strip())
    return facts


def numeric_variables() -> dict[str, str]:
    """Variables that change what libraries compute or how fast, by name. The number of threads is recorded apart."""
    return {name: value for name, value in sorted(os.environ.items()) if is_numeric(name) and name != _CONFIGURED}


def is_numeric(name: str) -> bool:
    return _NUMERIC.fullmatch(name) is not None and _SILENT.search(name) is None


def threads_set() -> int | None:
    """Threads that torch uses, if a script has set another number than the environment gives; else None. Also None before torch is
    imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return None
    threads = int(torch.get_num_threads())
    return None if threads in _default_threads() else threads


def _default_threads() -> set[int]:
    """The numbers of threads that torch may start with."""
    values = [os.environ.get(name, "").partition(",")[0].strip() for name in (_CONFIGURED, "MKL_NUM_THREADS")]
    counts = [int(value) for value in values if value.isdecimal()]
    if counts:
        return {counts[0]}
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return {len(usable), len(set(map(_siblings, usable)))}


@cache
def _siblings(cpu: int) -> str:
    """The CPUs that share a core with this one, as the system lists them."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        siblings = ""
    return siblings.strip() or str(cpu)


# -- whether it holds ---------------------------------------------------------------------------------------


def check_instructions() -> None:
    """Refuses a measured run on the CPU if oneDNN may use other instructions than the environment says, because torch was imported before
    that was set."""
    setting = limit()
    if setting.upper() not in _SPELT:
        raise UserError(
            f"{_variable_name()}={setting!r} is no instruction set of oneDNN, which would take no notice of it: use one of "
            f"{', '.join(_ORDER)} or DEFAULT"
        )
    if "torch" not in sys.modules or _at_start is None:
        return
    at_start, may_use_amx = _at_start
    if at_start != setting or (may_use_amx and "amx_tile" in processor_flags()):
        raise UserError(
            f"{_variable_name()}={setting} may have come too late: torch was imported in this process before it was set. Begin Python anew "
            f"and import repro before torch, or start Python with {VARIABLES[0]}={setting}"
        )


def _variable_name() -> str:
    return next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
