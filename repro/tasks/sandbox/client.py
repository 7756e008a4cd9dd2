"""Running generated Python for pass@1, isolated by what the kernel offers (``layers``).

A program runs in a process of its own without network, without files but the Python installation
(read-only) and an empty folder, without the right to start processes, and within limits of time, memory
and disk. Where the kernel cannot promise that, nothing is run unless the user accepts it by name.

Tests run in a second process (``judge``), which asks the program's function and compares: published graders run them in
the program's own interpreter, where it can read or replace them. A program without tests is taken at its word.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engines.errors import UserError
from repro.tasks.sandbox.folder import empty
from repro.tasks.sandbox.layers import LANDLOCK, LAYERS, NAMESPACES, PRIVATE_ROOT, SECCOMP

ACCEPT_VARIABLE = "REPRO_ALLOW_UNSAFE_CODE"
TIMEOUT_S = 5.0
MEMORY_BYTES = 512 << 20
_GRACE_S = 30.0
"""How much longer than its limit a program may keep the server busy (a machine under load) before that is an error."""

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from repro.tasks.sandbox.server import serve; "
    "serve(sys.argv[2], frozenset(sys.argv[3:]))"
)


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    passed: bool
    reason: str
    """``ok``, or why not in one sentence: the exception, ``timed out after 5 s``, ``forbidden: ...``, a signal."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """``tests`` raise unless the program's function ``entry`` is right. It is called with plain values and answers with such."""

    entry: str
    tests: str
    given: str = ""
    """Source whose names the tests may use; where it is not whole, as a prompt that the program goes on with, it is left out."""


NO_CHECK = Check(entry="", tests="")
"""The program passes by its own word: it says that it came to its end."""


@dataclass(frozen=True, kw_only=True)
class SandboxSupport:
    """``layers``: what is in force here; ``gaps``: what a program could still do, empty when it is isolated."""

    layers: tuple[str, ...]
    gaps: tuple[str, ...]

    @property
    def is_isolated(self) -> bool:
        return not self.gaps


class Sandbox:
    """A confined server that runs programs one at a time; use it in a ``with`` statement."""

    def __init__(self, *, accept_gaps: bool = False, without: Sequence[str] = ()) -> None:
        """``accept_gaps`` is the variable's 1, in code. ``without`` leaves layers out, so that tests can try the others."""
        _check_platform()
        self._accept_gaps = is_unsafe_accepted() or accept_gaps
        self._without = tuple(without)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Where the server was ended in the middle of a program, what that has left is removed by who knows how.
            removed = tempfile.TemporaryDirectory(prefix="repro-sandbox-", ignore_cleanup_errors=True)
            folder = stack.enter_context(removed)
            stack.callback(_empty, folder)
            # All of the environment: isolated as -I would make it, but with one order of sets for every run.
            environment = {"PATH": "", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
            if "LD_LIBRARY_PATH" in os.environ:
                environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
            root = str(Path(__file__).resolve().parents[3])
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-c", _BOOT, root, folder, *self._without],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            stack.callback(self._stop)
            self.support = _support(self._answer(_GRACE_S))
            if not self.support.is_isolated and not self._accept_gaps:
                raise UserError(
                    f"generated code is not run: on this machine it could {' and '.join(self.support.gaps)}: use Linux "
                    f"5.13 or newer with Landlock, or allow user namespaces, or, on a machine made for it, accept the "
                    f"risk with {ACCEPT_VARIABLE}=1"
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, program: str, check: Check = NO_CHECK, *, timeout_s: float, memory_bytes: int) -> SandboxResult:
        limits = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which _answer reports
            # The second is read by the judge alone.
            for part in ({"program": program, "entry": check.entry, **limits}, asdict(check)):
                message = json.dumps(part).encode()
                self._server.stdin.write(len(message).to_bytes(8, "big") + message)
            self._server.stdin.flush()
        answer = self._answer(timeout_s + _GRACE_S)
        return SandboxResult(passed=answer["passed"], reason=answer["reason"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The server's next line. Its failure is never a program's failure, so it is raised."""
        stdout, stderr = self._server.stdout, self._server.stderr
        assert stdout is not None
        assert stderr is not None
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if ready else b""
        if not line:
            self._server.kill()
            said = stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"the sandbox's server {'ended' if ready else 'hangs'}: {said or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        # Killing it ends whatever runs inside: the kernel kills with it the namespace, or its child.
        self._server.kill()
        self._server.communicate()


def run_many(programs: Sequence[str], checks: Sequence[Check]) -> tuple[SandboxResult, ...]:
    """Run independent programs, as many at a time as there are usable cores; results in their order."""
    if not programs:
        return ()
    own = threading.local()  # each thread has a server, started when it is first asked
    with ExitStack() as servers, ThreadPoolExecutor(min(len(programs), _usable_cores())) as pool:

        def run(program: str, check: Check) -> SandboxResult:
            if not hasattr(own, "sandbox"):
                own.sandbox = servers.enter_context(Sandbox())
            found: SandboxResult = own.sandbox.run(program, check, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
            return found

        # The first error leaves to the others nothing more to do.
        return tuple(pool.map(run, programs, checks))


def sandbox_support() -> SandboxSupport:
    """What isolation this machine gives; starts and ends one server."""
    with Sandbox(accept_gaps=True) as sandbox:
        return sandbox.support


def is_unsafe_accepted() -> bool:
    value = os.environ.get(ACCEPT_VARIABLE, "0")
    if value not in ("0", "1"):
        raise UserError(f"{ACCEPT_VARIABLE}={value!r} is unknown: set it to 1 to accept the risk, or unset it")
    return value == "1"


def _support(hello: Mapping[str, Any]) -> SandboxSupport:
    active = frozenset(hello["layers"])
    gaps = []
    # Landlock leaves modes, times and truncation of files open, which seccomp closes.
    if PRIVATE_ROOT not in active and not {LANDLOCK, SECCOMP} <= active:
        gaps.append("read and change your files")
    if not active & {NAMESPACES, SECCOMP}:
        gaps.append("use the network")
        gaps.append("leave processes behind")
    if sys.platform != "linux":
        gaps.append("take all memory")
    shown = {LANDLOCK: f"{LANDLOCK} (ABI {hello['landlock_abi']})"}
    return SandboxSupport(layers=tuple(shown.get(name, name) for name in LAYERS if name in active), gaps=tuple(gaps))


def _check_platform() -> None:
    if not hasattr(os, "fork"):
        raise UserError(
            f"generated code is not run on {sys.platform}: it takes a system that can fork: use Linux, WSL 2 or a container"
        )


def _empty(folder: str) -> None:
    with suppress(OSError):
        empty(folder)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
