"""What generated code must not be able to do. A program below passes exactly if its attack works."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.errors import UserError
from repro.tasks.sandbox import landlock, seccomp
from repro.tasks.sandbox.client import ACCEPT_VARIABLE, NO_CHECK, Sandbox, SandboxResult, run_many, sandbox_support
from repro.tasks.sandbox.layers import LANDLOCK, LAYERS, NAMESPACES, PRIVATE_ROOT, SECCOMP

REPO = Path(__file__).resolve().parents[3]
MIB = 1 << 20

if not hasattr(os, "fork"):
    pytest.skip("no fork on this system: generated code is not run here at all", allow_module_level=True)
SUPPORT = sandbox_support()
needs_isolation = pytest.mark.skipif(not SUPPORT.is_isolated, reason=f"not isolated here: {', '.join(SUPPORT.gaps)}")

# Each is enough by itself: what is left out must not be what held.
COMBINATIONS = {"all": (), "Landlock and seccomp": (NAMESPACES,), "namespaces": (LANDLOCK, SECCOMP)}


@pytest.fixture(scope="module", params=COMBINATIONS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(without=COMBINATIONS[request.param], accept_gaps=True) as opened:
        if not opened.support.is_isolated:
            pytest.skip(f"{request.param}: not isolated here: {', '.join(opened.support.gaps)}")
        yield opened


@pytest.fixture(scope="module")
def usual() -> Iterator[Sandbox]:
    """All layers that there are, for what does not depend on them."""
    with Sandbox() as opened:
        yield opened


def run(sandbox: Sandbox, program: str, timeout_s: float = 60.0, memory_bytes: int = 256 * MIB) -> SandboxResult:
    return sandbox.run(textwrap.dedent(program), timeout_s=timeout_s, memory_bytes=memory_bytes)


def processes_of(sandbox: Sandbox) -> set[int]:
    """The server and its descendants, which all show its command line."""
    folder = sandbox._server.args[-1 - len(sandbox._without)].encode()
    return processes_with(folder)


def processes_with(word: bytes) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


# -- files -------------------------------------------------------------------------------------------------

WRITES = {
    "root": "open('/written', 'w').write('x')",
    "absolute": "open({target!r}, 'w').write('x')",
    "dots": "import os; open('../' * 30 + {target!r}, 'w').write('x')",
    "symlink": "import os; os.symlink({folder!r}, 'link'); open('link/written', 'w').write('x')",
    "rename": "import os; open('a', 'w').close(); os.rename('a', {target!r})",
    "mkdir": "import os; os.mkdir({target!r})",
    "fifo": "import os; os.mkfifo({target!r})",
    "delete": "import os; os.remove({secret!r})",
    "append": "open({secret!r}, 'a').write('x')",
    "truncate": "import os; os.truncate({secret!r}, 0)",
    "truncate on open": "import os; os.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
    "mode": "import os; os.chmod({secret!r}, 0o777)",
    "times": "import os; os.utime({secret!r}, (1, 1))",
    "replace": "import os; open('a', 'w').close(); os.replace('a', {secret!r})",
    "hard link": "import os; os.link({secret!r}, 'a'); open('a', 'w').write('x')",
    "python": "import os; open(os.__file__, 'a').write('')",
    "python's mode": "import os; os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
    "python truncated on open": "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "a new module": "import os; open(os.path.join(os.path.dirname(os.__file__), 'repro_was_here.py'), 'w')",
    "shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory('repro_was_here', True, 10)",
}


@needs_isolation
@pytest.mark.parametrize("name", WRITES)
def test_nothing_outside_the_folder_can_be_changed(sandbox, tmp_path, name):
    secret, target = tmp_path / "secret", tmp_path / "written"
    secret.write_text("password")
    os.chmod(secret, 0o600)
    before = secret.stat()
    stdlib = Path(os.__file__).stat()
    result = run(sandbox, WRITES[name].format(target=str(target), folder=str(tmp_path), secret=str(secret)))
    assert not result.passed
    assert not target.exists()
    assert secret.read_text() == "password"
    assert (secret.stat().st_mode, secret.stat().st_mtime, secret.stat().st_nlink) == (
        before.st_mode,
        before.st_mtime,
        before.st_nlink,
    )
    assert (Path(os.__file__).stat().st_size, Path(os.__file__).stat().st_ctime) == (stdlib.st_size, stdlib.st_ctime)


@needs_isolation
@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/cmdline", "/dev/shm", "/dev/urandom", "~"),
        *("REPO", "REPO/README.md", "SECRET"),
    ],
)
def test_only_the_python_installation_can_be_read(sandbox, tmp_path, path):
    (tmp_path / "secret").write_text("password")
    shown = path.replace("REPO", str(REPO)).replace("SECRET", str(tmp_path / "secret"))
    shown = os.path.expanduser(shown)
    for target in (shown, "../" * 30 + shown):
        for attempt in (
            f"open({target!r}).read()",
            f"__import__('os').listdir({target!r})",
            f"import os; os.symlink({shown!r}, 'a'); open('a').read()",
        ):
            # Folders to reach the installation itself may be listed in the private root.
            result = run(sandbox, f"found = {attempt}" if "symlink" not in attempt else attempt)
            if result.passed and "listdir" in attempt:
                allowed = run(
                    sandbox, f"import os, sys\nassert not {listing_of(shown)!r} & set(os.listdir({target!r}))"
                )
                assert allowed.passed, allowed
            else:
                assert not result.passed


def listing_of(path: str) -> set[str]:
    """What is in a folder besides the way to the Python installation."""
    way = {part for prefix in (sys.base_prefix, sys.prefix) for part in Path(prefix).parts}
    return set(os.listdir(path)) - way if os.path.isdir(path) else set()


@needs_isolation
def test_the_project_and_the_environment_are_not_there(sandbox, monkeypatch):
    for name in ("repro", "engines", "numpy", "torch"):
        assert not run(sandbox, f"import {name}").passed
    monkeypatch.setenv("REPRO_SECRET_TOKEN", "x")
    with Sandbox() as other:
        result = run(other, "import os; raise Exception(sorted(os.environ))")
    assert result.reason == "Exception: ['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']"


@needs_isolation
def test_disk_is_bounded_and_given_back(sandbox):
    one_file = "f = open('a', 'wb')\nfor _ in range(10_000): f.write(bytes(1 << 20))"
    assert not run(sandbox, one_file).passed
    many = """
        for i in range(10_000):
            with open(f'file{i}', 'wb') as f:
                f.write(bytes(1 << 20))
        """
    result = run(sandbox, many)
    assert not result.passed
    assert "timed out" not in result.reason  # ended by the quota
    assert run(sandbox, "import os; assert os.listdir() == []").passed
    assert run(sandbox, "open('a', 'wb').write(bytes(8 << 20))").passed


@needs_isolation
def test_a_deep_or_locked_tree_is_removed(sandbox):
    program = """
        import os
        os.mkdir('locked'); os.mkdir('locked/inner'); open('locked/inner/file', 'w').close()
        os.symlink('/', 'locked/inner/root')
        try:
            os.chmod('locked/inner', 0); os.chmod('locked', 0)
        except PermissionError:
            pass  # seccomp
        os.mkdir('closed', 0)
        for _ in range(3000):
            os.mkdir('deep'); os.chdir('deep')
        """
    result = run(sandbox, program)
    assert result.passed or "closed a folder" in result.reason  # where disk is looked after by walking it, not as root
    assert run(sandbox, "import os; assert os.listdir() == []").passed


@needs_isolation
def test_what_is_left_by_a_server_that_was_killed_is_removed():
    """Also where it lies on this machine's disk, deeper than a path may be long or a recursion deep."""
    with Sandbox(without=(NAMESPACES,), accept_gaps=True) as opened:
        folder = Path(opened._server.args[-2])
        opened._server.kill()
        opened._server.wait()
        place = os.open(folder, os.O_RDONLY)
        os.symlink("/", "link", dir_fd=place)
        for _ in range(2500):
            os.mkdir("deep", dir_fd=place)
            inner = os.open("deep", os.O_RDONLY, dir_fd=place)
            os.close(place)
            place = inner
        os.close(place)
    assert not folder.exists()


