"""The confined process: takes programs one at a time, runs each in a fork of itself, answers with a verdict.

The server itself enters namespaces, a small root and Landlock; each fork then gives up its capabilities,
takes limits, and last a seccomp filter. The first line written names the layers that the kernel granted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple, NoReturn

from repro.tasks.sandbox import kernel, landlock, namespaces, seccomp
from repro.tasks.sandbox.layers import LANDLOCK, LIMITS, NAMESPACES, PRIVATE_ROOT, SECCOMP

MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 << 20
MAX_FOLDER_BYTES, MAX_FOLDER_FILES = namespaces.SCRATCH_BYTES, namespaces.SCRATCH_FILES
"""Limits of the program's folder: the size of the private root, or looked after where there is none."""
MAX_REASON_CHARS = 200
_MAX_MESSAGE_BYTES = 4096
_POLL_S, _POLL_EXIT_S = 0.05, 0.001
_VERDICT_FD = 3
_PASSED, _FAILED, _NOT_CONFINED = b"1", b"0", b"!"

# What graded programs import most: loaded once, and its libraries opened, before any right is gone.
_PRELOADED = (
    "collections",
    "copy",
    "datetime",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "typing",
)


class Outcome(NamedTuple):
    passed: bool
    reason: str


class Limits(NamedTuple):
    timeout_s: float
    memory_bytes: int


class Confinement(NamedTuple):
    folder: str
    """Writable, emptied after each program."""
    layers: frozenset[str]
    landlock_abi: int


def serve(base: str, without: frozenset[str]) -> None:
    """Answer requests on standard input until it ends; ``without`` leaves layers out, for tests of the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.pop("LD_LIBRARY_PATH", None)  # was for starting this interpreter
    sys.path[:] = [os.path.realpath(path) for path in _standard_library()]
    for name in _PRELOADED:
        __import__(name)
    confinement = _confine(base, without)
    os.environ.update(HOME=confinement.folder, TMPDIR=confinement.folder)
    _send({"layers": sorted(confinement.layers), "landlock_abi": confinement.landlock_abi})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limits = Limits(request["timeout_s"], request["memory_bytes"])
        verdict = _run(request["program"], limits, confinement)
        _send({"passed": verdict.passed, "reason": verdict.reason})


def _send(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


# -- the server's own confinement --------------------------------------------------------------------------


def _standard_library() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], str(sysconfig.get_config_var("DESTSHARED") or "")]
    return list(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def _readable() -> list[str]:
    """The Python installation and the system's shared libraries, none inside another."""
    installation = [os.path.realpath(path) for path in (*_standard_library(), os.path.join(sys.base_prefix, "lib"))]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    found = sorted({path for path in (*installation, *system) if os.path.exists(path)})
    return [path for path in found if not any(path.startswith(other + "/") for other in found)]


def _confine(base: str, without: frozenset[str]) -> Confinement:
    if sys.platform != "linux":
        return Confinement(base, frozenset({LIMITS}), 0)
    layers, folder, readable = {LIMITS}, base, _readable()
    if NAMESPACES not in without and _succeeds_in_a_fork(namespaces.enter):
        namespaces.enter()
        layers.add(NAMESPACES)
        _continue_as_first_process()
        if PRIVATE_ROOT not in without and namespaces.change_root(base, readable):
            layers.add(PRIVATE_ROOT)
            folder = namespaces.HOME
    version = 0 if LANDLOCK in without else landlock.restrict(readable, [folder, "/dev/null"])
    if version:
        layers.add(LANDLOCK)
    if SECCOMP not in without and _succeeds_in_a_fork(seccomp.install):
        layers.add(SECCOMP)
    return Confinement(folder, frozenset(layers), version)


