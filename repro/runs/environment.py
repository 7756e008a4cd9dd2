"""The process's environment where it decides measured numbers: settled at the first ``import repro``, for every door (a command, Python,
a notebook, and the processes that these start, which inherit it), and told by name and value.

With AMX a row of a bfloat16 product hangs on how many rows stand beside it. oneDNN therefore does without, unless it is told
otherwise. It reads its variable once, at its first product, and not when torch is imported.
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
"""oneDNN reads the first that is not empty."""
WITHOUT_AMX = "AVX512_CORE_FP16"

with Path(__file__).with_name("instructions.csv").open(newline="", encoding="utf-8") as _listed:
    _ROWS = tuple(csv.DictReader(_listed))
_ADDED = {row["name"]: row["flags"].split() for row in _ROWS if row["flags"]}
"""Instruction sets by oneDNN's names, each with the processor's flags that it needs beside those above it."""
_ORDER = tuple(_ADDED)
_SPELT = {row["name"]: row["is"] for row in _ROWS}
"""What oneDNN takes, as one of those."""

_NUMERIC = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|ATEN|CUBLAS|CUBLASLT|CUDNN|NCCL|MALLOC|THP)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|GLIBC_TUNABLES|LD_PRELOAD"
)
_SILENT = re.compile(
    r"VERBOSE|_LOG|LOGS|_DEBUG|DISPLAY|WARNINGS|SETTINGS|STACKTRACES|_(HOME|DIR|PATH|CACHE|VERSION|ARCH_LIST)$|BUILD"
)
"""What libraries print, where they keep files, and what they were built for."""
_CONFIGURED = "OMP_NUM_THREADS"
"""Told apart, as a machine's threads."""

_at_start: tuple[str, bool] | None = None
"""The limit that oneDNN was given, and whether torch was there before we set it."""


def settle() -> None:
    """Before torch computes. What is set already stays: then the numbers of a row may hang on its company, and are the
    user's. A card's memory comes in segments that grow: what steps of other sizes freed otherwise lies in pieces that fit
    nothing."""
    global _at_start
    is_late = False
    if not any(os.environ.get(name) for name in VARIABLES):
        is_late = "torch" in sys.modules
        _set(VARIABLES[0], WITHOUT_AMX)
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        _set("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if "THP_MEM_ALLOC_ENABLE" not in os.environ:  # weights in pages of 2 MiB: a processor reads them a quarter faster
        _set("THP_MEM_ALLOC_ENABLE", "1")
    if _at_start is None:
        _at_start = limit(), is_late


def _set(name: str, value: str) -> None:
    """``SETTLED`` lists what we set, so that the servers of other projects start without it."""
    os.environ[name] = value
    os.environ[SETTLED] = ",".join(filter(None, (os.environ.get(SETTLED), name)))


def limit() -> str:
    """The most that oneDNN may use, as the environment spells it."""
    return next((told for name in VARIABLES if (told := os.environ.get(name))), "DEFAULT")


def instructions() -> str | None:
    """The instruction set that oneDNN computes by: the most that the processor has and that ``limit`` allows. None of a
    processor that has none of those."""
    most = _SPELT.get(limit().upper(), _ORDER[-1])
    needed: set[str] = set()
    best = None
    for name, flags in _ADDED.items():
        needed |= set(flags)
        if not needed <= processor_flags():
            break
        best = name
        if name == most:
            break
    return best


@cache
def processor_flags() -> frozenset[str]:
    return frozenset(processor_facts().get("flags", "").split())


@cache
def processor_facts() -> Mapping[str, str]:
    """The first value that the system tells of a processor, by names in small letters, such as ``model name``; empty where it tells none."""
    info = Path("/proc/cpuinfo")
    found: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []:
        name, _, value = line.partition(":")
        found.setdefault(name.strip().lower(), value.strip())
    return found


def numeric_variables() -> dict[str, str]:
    """Variables that change what libraries compute or how fast, by name; not the number of threads, which is told apart."""
    return {name: value for name, value in sorted(os.environ.items()) if is_numeric(name) and name != _CONFIGURED}


def is_numeric(name: str) -> bool:
    return _NUMERIC.fullmatch(name) is not None and _SILENT.search(name) is None


def threads_set() -> int | None:
    """Threads that torch computes with, where a script has set others than the environment gives; None elsewhere, and before torch
    is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return None
    threads = int(torch.get_num_threads())
    return None if threads in _usual_threads() else threads


def _usual_threads() -> set[int]:
    """As many as torch begins with."""
    told = [os.environ.get(name, "").partition(",")[0].strip() for name in (_CONFIGURED, "MKL_NUM_THREADS")]
    given = [int(each) for each in told if each.isdecimal()]
    if given:
        return {given[0]}
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return {len(usable), len(set(map(_siblings, usable)))}


@cache
def _siblings(cpu: int) -> str:
    """The CPUs of its core, as the system lists them."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        listed = ""
    return listed.strip() or str(cpu)


# -- whether it holds ---------------------------------------------------------------------------------------


def check_settled() -> None:
    """Refuses a measured run on the CPU where oneDNN may compute by other instructions than the environment says: torch was
    there before that was set."""
    told = limit()
    if told.upper() not in _SPELT:
        raise UserError(
            f"{_name()}={told!r} is no instruction set of oneDNN, which would take no notice of it: use one of "
            f"{', '.join(_ORDER)} or DEFAULT"
        )
    if "torch" not in sys.modules or _at_start is None:
        return
    at_start, may_use_amx = _at_start
    if at_start != told or (may_use_amx and "amx_tile" in processor_flags()):
        raise UserError(
            f"{_name()}={told} may have come too late: torch was imported in this process before it was set. Begin Python anew "
            f"and import repro before torch, or start Python with {VARIABLES[0]}={told}"
        )


def _name() -> str:
    return next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
