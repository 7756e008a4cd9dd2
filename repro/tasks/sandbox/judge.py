"""Where a verdict is made: a process beside the program's own. It alone has the tests, calls the program's function as they ask,
and compares; of the program it gets plain values and no more. A program cannot reach it, and never sees what it compares with.
"""

from __future__ import annotations

import builtins
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from repro.tasks.sandbox import channel

PASSED, WRONG, GONE, NOT_CONFINED = b"1", b"0", b"g", b"!"
READY = b"+"
MAX_REASON_CHARS = 200
OUT_OF_MEMORY = "out of memory"
STRANGE = "wrote to a descriptor that is not its own"


def judge(check: Mapping[str, str], calls: int, answers: int) -> tuple[bytes, str]:
    """A verdict on the program at the other end of these descriptors, and why.

    ``check``: ``tests`` raise unless the function ``entry`` of the program is right, and may use what ``given`` defines.
    Without tests the verdict is the program's own word that it came to its end.
    """
    try:
        kind, said = channel.receive(answers)
        if kind == channel.NOT_CONFINED:
            return NOT_CONFINED, said.decode(errors="replace")
        kind, said = channel.receive(answers)
        if kind == channel.FAILED:
            return WRONG, said.decode(errors="replace")
        if kind != channel.RAN:
            return WRONG, STRANGE
        candidate = _Candidate(calls, answers)
        reason = run(check["tests"], _names(check, candidate))
        if candidate.broken is not None:  # whatever the tests made of it
            raise candidate.broken
    except (channel.OverError, OSError):
        return GONE, ""
    except channel.StrangeError:
        return WRONG, STRANGE
    return (PASSED, "ok") if reason is None else (WRONG, reason)


def run(source: str, names: dict[str, Any]) -> str | None:
    """Why it did not come to its end; None if it did."""
    try:
        exec(compile(source, "<program>", "exec"), names)
    except (channel.OverError, channel.StrangeError):
        raise
    except BaseException as error:  # a program may raise anything, and none of it is an error of ours
        return describe(error)
    return None


def describe(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    prefix = "forbidden: " if isinstance(error, PermissionError) else ""
    try:
        text = str(error).strip()
    except BaseException:
        return prefix + name
    return f"{prefix}{name}: {text.splitlines()[0]}" if text else prefix + name


def answer(names: dict[str, Any], entry: str, calls: int, answers: int) -> None:
    """In the program's process, until the judge has no more to ask."""
    with suppress(channel.OverError):
        while True:
            _, asked = channel.receive(calls)
            try:
                args, kwargs = pickle.loads(asked)
                if entry not in names:
                    raise NameError(f"name {entry!r} is not defined")
                packed = channel.pack(names[entry](*args, **kwargs))
            except BaseException as error:
                channel.send(answers, channel.RAISED, pickle.dumps((type(error).__name__, _said(error))))
            else:
                channel.send(answers, channel.VALUE, packed)


def _said(error: BaseException) -> str:
    try:
        return str(str(error))[:MAX_REASON_CHARS]
    except BaseException:
        return ""


def _names(check: Mapping[str, str], candidate: _Candidate) -> dict[str, Any]:
    names: dict[str, Any] = {}
    with suppress(SyntaxError):  # where the program goes on in the middle of a function
        exec(compile(check["given"], "<given>", "exec"), names)
    return names | {check["entry"]: candidate}


class _Candidate:
    """The program's function."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls, self._answers = calls, answers
        self.broken: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            channel.send(self._calls, channel.VALUE, pickle.dumps((args, kwargs)))
            kind, content = channel.receive(self._answers)
            found = channel.unpack(content)
            if kind == channel.VALUE:
                return found
            if kind != channel.RAISED or not (isinstance(found, tuple) and list(map(type, found)) == [str, str]):
                raise channel.StrangeError
        except (channel.OverError, channel.StrangeError, OSError) as error:
            self.broken = error if not isinstance(error, OSError) else channel.OverError()
            raise self.broken from None
        name, text = found
        raise _error(name, text)


def _error(name: str, text: str) -> Exception:
    """As the tests would have met it. What ends a loop of theirs must not come from the program."""
    kind = getattr(builtins, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    ):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


def report(descriptor: int, verdict: bytes, reason: str) -> None:
    os.write(descriptor, verdict + reason[:MAX_REASON_CHARS].encode(errors="replace"))
