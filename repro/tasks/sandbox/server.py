"""The confined process: takes programs one at a time, runs each in a fork of itself, answers with a verdict.

The server itself enters namespaces and a small root; each fork then enters Landlock, gives up its capabilities, takes limits,
and last a seccomp filter. A program has two: one runs it, the other is its judge. The judge is there first and reads the tests
itself, so that neither they nor a way to a verdict are in the memory from which the program's process is made. The first line
written names the layers that the kernel granted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from engines.runtime.machine import settled
from repro.tasks.sandbox import channel, kernel, landlock, namespaces, seccomp
from repro.tasks.sandbox import judge as judging
from repro.tasks.sandbox.folder import MAX_DEPTH, empty, is_too_large
from repro.tasks.sandbox.layers import LANDLOCK, LIMITS, NAMESPACES, PRIVATE_ROOT, SECCOMP

MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 << 20
MAX_FOLDER_BYTES, MAX_FOLDER_FILES = namespaces.SCRATCH_BYTES, namespaces.SCRATCH_FILES
"""Limits of the program's folder: the size of the private root, or looked after where there is none."""
_MAX_MESSAGE_BYTES = 4096
_POLL_S, _POLL_EXIT_S = 0.05, 0.001
_FIRST_FD, _SPARE_FD, _LAST_FD = 3, 20, 256

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
    readable: tuple[str, ...]


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
    while True:
        try:
            request = json.loads(read_message())
        except channel.OverError:
            return
        limits = Limits(request["timeout_s"], request["memory_bytes"])
        verdict = _run(request["program"], request["entry"], limits, confinement)
        _send({"passed": verdict.passed, "reason": verdict.reason})


def read_message() -> bytes:
    """The next one on standard input, of which nothing behind it is read."""
    return channel.read_exactly(0, int.from_bytes(channel.read_exactly(0, 8), "big"))


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
        return Confinement(base, frozenset({LIMITS}), 0, ())
    layers, folder, readable = {LIMITS}, base, _readable()
    if NAMESPACES not in without and _succeeds_in_a_fork(namespaces.enter):
        namespaces.enter()
        layers.add(NAMESPACES)
        _continue_as_first_process()
        if PRIVATE_ROOT not in without and namespaces.change_root(base, readable):
            layers.add(PRIVATE_ROOT)
            folder = namespaces.HOME
    if version := 0 if LANDLOCK in without else landlock.abi():
        layers.add(LANDLOCK)
    if SECCOMP not in without and _succeeds_in_a_fork(seccomp.install):
        layers.add(SECCOMP)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nobody traces another, whoever they are
    return Confinement(folder, frozenset(layers), version, tuple(readable))


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


def _run(program: str, entry: str, limits: Limits, confinement: Confinement) -> Outcome:
    with contextlib.ExitStack() as stack:

        def pipe() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                stack.callback(_close, end)
            return ends

        (verdict, told), (calls, asking), (answers, answering) = pipe(), pipe(), pipe()
        if (judge := os.fork()) == 0:
            _become_judge((told, asking, answers), limits, confinement)
        for end in (told, asking, answers):
            _close(end)
        if os.read(verdict, 1) != judging.READY:
            os.waitpid(judge, 0)
            raise RuntimeError("no program was run: its judge did not start")
        if (child := os.fork()) == 0:
            _become_program(program, entry, (answering, calls), limits, confinement)
        for end in (calls, answering):
            _close(end)
        ending = _watch(child, judge, verdict, limits, confinement)
        _clean_up((child, judge), ending, confinement)
    if ending.forced is not None:
        return Outcome(False, ending.forced)
    return _outcome(ending, limits)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


class Ending(NamedTuple):
    message: bytes
    """What the judge reported."""
    status: int | None
    """How the program ended, where it did so by itself before there was a verdict; None if it has to be killed."""
    forced: str | None = None
    """Why it has to be killed."""


