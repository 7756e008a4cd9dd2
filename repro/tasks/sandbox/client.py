"""Run generated Python for pass@1 in a jail of bubblewrap (``bwrap``).

A program has no network, no files but the Python installation (read-only) and an empty folder in memory. It cannot start
processes, and has limits of time, memory and disk. If bubblewrap cannot make the jail, a program runs only with the user's
consent, and then only with the limits.

Tests run in a second jail (``inside.preside``). Published graders run them in the program's own interpreter, where the program
can read or replace them. A program without tests passes if it says that it came to its end.
"""

import errno
import json
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, NamedTuple

from engines.errors import UserError
from engines.machine import usable_cores
from repro.tasks.sandbox import inside
from repro.tasks.task import TaskProblem

CONSENT_OPTION = "--allow-code-execution"
TIMEOUT_S = 5.0
MEMORY_BYTES = 512 << 20
FOLDER_BYTES, FOLDER_FILES = 64 << 20, 4096
"""The most bytes and files in a program's folder."""
_GRACE_S = 30.0
"""Seconds that two interpreters may take to start on a machine under load."""
_POLL_S = 0.05
_HOME = "/tmp"
_INSIDE = str(Path(inside.__file__).resolve())


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    passed: bool
    reason: str
    """``ok``, or one sentence on why the program failed: the exception, ``timed out after 5 s``, ``forbidden: ...``, a signal."""


@dataclass(frozen=True, kw_only=True)
class ProgramCheck:
    """``tests`` raise unless the program's function ``entry`` is right. The function takes and returns plain values."""

    entry: str
    tests: str
    given: str = ""
    """Source whose names the tests may use. We leave it out if it is no whole program, such as a prompt that the program continues."""


NO_CHECK = ProgramCheck(entry="", tests="")
"""No tests. The program passes if it says that it came to its end."""


def run_many(
    programs: Sequence[str], checks: Sequence[ProgramCheck], *, allow_code_execution: bool = False
) -> tuple[SandboxResult, ...]:
    """Run independent programs, as many at a time as there are usable cores. Results are in the order of programs."""
    require_jail(allow_code_execution=allow_code_execution)
    if not programs:
        return ()
    run = partial(run_program, is_jailed=jail_refusal() is None)
    with ThreadPoolExecutor(min(len(programs), usable_cores())) as pool:
        # After the first error, the other programs need not run.
        return tuple(pool.map(run, programs, checks))


def require_jail(*, allow_code_execution: bool) -> None:
    """Raise UserError if programs cannot be confined and the user did not consent."""
    if os.name != "posix":
        raise UserError(f"generated code is not run on {sys.platform}: use Linux, WSL 2 or a container")
    reason = jail_refusal()
    if reason is not None and not allow_code_execution:
        raise UserError(
            f"generated code is not run, as {reason}, or, on a machine made for it, let it run unconfined with {CONSENT_OPTION}"
        )