@needs_isolation
def test_a_tree_that_is_walked_may_not_be_deep(sandbox):
    if PRIVATE_ROOT in sandbox.support.layers:
        pytest.skip("the number of files bounds it there")
    program = "import os, time\nfor _ in range(300): os.mkdir('d'); os.chdir('d')\ntime.sleep(59)"
    assert "nested 200 folders" in run(sandbox, program).reason


@needs_isolation
def test_many_files_are_too_many(sandbox):
    program = "import time\nfor i in range(5000): open(f'file{i}', 'w').close()\ntime.sleep(59)"
    result = run(sandbox, program)
    assert not result.passed
    assert "timed out" not in result.reason


# -- network -----------------------------------------------------------------------------------------------


@needs_isolation
def test_there_is_no_network(sandbox, tmp_path):
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
        open_doors = {
            "tcp": f"s.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
            "udp": f"s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))",
            "unix": f"s.socket(s.AF_UNIX).connect({str(tmp_path / 'socket')!r})",
            "abstract": f"s.socket(s.AF_UNIX).connect({name!r})",
            "dns": "assert s.getaddrinfo('example.org', 80)",
        }
        for door, program in open_doors.items():
            assert not run(sandbox, f"import socket as s\n{program}").passed, door
        for listener in (tcp, udp, unix, abstract):
            listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)
        for listener in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


