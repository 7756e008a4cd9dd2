"""The two processes of a graded program, each in a jail of its own: one runs the program, the other judges it.

Only the judge has the tests. It calls the program's function as the tests ask, through two pipes, and compares the answers.
These are plain values of builtin types, so that no class of the program with its own ``==`` gets into the judge.
A bare interpreter runs this file by its path, so it imports only the standard library.
"""

import builtins
import io
import json
import os
import pickle
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

READY = b"+"
"""The judge's first byte of output. It means that the program's process is confined and about to run the program."""
PASSED, WRONG, GONE = "passed", "wrong", "gone"
OUT_OF_MEMORY = "out of memory"
STRANGE = "wrote to a descriptor that is not its own"
MAX_REASON_CHARS = 200
MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20

_CONFINED, _RAN, _FAILED, _VALUE, _RAISED = b"c", b"r", b"f", b"v", b"e"
_LENGTH_BYTES = 4
_CALLS, _ANSWERS = 3, 4
"""Descriptors of the program's process, for calls from the judge and answers to it."""


# -- messages between the two: a kind and bytes --------------------------------------------------------


class OverError(BaseException):
    pass


class StrangeError(BaseException):
    """Raised for bytes that are no message."""


def send(descriptor: int, kind: bytes, content: bytes = b"") -> None:
    remaining = memoryview(kind + len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def receive(descriptor: int) -> tuple[bytes, bytes]:
    kind = _read_exactly(descriptor, 1)
    if kind not in (_CONFINED, _RAN, _FAILED, _VALUE, _RAISED):
        raise StrangeError
    count = int.from_bytes(_read_exactly(descriptor, _LENGTH_BYTES), "big")
    if count > MAX_FRAME_BYTES:
        raise StrangeError
    return kind, _read_exactly(descriptor, count)


def _read_exactly(descriptor: int, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        if not (piece := os.read(descriptor, min(count - len(content), 1 << 20))):
            raise OverError
        content += piece
    return bytes(content)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that looks up no names, so that it returns only values of builtin types."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def unpack(content: bytes) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except MemoryError:
        raise
    except Exception:
        raise StrangeError from None


def plain(value: Any) -> Any:
    """The value with builtin types instead of classes derived from them. Raises TypeError for other types."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in dict.items(value)}
    kind: Any
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(plain(item) for item in kind.__iter__(value))
    convert: Any
    for kind, convert in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, kind):
            return convert(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared with an answer")


# -- the program's process -----------------------------------------------------------------------------------


def play(memory_bytes: int) -> None:
    """Run the program that the judge sends, then call its function as long as the judge asks."""
    # Move the pipes to where the program's prints do not reach them. Nothing else stays open.
    os.dup2(0, _CALLS)
    os.dup2(1, _ANSWERS)
    _silence()
    os.closerange(_ANSWERS + 1, 1024)
    for name in ("LD_LIBRARY_PATH", "PWD"):  # only for starting this interpreter
        os.environ.pop(name, None)
    limit_resources(memory_bytes)
    send(_ANSWERS, _CONFINED)
    names: dict[str, Any] = {}  # no __name__ of "__main__", as in published graders
    _, content = receive(_CALLS)
    request = json.loads(content)
    reason = run(request["program"], names)
    if reason is None:
        send(_ANSWERS, _RAN)
        _answer(names, request["entry"])
    else:
        send(_ANSWERS, _FAILED, _encoded(reason))


def _silence() -> None:
    """Discard all further prints."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def limit_resources(memory_bytes: int) -> None:
    """Set limits for good. If the session has a lower limit, that one stays."""
    limits = (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    )
    for name, value in limits:
        if name == resource.RLIMIT_AS and sys.platform != "linux":
            continue  # macOS refuses it
        allowed = resource.getrlimit(name)[1]
        lowest = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(name, (lowest, lowest))


def run(source: str, names: dict[str, Any]) -> str | None:
    """Run the source. Return why it did not come to its end, or None if it did."""
    try:
        exec(compile(source, "<program>", "exec"), names)
    except (OverError, StrangeError):
        raise
    except BaseException as error:  # a program may raise anything
        return describe(error)
    return None


def describe(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    prefix = "forbidden: " if isinstance(error, PermissionError) else ""
    text = _text_of(error).strip()
    return f"{prefix}{name}: {text.splitlines()[0]}" if text else prefix + name


def _text_of(error: BaseException) -> str:
    try:
        return str(str(error))
    except BaseException:
        return ""


def _encoded(reason: str) -> bytes:
    return reason[:MAX_REASON_CHARS].encode(errors="replace")


def _answer(names: dict[str, Any], entry: str) -> None:
    with suppress(OverError):
        while True:
            _, call = receive(_CALLS)
            try:
                args, kwargs = pickle.loads(call)
                if entry not in names:
                    raise NameError(f"name {entry!r} is not defined")
                packed = pickle.dumps(plain(names[entry](*args, **kwargs)))
            except BaseException as error:
                message = (type(error).__name__, _text_of(error)[:MAX_REASON_CHARS])
                send(_ANSWERS, _RAISED, pickle.dumps(message))
            else:
                send(_ANSWERS, _VALUE, packed)


# -- the judge's process -------------------------------------------------------------------------------------


def preside(memory_bytes: int, calls: int, answers: int) -> None:
    """Read a request from standard input, judge it, and write the verdict and its reason as a line of JSON."""
    request = json.loads(sys.stdin.buffer.read())
    limit_resources(memory_bytes)
    receive(answers)  # the program's process is confined
    output = os.dup(1)
    _silence()  # tests may print the program's answers
    os.write(output, READY)
    verdict, reason = judge(request, calls, answers)
    os.write(output, json.dumps([verdict, reason[:MAX_REASON_CHARS]]).encode())


def judge(request: Mapping[str, str], calls: int, answers: int) -> tuple[str, str]:
    """The verdict on the program behind these descriptors, and why.

    ``tests`` raise unless the function ``entry`` of ``program`` is right, and may use the names that ``given`` defines.
    Without tests the verdict is the program's own word that it came to its end.
    """
    try:
        program = {name: request[name] for name in ("program", "entry")}
        send(calls, _VALUE, json.dumps(program).encode())
        kind, content = receive(answers)
        if kind == _FAILED:
            return WRONG, content.decode(errors="replace")
        if kind != _RAN:
            return WRONG, STRANGE
        candidate = _Candidate(calls, answers)
        names: dict[str, Any] = {}
        with suppress(SyntaxError):  # the program may continue in the middle of a function
            exec(compile(request["given"], "<given>", "exec"), names)
        reason = run(request["tests"], names | {request["entry"]: candidate})
        if candidate.broken is not None:  # even if the tests caught the error
            raise candidate.broken
    except (OverError, OSError):
        return GONE, ""
    except StrangeError:
        return WRONG, STRANGE
    return (PASSED, "ok") if reason is None else (WRONG, reason)


class _Candidate:
    """The program's function, as the tests call it."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls, self._answers = calls, answers
        self.broken: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            send(self._calls, _VALUE, pickle.dumps((args, kwargs)))
            kind, content = receive(self._answers)
            value = unpack(content)
            if kind == _VALUE:
                return value
            if kind != _RAISED or not (isinstance(value, tuple) and list(map(type, value)) == [str, str]):
                raise StrangeError
        except (OverError, StrangeError, OSError) as error:
            self.broken = OverError() if isinstance(error, OSError) else error
            raise self.broken from None
        raise _error(*value)


def _error(name: str, text: str) -> Exception:
    """The exception that the tests would have met. The program must not raise one that ends a loop of the tests (StopIteration)."""
    kind = getattr(builtins, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    ):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    (preside if role == "judge" else play)(*map(int, numbers))