@lru_cache(maxsize=1)
def jail_refusal() -> str | None:
    """Why this machine cannot confine a program, and the fix; None if it can. Only trying shows it."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed: install bubblewrap (Debian, Ubuntu: apt install bubblewrap)"
    if platform.machine() not in ARCHITECTURES:
        return f"there is no seccomp filter for {platform.machine()}: use a machine of {' or '.join(ARCHITECTURES)}"
    try:
        result = run_program("", NO_CHECK)
    except (RuntimeError, OSError) as error:
        return (
            f"bwrap makes no jail ({error}): install bubblewrap 0.7 or newer, and allow user namespaces (Debian: sysctl "
            "kernel.unprivileged_userns_clone=1, Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0, in Docker: "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
        )
    return None if result.passed else f"an empty program fails ({result.reason}): install bubblewrap anew"


def run_program(
    program: str,
    check: ProgramCheck = NO_CHECK,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
    is_jailed: bool = True,
) -> SandboxResult:
    """Run one program in a jail, and its judge in another. Raises RuntimeError if they fail to start."""
    with ExitStack() as processes:
        start = partial(_start, processes, is_jailed=is_jailed)
        with ExitStack() as ends:
            calls, calling = _pipe(ends)
            answers, answering = _pipe(ends)
            player = start(["program", memory_bytes], stdin=calls, stdout=answering)
            fds = (calling.fileno(), answers.fileno())
            judge = start(["judge", memory_bytes, *fds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, descriptors=fds)
        request = {"program": program, **asdict(check)}
        assert judge.process.stdin is not None
        with suppress(BrokenPipeError), judge.process.stdin as stdin:  # if the judge has ended, the next line shows it
            stdin.write(json.dumps(request).encode())
        if judge.read(time.monotonic() + _GRACE_S, count=1) != inside.READY:
            message = player.last_words() or judge.last_words() or f"nothing started within {_GRACE_S:g} s"
            raise RuntimeError(f"no program was run: {message}")
        return _watch(player, judge, timeout_s, memory_bytes)


def _start(
    stack: ExitStack,
    arguments: Sequence[object],
    *,
    is_jailed: bool,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    descriptors: Sequence[int] = (),
) -> "_Confined":
    """Start a process of ``inside``, which ``stack`` ends. ``descriptors`` are further descriptors that it gets."""
    python = os.path.realpath(sys.executable)
    command = [python, "-P", "-s", "-S", "-B", _INSIDE, *map(str, arguments)]
    status = None
    with ExitStack() as ends:
        if is_jailed:
            folder = _HOME
            rules, ruling = _pipe(ends)
            ruling.write(build_filter(ARCHITECTURES[platform.machine()]))
            ruling.close()
            status, telling = _pipe(stack)
            ends.enter_context(telling)
            descriptors = (*descriptors, rules.fileno(), telling.fileno())
            jail = _jail(python, seccomp_fd=rules.fileno(), status_fd=telling.fileno())
            command = [*jail, "--", *command]
        else:
            scratch = tempfile.TemporaryDirectory(prefix="repro-program-", ignore_cleanup_errors=True)
            folder = stack.enter_context(scratch)
        # This is all of the environment. The hash seed gives sets the same order in every run.
        environment = {"PATH": "", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            env=environment,
            cwd="/" if is_jailed else folder,
            start_new_session=True,
        )
    confined = _Confined(process, status)
    stack.callback(confined.close)
    return confined


def _jail(python: str, *, seccomp_fd: int, status_fd: int) -> list[str]:
    """The command of bwrap with its options: all namespaces, a read-only root with little but Python, and a folder in memory."""
    mounts: list[str] = []
    for path in (*_readable(), python, _INSIDE):
        mounts += ["--ro-bind", path, path]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
        # The folder comes first, because this file or Python may lie below it.
        *("--size", str(FOLDER_BYTES), "--tmpfs", _HOME, *mounts),
        *("--dev-bind", "/dev/null", "/dev/null", "--chdir", _HOME, "--remount-ro", "/"),
        *("--seccomp", str(seccomp_fd), "--json-status-fd", str(status_fd)),
    ]


def _readable() -> list[str]:
    """Paths of the Python installation and the system's shared libraries. No path lies inside another."""
    paths = sysconfig.get_paths()
    python_dirs = (paths["stdlib"], paths["platstdlib"], str(sysconfig.get_config_var("DESTSHARED") or ""))
    installation = [os.path.realpath(path) for path in (*python_dirs, os.path.join(sys.base_prefix, "lib")) if path]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    existing = sorted({path for path in (*installation, *system) if os.path.exists(path)})
    return [path for path in existing if not any(path.startswith(other + "/") for other in existing)]


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", buffering=0)), stack.enter_context(open(writer, "wb", buffering=0))


def _watch(player: "_Confined", judge: "_Confined", timeout_s: float, memory_bytes: int) -> SandboxResult:
    deadline = time.monotonic() + timeout_s
    timed_out = SandboxResult(passed=False, reason=f"timed out after {timeout_s:g} s")
    while (verdict := judge.read(min(deadline, time.monotonic() + _POLL_S))) is None:
        if time.monotonic() >= deadline:
            return timed_out
        if player.num_files() > FOLDER_FILES:
            return SandboxResult(passed=False, reason=f"wrote more than {FOLDER_FILES} files")
    if not verdict:
        return SandboxResult(passed=False, reason="its answers ended its judge")
    kind, reason = json.loads(verdict)
    if kind == inside.GONE:
        try:
            status = player.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return timed_out
        return SandboxResult(passed=False, reason=_exit_text(status))
    if reason == inside.OUT_OF_MEMORY:
        reason = f"{reason}: more than {memory_bytes >> 20} MiB"
    printable = "".join(char if char.isprintable() else " " for char in reason)
    return SandboxResult(passed=kind == inside.PASSED, reason=printable[: inside.MAX_REASON_CHARS])


def _exit_text(status: int) -> str:
    """How a program ended. For a signal, ``status`` is 128 plus its number, as in a shell, or below zero, as in Python."""
    number = -status if status < 0 else status - 128
    if number in {member.value for member in signal.Signals}:
        return f"killed by {signal.Signals(number).name}"
    return f"ended before its tests did, with exit code {status}"