# -- processes ---------------------------------------------------------------------------------------------

DAEMON = """
    import os, signal, time
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    if os.fork() == 0:
        os.setsid()
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
        while True:
            time.sleep(1)
    """


@needs_isolation
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("ending", ["", "while True: pass", "import os; os._exit(0)", "import os; os.abort()"])
def test_nothing_outlives_its_program(sandbox, ending):
    before = processes_of(sandbox)
    assert 1 <= len(before) <= 2
    run(sandbox, textwrap.dedent(DAEMON) + ending, timeout_s=0.5)
    assert processes_of(sandbox) == before


@needs_isolation
@pytest.mark.parametrize(
    "program",
    [
        "import subprocess; subprocess.run(['/bin/true'], check=True)",
        "import os; assert os.system('true') == 0",
        "import os; os.execv('/bin/sh', ['sh', '-c', 'true'])",
        "import sys, os; os.execv(sys.executable, [sys.executable, '-c', ''])",
    ],
)
def test_no_program_can_be_started(sandbox, program):
    assert not run(sandbox, program).passed


@needs_isolation
def test_no_process_can_be_made(sandbox):
    if SECCOMP not in sandbox.support.layers and os.getuid() == 0:
        pytest.skip("without seccomp there is a limit on processes only, which does not bind root")
    for call in ("os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "__import__('pty').fork()"):
        assert not run(sandbox, f"import os\nif {call} == 0: os._exit(0)").passed


@needs_isolation
@pytest.mark.skipif(sys.platform != "linux" or landlock.abi() < 6, reason="needs Landlock of ABI 6 (Linux 6.12)")
def test_landlock_alone_closes_tcp_abstract_sockets_and_signals():
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with (
        Sandbox(without=(NAMESPACES, SECCOMP), accept_gaps=True) as landlocked,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        name = f"\0repro-test-alone-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        for attack in (
            f"import socket as s; s.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
            "import socket as s; s.create_server(('127.0.0.1', 0))",
            f"import socket as s; s.socket(s.AF_UNIX).connect({name!r})",
            f"import os, signal; os.kill({victim.pid}, signal.SIGKILL)",
        ):
            assert run(landlocked, attack).reason.startswith("forbidden: PermissionError"), attack
    assert victim.poll() is None
    victim.kill()
    victim.wait()


@needs_isolation
def test_no_process_can_be_signalled(sandbox):
    targets = [os.getpid(), os.getppid(), sandbox._server.pid]
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        for number in ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT"):
            for target in [*targets, victim.pid]:
                assert not run(sandbox, f"import os, signal; os.kill({target}, signal.{number})").passed
            run(sandbox, f"import os, signal; os.kill(os.getppid(), signal.{number})")
            run(sandbox, f"import os, signal; os.kill(-1, signal.{number})", timeout_s=1.0)  # its judge too
            run(sandbox, f"import os, signal; os.killpg({os.getpgid(0)}, signal.{number})")
        assert victim.poll() is None
        assert sandbox._server.poll() is None
        assert run(sandbox, "x = 1").passed
    finally:
        victim.kill()
        victim.wait()


@needs_isolation
@pytest.mark.skipif(sys.platform != "linux", reason="Linux system calls")
@pytest.mark.parametrize(
    "call",
    [
        "libc.prctl(22, 0, 0, 0, 0)",  # PR_SET_SECCOMP, off
        "libc.ptrace(16, os.getppid(), 0, 0)",  # PTRACE_ATTACH
        "libc.ptrace(16, os.getpid() - 1, 0, 0)",  # the judge
        "libc.setuid(0) or libc.mount(None, b'/', None, 32, None)",  # MS_REMOUNT, writable
        "libc.umount2(b'/', 2)",
        "libc.setns(0, 0)",
        "libc.chroot(b'.') or os.chdir('..') or os.listdir('/etc')",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.setrlimit(resource.RLIMIT_CPU, (999, 999))",
    ],
)
def test_no_limit_can_be_undone(sandbox, call):
    program = f"""
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        assert not ({call})
        """
    result = run(sandbox, program)
    assert not result.passed


@needs_isolation
@pytest.mark.skipif(sys.platform != "linux", reason="Linux system calls")
def test_a_nested_user_namespace_gives_no_write_access(sandbox):
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x10000000 | 0x20000) == 0
        library = os.path.dirname(os.__file__).encode()
        for path in (b'/', library, os.path.dirname(library), b'/usr/lib'):
            libc.mount(None, path, None, 32 | 4096, None)
        open(os.__file__, 'a')
        """
    assert not run(sandbox, program).passed


@needs_isolation
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_harness_takes_the_program_along(tmp_path):
    code = (
        "from repro.tasks.sandbox.client import Sandbox\n"
        "with Sandbox() as opened: opened.run('while True: pass', timeout_s=3000, memory_bytes=1 << 28)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    harness = subprocess.Popen([sys.executable, "-c", code], env=environment)
    word = str(tmp_path / "repro-sandbox-").encode()
    running = 4 if NAMESPACES in SUPPORT.layers else 3  # the one that waits, the server, the judge, the program
    wait_until(lambda: len(processes_with(word)) == running)
    harness.kill()
    harness.wait()
    wait_until(lambda: not processes_with(word))


def wait_until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("still not so after a minute")


# -- time, memory, output ----------------------------------------------------------------------------------


@needs_isolation
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "while True: print('x' * 10**6)",
        "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
        "import threading\nfor _ in range(2): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\nwhile 1: 0",
        "import os, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
        "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
    ],
)
def test_time_ends(usual, program):
    result = run(usual, program, timeout_s=0.3)
    assert result == SandboxResult(passed=False, reason="timed out after 0.3 s")


@needs_isolation
@pytest.mark.parametrize(
    "program", ["bytearray(10**10)", "x = []\nwhile True: x.append(bytes(1 << 20))", "x = 'a'\nwhile True: x += x"]
)
def test_memory_ends(sandbox, program):
    assert run(sandbox, program).reason == "out of memory: more than 256 MiB"


@needs_isolation
def test_memory_files_count_too(usual):
    program = "import os\nfds = [os.memfd_create('a') for _ in range(40)]\nfor fd in fds: os.write(fd, bytes(15 << 20))"
    assert not run(usual, program).passed or SECCOMP not in usual.support.layers


@needs_isolation
def test_a_crash_is_named(usual):
    assert run(usual, "import ctypes; ctypes.string_at(0)").reason == "killed by SIGSEGV"
    deep = "f = lambda: f()\ndef g(): g()\ng()"
    assert run(usual, deep).reason.startswith("RecursionError")


# -- verdicts ----------------------------------------------------------------------------------------------


@needs_isolation
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("assert False, 'first line\\nsecond'", "AssertionError: first line"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax (<program>, line 1)"),
        ("x = '\x00'", "SyntaxError: source code string cannot contain null bytes"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import sys; sys.exit()", "SystemExit"),
        ("import os; os._exit(0)", "ended before its tests did, with exit code 0"),
        ("input()", "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise PermissionError('no')", "forbidden: PermissionError: no"),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E"),
        ("raise Exception('\\x1b[31m\\udc80' + 'x' * 500)", "Exception:  [31m?" + "x" * 183),
        ("raise type('a' * 5000, (Exception,), {})", "a" * 200),
    ],
)
def test_failures_say_why(usual, program, reason):
    result = usual.run(program, timeout_s=60, memory_bytes=256 * MIB)
    assert not result.passed
    assert result.reason == reason or (reason.startswith("SyntaxError") and "null bytes" in result.reason)


@needs_isolation
def test_writing_to_every_descriptor_is_no_verdict(usual):
    forge = "import os\nfor fd in range(64):\n  try: os.write(fd, b'1ok')\n  except OSError: pass\n"
    assert not run(usual, forge + "os._exit(0)").passed
    assert not run(usual, forge + "raise ValueError").passed
    flood = "import os\nwhile True: os.write(3, b'x' * 4096)"
    assert run(usual, flood).reason == "wrote to a descriptor that is not its own"
    assert not run(usual, "import os; os.closerange(0, 64)").passed


@needs_isolation
def test_correct_programs_pass(sandbox):
    programs = [
        "",
        "import math, re, json, random, hashlib, itertools, functools, collections, typing, decimal, fractions, datetime",
        "import heapq, bisect, string, operator, statistics, copy, dataclasses, enum, abc, contextlib, io, sqlite3, zlib, lzma",
        "assert __import__('hashlib').md5(b'a').hexdigest() == '0cc175b9c0f1b6a831c399e269772661'",
        "import hashlib; assert hashlib.sha3_256(b'').hexdigest()[:6] == 'a7ffc6'",
        "open('a', 'w').write('x'); assert open('a').read() == 'x'",
        "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/a', 'w').write('x')",
        "import tempfile\nwith tempfile.NamedTemporaryFile('w') as f: f.write('x')",
        "import os; os.makedirs('a/b'); os.rename('a', 'c'); os.symlink('c', 'd'); assert os.listdir('d') == ['b']",
        "import time; time.sleep(0.01); assert time.time() > 1.7e9; time.perf_counter(); time.localtime()",
        "open('/dev/null', 'w').write('x'); print('x'); import sys; sys.stderr.write('x')",
        "assert __name__ != '__main__'",
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n  x: int = 1\nassert A() == A()",
        "assert list({'a', 'b', 'c', 'd'}) == list({'a', 'b', 'c', 'd'})",
    ]
    for program in programs:
        result = run(sandbox, program)
        assert result == SandboxResult(passed=True, reason="ok"), (program, result)


@needs_isolation
def test_threads_work_where_seccomp_tells_them_from_processes(usual):
    if SECCOMP not in usual.support.layers:
        pytest.skip("without seccomp the limit on processes counts threads")
    program = "import threading; x = []; t = threading.Thread(target=x.append, args=(1,)); t.start(); t.join(); assert x == [1]"
    assert run(usual, program) == SandboxResult(passed=True, reason="ok")


@needs_isolation
def test_the_order_of_sets_is_the_same_in_every_run():
    program = "raise Exception(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({result.reason for _ in range(3) for result in run_many([program], [NO_CHECK])}) == 1


@needs_isolation
def test_programs_do_not_meet(sandbox):
    run(
        sandbox,
        "import builtins, math, os, sys; builtins.len = math.pi = sys.x = 1; os.environ['X'] = '1'; open('a', 'w')",
    )
    assert run(
        sandbox,
        "import math, os, sys\nassert len('ab') == 2 and math.pi > 3\nassert 'X' not in os.environ"
        "\nassert not hasattr(sys, 'x')\nassert os.listdir() == []",
    ).passed


@needs_isolation
def test_many_keep_their_order():
    programs = [f"assert {number} % 3" for number in range(30)]
    results = run_many(programs, [NO_CHECK] * 30)
    assert [result.passed for result in results] == [number % 3 != 0 for number in range(30)]
    assert run_many([], []) == ()


# -- refusals ----------------------------------------------------------------------------------------------


def test_without_isolation_nothing_is_run_unless_accepted(monkeypatch, tmp_path):
    monkeypatch.delenv(ACCEPT_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"read and change your files.*{ACCEPT_VARIABLE}=1"):
        Sandbox(without=LAYERS).__enter__()
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    with Sandbox(without=LAYERS) as weak:
        assert weak.support.layers == ("limits",)
        assert weak.support.gaps[:3] == ("read and change your files", "use the network", "leave processes behind")
        assert run(weak, "x = 1").passed
        assert run(weak, "while True: pass", timeout_s=0.3).reason == "timed out after 0.3 s"
        assert run(weak, f"open({str(tmp_path / 'a')!r}, 'w').write('x')").passed
    monkeypatch.setenv(ACCEPT_VARIABLE, "yes")
    with pytest.raises(UserError, match="'yes' is unknown"):
        run_many(["x = 1"], [NO_CHECK])


@pytest.mark.parametrize(
    ("without", "gap"),
    [
        ((NAMESPACES, LANDLOCK), "read and change your files"),
        ((NAMESPACES, SECCOMP), "use the network"),
        ((PRIVATE_ROOT, LANDLOCK), "read and change your files"),
    ],
)
def test_half_an_isolation_is_none(without, gap, monkeypatch):
    monkeypatch.delenv(ACCEPT_VARIABLE, raising=False)
    with pytest.raises(UserError, match=gap):
        Sandbox(without=without).__enter__()


def test_a_system_that_cannot_fork_is_refused_whatever_is_accepted(monkeypatch):
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UserError, match="use Linux, WSL 2 or a container"):
        run_many(["x = 1"], [NO_CHECK])


def test_a_broken_server_is_an_error_and_not_a_verdict():
    with Sandbox(accept_gaps=True) as opened:
        timer = threading.Timer(0.2, opened._server.send_signal, (signal.SIGKILL,))
        timer.start()
        with pytest.raises(RuntimeError, match="server ended"):
            run(opened, "import time; time.sleep(30)", timeout_s=60)
        timer.join()


@needs_isolation
def test_lower_limits_of_the_session_stay():
    program = "import resource; raise Exception(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_AS)[1])"
    lowered = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2)"
    code = (
        f"{lowered}\nfrom repro.tasks.sandbox.client import NO_CHECK, run_many\n"
        f"print(run_many([{program!r}], [NO_CHECK])[0].reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"Exception: ((40, 40), {1 << 28})"


@needs_isolation
def test_a_program_that_cannot_be_confined_is_an_error_and_not_a_verdict():
    with Sandbox() as opened, pytest.raises(RuntimeError, match="no program was run: OverflowError"):
        opened.run("x = 1", timeout_s=1, memory_bytes=1 << 70)


# -- the filter itself, also of the architecture this is not ------------------------------------------------


def decide(
    machine: seccomp.Architecture, number: int, arguments: tuple[int, ...] = (), audit: int | None = None
) -> int:
    """Classic BPF, as the kernel runs it."""
    words = {0: number, 4: machine.audit if audit is None else audit}
    for index in range(6):
        value = arguments[index] if index < len(arguments) else 0
        words |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: value >> 32}
    program, at, accumulator = seccomp.build_filter(machine), 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            accumulator = words[value]
        elif code == seccomp.AND:
            accumulator &= value
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_GREATER_EQUAL: accumulator >= value,
                seccomp.JUMP_ANY_BIT: bool(accumulator & value),
            }[code]
            at += if_true if holds else if_false


EPERM, ENOSYS = seccomp.FAIL | 1, seccomp.FAIL | 38


@pytest.mark.parametrize("name", seccomp.ARCHITECTURES)
def test_the_filter_decides_by_call_and_argument(name):
    machine = seccomp.ARCHITECTURES[name]
    # read, socket, connect, execve, kill, ptrace, mount, unshare, fchmodat
    numbers = {"x86_64": (0, 41, 42, 59, 62, 101, 165, 272, 268), "aarch64": (63, 198, 203, 221, 129, 117, 40, 97, 53)}
    read, *forbidden = numbers[name]
    assert decide(machine, read) == seccomp.ALLOW
    for number in [*forbidden, machine.seccomp, 425, 438, 434]:  # io_uring_setup, pidfd_getfd, pidfd_open
        assert decide(machine, number) == EPERM
    assert decide(machine, read, audit=0x40000003) == seccomp.KILL_PROCESS  # 32-bit x86
    assert decide(machine, 0x40000000 | read) == EPERM  # x32
    assert decide(machine, 10_000) == decide(machine, machine.clone3) == ENOSYS

    assert decide(machine, machine.clone, (0x3D0F00,)) == seccomp.ALLOW  # a thread, as glibc makes it
    assert decide(machine, machine.clone, (0x1200011,)) == EPERM  # fork, as glibc makes it
    assert decide(machine, machine.fcntl, (3, 1030)) == seccomp.ALLOW
    assert decide(machine, machine.fcntl, (3, 8)) == EPERM  # F_SETOWN
    assert decide(machine, machine.ioctl, (1, 0x5401)) == seccomp.ALLOW
    assert decide(machine, machine.ioctl, (1, 0x5412)) == EPERM  # TIOCSTI
    assert decide(machine, machine.prlimit64, (0, 9, 0, 1)) == seccomp.ALLOW
    assert decide(machine, machine.prlimit64, (0, 9, 1 << 32, 0)) == EPERM
    for call, argument in ((machine.openat, 2), (machine.open, 1)):
        if call is not None:
            flags = [(0,) * argument + (value,) for value in (os.O_RDONLY, os.O_WRONLY | 0o1000, 0o1000)]
            assert [decide(machine, call, value) for value in flags] == [seccomp.ALLOW, seccomp.ALLOW, EPERM]


def test_the_architectures_differ_only_in_numbers():
    x86, arm = (set(machine.allowed()) for machine in seccomp.ARCHITECTURES.values())
    legacy = {row["name"] for row in seccomp._ALLOWED if not row["aarch64"]}
    assert len(x86) == len(seccomp._ALLOWED)
    assert len(arm) == len(x86) - len(legacy)
    for machine in seccomp.ARCHITECTURES.values():
        for instruction in seccomp.build_filter(machine):
            assert max(instruction.if_true, instruction.if_false) < 256