def _continue_as_first_process() -> None:
    """Go on in a child, process 1 of the new namespace: with it everything in the namespace ends."""
    child = os.fork()
    if child == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    os.closerange(0, 256)  # the pipes must end when the child does
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _succeeds_in_a_fork(function: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            function()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


# -- one program -------------------------------------------------------------------------------------------


def _run(program: str, limits: Limits, confinement: Confinement) -> Outcome:
    token = secrets.token_bytes(16)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _become_program(program, token, write_end, limits, confinement)
    os.close(write_end)
    ending = _watch(child, read_end, limits, confinement)
    os.close(read_end)
    _clean_up(child, ending, confinement)
    if ending.forced is not None:
        return Outcome(False, ending.forced)
    return _judge(ending, token, limits)


class Ending(NamedTuple):
    message: bytes
    """What the program reported."""
    status: int | None
    """How it ended by itself; None if it has to be killed."""
    forced: str | None = None
    """Why it has to be killed."""


def _watch(child: int, read_end: int, limits: Limits, confinement: Confinement) -> Ending:
    deadline = time.monotonic() + limits.timeout_s
    message, is_open = b"", True
    waits = select.poll()
    waits.register(0, 0)  # standard input reports only its end: the harness is gone
    waits.register(read_end, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        # Once the report is closed there is only the process to wait for.
        events = dict(waits.poll(1000 * min(left, _POLL_S if is_open else _POLL_EXIT_S)))
        if 0 in events:
            _clean_up(child, Ending(message, None), confinement)
            os._exit(1)
        if read_end in events:
            chunk = os.read(read_end, _MAX_MESSAGE_BYTES)
            message += chunk
            if len(message) > _MAX_MESSAGE_BYTES:
                return Ending(b"", None, "wrote to a descriptor that is not its own")
            if not chunk:
                is_open = False
                waits.unregister(read_end)
        if not is_open:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return Ending(message, status)
        if PRIVATE_ROOT not in confinement.layers and _is_too_large(confinement.folder):
            reason = (
                f"wrote more than {MAX_FOLDER_BYTES >> 20} MiB or {MAX_FOLDER_FILES} files, or closed a folder to us"
            )
            return Ending(message, None, reason)
    return Ending(message, None, f"timed out after {limits.timeout_s:g} s")


def _clean_up(child: int, ending: Ending, confinement: Confinement) -> None:
    """Kill the program and whatever it started, and remove its files."""
    if NAMESPACES in confinement.layers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everybody in the namespace but this process, its first
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        if SECCOMP not in confinement.layers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        if ending.status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    _empty(confinement.folder)


def _judge(ending: Ending, token: bytes, limits: Limits) -> Outcome:
    message, status = ending.message, ending.status
    assert status is not None
    if message.startswith(token):
        kind, report = message[len(token) : len(token) + 1], message[len(token) + 1 :].decode(errors="replace")
        if kind == _NOT_CONFINED:
            raise RuntimeError(f"no program was run: {report}")
        reason = "".join(c if c.isprintable() else " " for c in report)
        return Outcome(kind == _PASSED, reason[:MAX_REASON_CHARS])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return Outcome(False, f"timed out after {limits.timeout_s:g} s")
        return Outcome(False, f"killed by {signal.Signals(number).name}")
    return Outcome(False, f"ended before its tests did, with exit code {os.WEXITSTATUS(status)}")


# -- inside the fork ---------------------------------------------------------------------------------------


def _become_program(program: str, token: bytes, write_end: int, limits: Limits, confinement: Confinement) -> NoReturn:
    """Never returns. The token is what tells the program's report from anything it may write itself."""
    code = 1
    try:
        os.dup2(write_end, _VERDICT_FD)
        kind, reason = _NOT_CONFINED, ""
        try:
            _leave_the_server(confinement)
            _give_up_rights(limits, confinement)
        except Exception as error:  # raised again by the server
            reason = _describe(error)
        else:
            passed, reason = _execute(program, limits)
            kind = _PASSED if passed else _FAILED
        os.write(_VERDICT_FD, token + kind + reason[:MAX_REASON_CHARS].encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _leave_the_server(confinement: Confinement) -> None:
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(_VERDICT_FD + 1, 256)
    os.chdir(confinement.folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "repro"]:
        del sys.modules[name]


def _give_up_rights(limits: Limits, confinement: Confinement) -> None:
    cpu_s = math.ceil(limits.timeout_s) + 1
    _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # a signal, then the kill
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    if SECCOMP not in confinement.layers:
        # No new process of this user. It would stop threads too, which seccomp tells apart, and does not bind root.
        _limit(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, limits.memory_bytes)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if SECCOMP in confinement.layers:
        seccomp.install()


def _limit(name: int, soft: int, hard: int | None = None) -> None:
    """A lower limit that is already there stays."""
    allowed = resource.getrlimit(name)[1]
    highest = max(soft, hard or 0) if allowed == resource.RLIM_INFINITY else allowed
    resource.setrlimit(name, (min(soft, highest), min(soft if hard is None else hard, highest)))


def _execute(program: str, limits: Limits) -> Outcome:
    try:
        code: CodeType = compile(program, "<program>", "exec")
        exec(code, {})  # as the published graders: no __name__ of "__main__"
    except MemoryError:
        return Outcome(False, f"out of memory: more than {limits.memory_bytes >> 20} MiB")
    except BaseException as error:  # a program may raise anything, and none of it is an error of ours
        prefix = "forbidden: " if isinstance(error, PermissionError) else ""
        return Outcome(False, prefix + _describe(error))
    return Outcome(True, "ok")


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error).strip()
    except BaseException:
        return name
    return f"{name}: {text.splitlines()[0]}" if text else name


# -- the program's folder ----------------------------------------------------------------------------------


def _is_too_large(folder: str) -> bool:
    """Whether the files exceed the quota; a tree that cannot be walked (too deep for a path, closed to us) does."""
    num_bytes = num_files = 0
    try:
        for entry in _walk(folder):
            num_files += 1
            with contextlib.suppress(FileNotFoundError):  # gone since
                num_bytes += entry.stat(follow_symlinks=False).st_size
            if num_bytes > MAX_FOLDER_BYTES or num_files > MAX_FOLDER_FILES:
                return True
    except OSError:
        return True
    return False


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    pending = [folder]
    while pending:
        with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _empty(folder: str) -> None:
    """Remove what a program left, from inside: its tree may be deeper than recursion, open files or paths allow."""
    os.chmod(folder, 0o700)
    os.chdir(folder)
    way: list[str] = []
    while True:
        inner = _remove_files()
        if inner is not None:
            os.chmod(inner, 0o700)
            os.chdir(inner)
            way.append(inner)
        elif way:
            os.chdir("..")
            os.rmdir(way.pop())
        else:
            return


def _remove_files() -> str | None:
    """Remove the files of the current folder, until a folder is met; its name."""
    with os.scandir() as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name)
    return None