class _Confined:
    """A process of ``inside``. On ``status`` bwrap says which process it started; None without a jail."""

    def __init__(self, process: subprocess.Popen[bytes], status: IO[bytes] | None) -> None:
        self.process = process
        self._status = status
        self._folder: str | None = None

    def read(self, deadline: float, count: int = 4096) -> bytes | None:
        """Read its output: empty at the end, None if nothing came before the deadline."""
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(output, count) if ready else None

    def num_files(self) -> int:
        """The number of files in the program's folder, as its file system counts them."""
        if self._status is None:
            return 0
        if self._folder is None:
            first = json.loads(self._status.readline())
            self._folder = f"/proc/{first['child-pid']}/root{_HOME}"
        try:
            system = os.statvfs(self._folder)
        except OSError:  # it has just ended
            return 0
        return system.f_files - system.f_ffree

    def last_words(self) -> str:
        """The end of what an ended process wrote to stderr."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._kill()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]

    def close(self) -> None:
        self._kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _kill(self) -> None:
        """Kill the process and all that it started: when bwrap ends, its whole namespace ends."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# -- a filter of system calls that namespaces allow and a program must not make: classic BPF ----------------

LOAD, RETURN = 0x20, 0x06
JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT = 0x15, 0x35, 0x45
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16  # in struct seccomp_data
_CLONE_THREAD = 0x10000
_X32_NUMBERS = 0x40000000
"""From this number on, calls are those of x32, a second set of calls on x86_64."""
_CLONE3 = 435


class Architecture(NamedTuple):
    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    clone: int
    forbidden: tuple[int, ...]


# fork, vfork, ptrace, unshare, setns, process_vm_readv and _writev, memfd_create, memfd_secret, shmget, semget, msgget, mq_open,
# socket, socketpair, io_uring_setup, bpf, userfaultfd, perf_event_open, add_key, request_key, keyctl, pidfd_open, pidfd_getfd
ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        clone=56,
        forbidden=(
            *(57, 58, 101, 272, 308, 310, 311, 319, 447, 29, 64, 68, 240),
            *(41, 53, 425, 321, 323, 298, 248, 249, 250, 434, 438),
        ),
    ),
    "aarch64": Architecture(  # it has no fork and no vfork
        audit=0xC00000B7,
        clone=220,
        forbidden=(
            *(117, 97, 268, 270, 271, 279, 447, 194, 190, 186, 180),
            *(198, 199, 425, 280, 282, 241, 217, 218, 219, 434, 438),
        ),
    ),
}


def build_filter(machine: Architecture) -> bytes:
    """The filter for ``bwrap --seccomp``. It allows threads, but no processes, sockets, tracing, nested namespaces or uncounted memory."""
    refuse = _instruction(RETURN, FAIL | errno.EPERM)
    allow = _instruction(RETURN, ALLOW)
    parts = [
        _instruction(LOAD, _ARCH_OFFSET),
        _instruction(JUMP_EQUAL, machine.audit, if_true=1),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD, _NUMBER_OFFSET),
        _instruction(JUMP_GREATER_EQUAL, _X32_NUMBERS, if_false=1),
        refuse,
    ]
    for number in machine.forbidden:
        parts += [_instruction(JUMP_EQUAL, number, if_false=1), refuse]
    # Without clone3, libc falls back to clone, whose flags a filter can read.
    parts += [_instruction(JUMP_EQUAL, _CLONE3, if_false=1), _instruction(RETURN, FAIL | errno.ENOSYS)]
    parts += [
        _instruction(JUMP_EQUAL, machine.clone, if_true=1),
        allow,
        _instruction(LOAD, _FIRST_ARGUMENT_OFFSET),
        _instruction(JUMP_ANY_BIT, _CLONE_THREAD, if_true=1),
        refuse,
        allow,
    ]
    return b"".join(parts)


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. ``if_true`` and ``if_false`` are how many instructions a jump skips."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def passes(problems: Sequence[TaskProblem], texts: Sequence[str], *, allow_code_execution: bool = False) -> list[bool]:
    """pass@1: run ``code`` + continuation of each problem and judge it by ``check``, confined (or not, with the user's consent)."""
    programs = [f"{p.code}{text}\n" for p, text in zip(problems, texts, strict=True)]
    checks = [ProgramCheck(entry=p.entry, tests=f"{p.check}\n", given=p.code) for p in problems]
    results = run_many(programs, checks, allow_code_execution=allow_code_execution)
    return [result.passed for result in results]
