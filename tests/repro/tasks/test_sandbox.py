"""What generated code must not be able to do. A program below passes exactly if its attack works."""

import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from support.jail import ALLOW_EVERYTHING, needs_jail
from support.refusals import refuses
from support.tables import data_beside

from engines.errors import UserError
from repro.tasks.sandbox import client
from repro.tasks.sandbox.client import NO_CHECK, ProgramCheck, SandboxResult, run_many, run_program

PROGRAMS = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text(encoding="utf-8"))
REPO = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def run(program: str, timeout_s: float = 60.0, memory_bytes: int = 256 * MIB) -> SandboxResult:
    return run_program(textwrap.dedent(program), timeout_s=timeout_s, memory_bytes=memory_bytes)


def processes_with(word: str) -> set[int]:
    """Processes that have ``word`` in their environment; bwrap and what it starts have it from the client."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


# -- files -------------------------------------------------------------------------------------------------


@needs_jail
def test_a_repository_may_lie_where_the_folder_is_mounted(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as repository:
        monkeypatch.setattr(client, "_INSIDE", shutil.copy(client._INSIDE, repository))
        assert run("").passed


@needs_jail
@pytest.mark.parametrize("name", PROGRAMS["writes"])
def test_nothing_outside_the_folder_can_be_changed(tmp_path, name):
    secret, target = tmp_path / "secret", tmp_path / "written"
    secret.write_text("password")
    os.chmod(secret, 0o600)
    before = secret.stat()
    stdlib = Path(os.__file__).stat()
    assert not run(PROGRAMS["writes"][name].format(target=str(target), folder=str(tmp_path), secret=str(secret))).passed
    assert not target.exists()
    assert secret.read_text() == "password"
    after = secret.stat()
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)
    assert (Path(os.__file__).stat().st_size, Path(os.__file__).stat().st_ctime) == (stdlib.st_size, stdlib.st_ctime)


@needs_jail
def test_only_the_python_installation_can_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    # The program passes where nothing of what it is shown can be read: folders on the way to Python may be listed.
    system = ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/cmdline", "/dev/shm", "/dev/urandom")
    paths = [*system, os.path.expanduser("~"), str(REPO), str(REPO / "README.md"), str(secret)]
    way = {part for prefix in (sys.base_prefix, sys.prefix, client._INSIDE) for part in Path(prefix).parts}
    for path in paths:
        names = set(os.listdir(path)) - way if os.path.isdir(path) else set()
        assert run(PROGRAMS["reads"].format(shown=path, names=names)) == SandboxResult(passed=True, reason="ok"), path
    assert run(PROGRAMS["reads"].format(shown=os.__file__, names=set())).reason == "SystemExit: read"


@needs_jail
def test_the_project_and_the_environment_are_not_there(monkeypatch):
    for name in ("repro", "engines", "numpy", "torch"):
        assert run(f"import {name}").reason.startswith("ModuleNotFoundError")
    monkeypatch.setenv("REPRO_SECRET_TOKEN", "x")
    result = run("import os; raise Exception(sorted(os.environ))")
    assert result.reason == "Exception: ['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']"


@needs_jail
@pytest.mark.parametrize(("program", "reason"), PROGRAMS["disk"])
def test_disk_is_bounded(program, reason):
    assert reason in run(program).reason


@needs_jail
def test_a_program_leaves_no_trace_to_the_next():
    first = """
        import builtins, math, os, sys
        math.pi = sys.x = 1
        os.environ['X'] = '1'
        os.mkdir('locked'); open('locked/file', 'w').close(); os.symlink('/', 'locked/root'); os.chmod('locked', 0)
        for _ in range(3000):
            os.mkdir('deep'); os.chdir('deep')
        builtins.len = 1
        """
    assert not run(first).reason.startswith("forbidden")
    second = """
        import math, os, sys
        assert len('ab') == 2 and math.pi > 3
        assert 'X' not in os.environ and not hasattr(sys, 'x')
        assert not {'locked', 'deep'} & {*os.listdir()}
        open('a', 'wb').write(bytes(8 << 20))
        """
    assert run(second).passed


# -- network -----------------------------------------------------------------------------------------------


@needs_jail
def test_there_is_no_network(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        name = f"\0repro-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        doors = {
            "tcp": f"s.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
            "tcp server": "s.create_server(('127.0.0.1', 0))",
            "udp": f"s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))",
            "unix": f"s.socket(s.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            "abstract": f"s.socket(s.AF_UNIX).connect({name!r})",
            "dns": "assert s.getaddrinfo('example.org', 80)",
        }
        for door, program in doors.items():
            assert not run(f"import socket as s\n{program}").passed, door
        for listener in (tcp, udp, unix, abstract):
            listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)
        for listener in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


@needs_jail
def test_the_namespaces_close_the_network_without_the_filter(monkeypatch, tmp_path):
    monkeypatch.setattr(client, "build_filter", lambda machine: ALLOW_EVERYTHING)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0repro-test-alone-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        assert run("import socket as s; s.socket()").passed, "no filter is there"
        for door in (
            f"s.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
            f"s.socket(s.AF_UNIX).connect({name!r})",
        ):
            assert not run(f"import socket as s\n{door}").passed, door


# -- processes ---------------------------------------------------------------------------------------------


@needs_jail
@pytest.mark.parametrize("is_filtered", [True, False])
@pytest.mark.parametrize("ending", ["", "while True: pass", "import os; os._exit(0)", "import os; os.abort()"])
def test_nothing_outlives_its_program(monkeypatch, ending, is_filtered):
    if not is_filtered:
        monkeypatch.setattr(client, "build_filter", lambda machine: ALLOW_EVERYTHING)
    word = f"/repro-{os.getpid()}-{ending}-{is_filtered}"
    monkeypatch.setenv("LD_LIBRARY_PATH", word)
    run(PROGRAMS["daemon"] + ending, timeout_s=0.5)
    wait_until(lambda: not processes_with(word))  # the kernel ends a namespace behind our back


CANNOT = PROGRAMS["cannot"] | {
    call: f"import ctypes, os, resource\nlibc = ctypes.CDLL(None, use_errno=True)\nassert not ({call})"
    for call in PROGRAMS["libc calls"]
}


@needs_jail
@pytest.mark.parametrize("name", CANNOT)
def test_no_process_is_made_and_no_limit_undone(name):
    assert not run(CANNOT[name]).passed


@needs_jail
def test_no_process_can_be_signalled():
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        for number in ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT"):
            attack = f"""
                import os, signal
                for target in ({os.getpid()}, {os.getppid()}, {victim.pid}):
                    try:
                        os.kill(target, signal.{number})
                    except ProcessLookupError:
                        continue
                    raise SystemExit('signalled')
                for call in (os.kill, os.killpg):
                    for target in (os.getppid(), -1, {os.getpgid(0)}):
                        try:
                            call(target, signal.{number})
                        except OSError:
                            pass
                """
            assert "signalled" not in run(attack, timeout_s=5.0).reason
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@needs_jail
def test_a_killed_harness_takes_the_program_along():
    word = f"/repro-harness-{os.getpid()}"
    code = "from repro.tasks.sandbox.client import run_program; run_program('while True: pass', timeout_s=3000)"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "LD_LIBRARY_PATH": word}
    harness = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: len(processes_with(word)) >= 5)  # harness, two bwraps and what they run
    harness.kill()
    harness.wait()
    wait_until(lambda: not processes_with(word))


def wait_until(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("still not so after a minute")


# -- time, memory, output ----------------------------------------------------------------------------------


@needs_jail
@pytest.mark.parametrize("program", PROGRAMS["endless"])
def test_time_ends(program):
    assert run(program, timeout_s=0.3) == SandboxResult(passed=False, reason="timed out after 0.3 s")


@needs_jail
@pytest.mark.parametrize(
    "program", ["bytearray(10**10)", "x = []\nwhile True: x.append(bytes(1 << 20))", "x = 'a'\nwhile True: x += x"]
)
def test_memory_ends(program):
    assert run(program).reason == "out of memory: more than 256 MiB"


# -- verdicts ----------------------------------------------------------------------------------------------


LONG = (
    ("raise Exception('\\x1b[31m\\udc80' + 'x' * 500)", "Exception:  [31m?" + "x" * 183),
    ("raise type('a' * 5000, (Exception,), {})", "a" * 200),
)


@needs_jail
@pytest.mark.parametrize(("program", "reason"), [*PROGRAMS["failures"], *LONG])
def test_failures_say_why(program, reason):
    assert run_program(program, timeout_s=60) == SandboxResult(passed=False, reason=reason)


@needs_jail
@pytest.mark.parametrize(("program", "reason"), PROGRAMS["failures of every interpreter"])
def test_failures_of_every_interpreter_say_why(program, reason):
    result = run(program)
    assert not result.passed
    assert reason in result.reason


@needs_jail
def test_no_descriptor_of_the_parent_is_open(tmp_path):
    program = """
        import os
        found = []
        for number in range(5, 2000):
            try:
                os.fstat(number)
            except OSError:
                continue
            found.append(number)
        assert not found, found
        """
    with open(tmp_path / "secret", "w") as secret:
        os.set_inheritable(secret.fileno(), True)
        assert run(program) == SandboxResult(passed=True, reason="ok")


@needs_jail
@pytest.mark.parametrize("ending", ["os._exit(0)", "raise ValueError"])
@pytest.mark.parametrize("word", [b"+", b'["passed", "ok"]\n', b"r" + bytes(4) + b"+"])
def test_writing_to_every_descriptor_is_no_verdict(word, ending):
    program = f"import os\nfor fd in range(64):\n  try: os.write(fd, {word!r})\n  except OSError: pass\n{ending}"
    check = ProgramCheck(entry="f", tests="assert f(1) == 2")
    assert not run_program(program, check, timeout_s=20.0).passed


@needs_jail
@pytest.mark.parametrize("program", PROGRAMS["correct"])
def test_correct_programs_pass(program):
    assert run(program) == SandboxResult(passed=True, reason="ok")


@needs_jail
def test_the_order_of_sets_is_the_same_in_every_run():
    program = "raise Exception(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({result.reason for result in run_many([program] * 3, [NO_CHECK] * 3)}) == 1


@needs_jail
def test_many_keep_their_order():
    programs = [f"assert {number} % 3" for number in range(12)]
    results = run_many(programs, [NO_CHECK] * 12)
    assert [result.passed for result in results] == [number % 3 != 0 for number in range(12)]
    assert run_many([], []) == ()


# -- refusals and consent ----------------------------------------------------------------------------------


def test_without_a_jail_nothing_is_run_unless_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr(client, "jail_refusal", lambda: "bwrap is not installed: install bubblewrap")
    with pytest.raises(UserError, match=r"install bubblewrap.*--allow-code-execution"):
        run_many(["x = 1"], [NO_CHECK])
    target = tmp_path / "a"
    program = f"open({str(target)!r}, 'w').write('x')"
    fails = "raise ValueError('no')"
    results = run_many([program, fails], [NO_CHECK] * 2, allow_code_execution=True)
    assert results == (SandboxResult(passed=True, reason="ok"), SandboxResult(passed=False, reason="ValueError: no"))
    assert target.read_text() == "x"


@pytest.mark.parametrize(("program", "reason"), PROGRAMS["without a jail"])
def test_limits_hold_without_a_jail(monkeypatch, program, reason):
    word = f"/repro-{os.getpid()}-unjailed"
    monkeypatch.setenv("LD_LIBRARY_PATH", word)
    timeout_s = 0.3 if reason.startswith("timed") else 60.0
    assert run_program(program, timeout_s=timeout_s, is_jailed=False).reason == reason
    if sys.platform == "linux":
        wait_until(lambda: not processes_with(word))


@pytest.mark.parametrize(
    ("present", "machine", "reason"), data_beside(__file__, "sandbox")["a_machine_without_a_jail_says_why"]
)
def test_a_machine_without_a_jail_says_why(monkeypatch, present, machine, reason):
    monkeypatch.setattr(client.shutil, "which", lambda name: present)
    monkeypatch.setattr(client.platform, "machine", lambda: machine)
    assert reason in client.jail_refusal.__wrapped__()


@pytest.mark.parametrize(
    "words", ["bwrap: Unknown option --size", "bwrap: setting up uid map: Permission denied", "bwrap: is lost"]
)
def test_a_bwrap_that_makes_no_jail_is_one_sentence_with_the_fix(monkeypatch, tmp_path, words):
    broken = tmp_path / "bwrap"
    broken.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = client.jail_refusal.__wrapped__()
    assert f"bwrap makes no jail (no program was run: {words}): install bubblewrap 0.7 or newer, and allow user" in said
    assert "\n" not in said


def test_a_bwrap_that_cannot_be_started_is_refused_too(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "Exec format error" in client.jail_refusal.__wrapped__()


def test_a_system_that_is_not_posix_is_refused_whatever_is_allowed(monkeypatch):
    monkeypatch.setattr(client.os, "name", "nt")
    with refuses("not run on"):
        client.require_jail(allow_code_execution=True)


@needs_jail
def test_lower_limits_of_the_session_stay():
    program = "import resource; raise Exception(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_AS)[1])"
    lowered = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2)"
    code = f"{lowered}\nfrom repro.tasks.sandbox.client import run_program\nprint(run_program({program!r}).reason)"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"Exception: ((40, 40), {1 << 28})"


@needs_jail
def test_a_program_that_cannot_be_confined_is_an_error_and_not_a_verdict():
    with pytest.raises(RuntimeError, match="no program was run: OverflowError"):
        run_program("x = 1", memory_bytes=1 << 70)


# -- the filter itself, also of the architecture this is not ------------------------------------------------


def decide(machine: client.Architecture, number: int, argument: int = 0, audit: int | None = None) -> int:
    """Classic BPF, as the kernel runs it."""
    words = {0: number, 4: machine.audit if audit is None else audit, 16: argument}
    program = list(struct.iter_unpack("=HBBI", client.build_filter(machine)))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == client.RETURN:
            return value
        if code == client.LOAD:
            accumulator = words[value]
        else:
            holds = {
                client.JUMP_EQUAL: accumulator == value,
                client.JUMP_GREATER_EQUAL: accumulator >= value,
                client.JUMP_ANY_BIT: bool(accumulator & value),
            }[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("name", client.ARCHITECTURES)
def test_the_filter_decides_by_call_and_argument(name):
    machine = client.ARCHITECTURES[name]
    refused = client.FAIL | errno.EPERM
    # read, then socket, ptrace, unshare, memfd_create, shmget, semget, msgget, mq_open
    calls = {"x86_64": (0, 41, 101, 272, 319, 29, 64, 68, 240), "aarch64": (63, 198, 117, 97, 279, 194, 190, 186, 180)}
    read, *forbidden = calls[name]
    assert decide(machine, read) == client.ALLOW
    for number in [*forbidden, 425, 438, 434]:  # io_uring_setup, pidfd_getfd, pidfd_open
        assert decide(machine, number) == refused
    assert decide(machine, read, audit=0x40000003) == client.KILL_PROCESS  # 32-bit x86
    assert decide(machine, 0x40000000 | read) == refused  # x32
    assert decide(machine, 435) == client.FAIL | errno.ENOSYS  # clone3
    assert decide(machine, machine.clone, 0x3D0F00) == client.ALLOW  # a thread, as glibc makes it
    assert decide(machine, machine.clone, 0x1200011) == refused  # fork, as glibc makes it
