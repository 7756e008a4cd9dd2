"""C++ libraries that we compile for this machine on first use, and keep in the user's cache."""

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
    """A library could not be compiled; ``str`` says why in a sentence."""


class Pointer:
    """The ctypes argument type for a tensor: C gets a pointer to its data, or null for None."""

    @classmethod
    def from_param(cls, tensor: Any) -> c_void_p | None:
        return None if tensor is None else c_void_p(tensor.data_ptr())


class Library(NamedTuple):
    """A library to compile. A change of its ``headers``, which its ``sources`` include, makes us compile it again."""

    name: str
    sources: tuple[Path, ...]
    options: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def cached_path(self, command: Sequence[str]) -> Path:
        """The cache path of the library that ``command`` compiles from the sources on this processor."""
        processor = platform.machine()
        if CPU_FACTS.is_file():
            lines = CPU_FACTS.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
            processor += "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
        texts = (path.read_text(encoding="utf-8") for path in (*self.sources, *self.headers))
        digest = hashlib.sha256("\n".join([*command, processor, *texts]).encode()).hexdigest()
        return cache_folder() / f"{self.name}-{digest[:32]}.so"

    def command(self) -> list[str]:
        """Return the compiler's command. Raises CompilerError if there is no compiler."""
        compiler = os.environ.get("CXX") or shutil.which("c++")
        if not compiler:
            raise CompilerError("there is no C++ compiler")
        return [compiler, "-std=c++17", *self.options, "-shared", "-fPIC", "-w"]


@lru_cache(maxsize=8)
def load_library(library: Library) -> CDLL:
    """Load a library, which we compile first unless it is cached: some seconds, once a machine. Raises CompilerError."""
    command = library.command()
    cached = library.cached_path(command)
    try:
        if cached.is_file():
            return CDLL(str(cached))
    except OSError:
        pass  # we compile it again
    try:
        # We compile in this folder and then move the whole file: several processes may compile it at once.
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent: Path | None = cached.parent
    except OSError:
        parent = None  # compile in a temporary folder
    with TemporaryDirectory(dir=parent) as folder:
        built = Path(folder, f"{library.name}.so")
        try:
            sources = map(str, library.sources)
            subprocess.run([*command, "-o", str(built), *sources], check=True, capture_output=True, text=True)
            dll = CDLL(str(built))
        except (OSError, subprocess.CalledProcessError) as error:
            message = getattr(error, "stderr", "") or str(error)
            raise CompilerError(f"{command[0]}: {message.strip().splitlines()[0]}") from error
        if parent is not None:
            built.replace(cached)
    return dll