def _watch(child: int, judge: int, verdict: int, limits: Limits, confinement: Confinement) -> Ending:
    deadline = time.monotonic() + limits.timeout_s
    message, is_open = b"", True
    waits = select.poll()
    waits.register(0, 0)  # standard input reports only its end: the harness is gone
    waits.register(verdict, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        # Where the program is gone without a word there is only its end to wait for.
        events = dict(waits.poll(1000 * min(left, _POLL_S if is_open else _POLL_EXIT_S)))
        if 0 in events:
            _clean_up((child, judge), Ending(message, None), confinement)
            os._exit(1)
        if verdict in events:
            chunk = os.read(verdict, _MAX_MESSAGE_BYTES)
            message += chunk
            if not chunk:
                if message[:1] != judging.GONE:
                    return Ending(message, None)
                is_open = False
                waits.unregister(verdict)
        if not is_open:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return Ending(message, status)
        if PRIVATE_ROOT not in confinement.layers and is_too_large(
            confinement.folder, most_bytes=MAX_FOLDER_BYTES, most_files=MAX_FOLDER_FILES
        ):
            what = f"{MAX_FOLDER_BYTES >> 20} MiB or {MAX_FOLDER_FILES} files"
            return Ending(
                message, None, f"wrote more than {what}, nested {MAX_DEPTH} folders, or closed a folder to us"
            )
    return Ending(message, None, f"timed out after {limits.timeout_s:g} s")


def _clean_up(children: Sequence[int], ending: Ending, confinement: Confinement) -> None:
    """Kill the program, its judge and whatever it started, and remove its files."""
    if NAMESPACES in confinement.layers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everybody in the namespace but this process, its first
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    else:
        for child in children if ending.status is None else children[1:]:
            if SECCOMP not in confinement.layers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if SECCOMP not in confinement.layers and ending.status is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(children[0], signal.SIGKILL)
    empty(confinement.folder)


def _outcome(ending: Ending, limits: Limits) -> Outcome:
    kind, report = ending.message[:1], ending.message[1:].decode(errors="replace")
    if kind == judging.NOT_CONFINED:
        raise RuntimeError(f"no program was run: {report}")
    if kind == judging.GONE:
        assert ending.status is not None
        return Outcome(False, _ended(ending.status, limits))
    if kind not in (judging.PASSED, judging.WRONG):
        return Outcome(False, "its answers ended its judge")
    if report == judging.OUT_OF_MEMORY:
        report = f"{report}: more than {limits.memory_bytes >> 20} MiB"
    reason = "".join(c if c.isprintable() else " " for c in report)
    return Outcome(kind == judging.PASSED, reason[: judging.MAX_REASON_CHARS])


def _ended(status: int, limits: Limits) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return f"timed out after {limits.timeout_s:g} s"
        known = {each.value for each in signal.Signals}
        return f"killed by {signal.Signals(number).name if number in known else f'signal {number}'}"
    return f"ended before its tests did, with exit code {os.WEXITSTATUS(status)}"


# -- inside the fork ---------------------------------------------------------------------------------------


def _become_judge(ends: Sequence[int], limits: Limits, confinement: Confinement) -> NoReturn:
    """Never returns. It is ready once it has the tests."""
    code = 1
    try:
        check = json.loads(read_message())
        told, asking, answers = _leave_the_server(ends, confinement)
        try:
            _give_up_rights(limits, confinement)
        except Exception as error:
            os.write(told, judging.READY)
            judging.report(told, judging.NOT_CONFINED, judging.describe(error))
        else:
            os.write(told, judging.READY)
            judging.report(told, *judging.judge(check, asking, answers))
        code = 0
    finally:
        os._exit(code)


def _become_program(
    program: str, entry: str, ends: Sequence[int], limits: Limits, confinement: Confinement
) -> NoReturn:
    """Never returns. Nothing that it says is a verdict."""
    code = 1
    try:
        answers, calls = _leave_the_server(ends, confinement)
        try:
            _give_up_rights(limits, confinement)
        except Exception as error:  # raised again by the server
            channel.send(answers, channel.NOT_CONFINED, judging.describe(error).encode(errors="replace"))
        else:
            channel.send(answers, channel.CONFINED)
            names: dict[str, object] = {}  # as the published graders: no __name__ of "__main__"
            reason = judging.run(program, names)
            if reason is None:
                channel.send(answers, channel.RAN)
                judging.answer(names, entry, calls, answers)
            else:
                told = reason[: judging.MAX_REASON_CHARS].encode(errors="replace")
                channel.send(answers, channel.FAILED, told)
        code = 0
    finally:
        os._exit(code)


def _leave_the_server(ends: Sequence[int], confinement: Confinement) -> range:
    """Its descriptors, which are all that is open."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    kept = [fcntl.fcntl(end, fcntl.F_DUPFD, _SPARE_FD) for end in ends]
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    own = range(_FIRST_FD, _FIRST_FD + len(ends))
    for descriptor, end in zip(own, kept, strict=True):
        os.dup2(end, descriptor)
    os.closerange(own.stop, _LAST_FD)
    os.chdir(confinement.folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("repro", "engines")]:
        del sys.modules[name]
    for name in settled(os.environ):
        os.environ.pop(name, None)
    return own


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
        if LANDLOCK in confinement.layers:
            landlock.restrict(confinement.readable, [confinement.folder, "/dev/null"])
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
