"""Sources in C++ that are compiled for this machine when they are first asked for, and kept in the user's cache."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import CDLL, c_void_p
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from engines.cache import cache_folder

CPU_FACTS = Path("/proc/cpuinfo")


class CompilerError(Exception):
    """Nothing was made; ``str`` says why in a sentence."""


class Pointer:
    """How C takes a tensor: its data; None is null."""

    @classmethod
    def from_param(cls, tensor: Any) -> c_void_p | None:
        return None if tensor is None else c_void_p(tensor.data_ptr())


class Library(NamedTuple):
    """What is compiled: ``headers`` count as part of the ``sources`` that read them."""

    name: str
    sources: tuple[Path, ...]
    options: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def kept(self, command: Sequence[str]) -> Path:
        """Where what ``command`` makes of the sources on this processor is kept."""
        processor = platform.machine()
        if CPU_FACTS.is_file():
            lines = CPU_FACTS.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
            processor += "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
        read = (path.read_text(encoding="utf-8") for path in (*self.sources, *self.headers))
        digest = hashlib.sha256("\n".join([*command, processor, *read]).encode()).hexdigest()
        return cache_folder() / f"{self.name}-{digest[:32]}.so"

    def command(self) -> list[str]:
        """Raises CompilerError where there is no compiler."""
        compiler = os.environ.get("CXX") or shutil.which("c++")
        if not compiler:
            raise CompilerError("there is no C++ compiler")
        return [compiler, "-std=c++17", *self.options, "-shared", "-fPIC", "-w"]


@lru_cache(maxsize=8)
def loaded(library: Library) -> CDLL:
    """Raises CompilerError. Takes some seconds, once a machine."""
    command = library.command()
    kept = library.kept(command)
    try:
        if kept.is_file():
            return CDLL(str(kept))
    except OSError:
        pass  # it is made again
    try:
        # Beside the place that it is moved to, whole: several processes may be making it.
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where: Path | None = kept.parent
    except OSError:
        where = None  # in a folder that goes when the process ends
    with TemporaryDirectory(dir=where) as folder:
        made = Path(folder, f"{library.name}.so")
        try:
            sources = map(str, library.sources)
            subprocess.run([*command, "-o", str(made), *sources], check=True, capture_output=True, text=True)
            found = CDLL(str(made))
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise CompilerError(f"{command[0]}: {said.strip().splitlines()[0]}") from error
        if where is not None:
            made.replace(kept)
    return found
