"""Signals that would end a process in the middle of what has to be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come in the body take effect after it. A child that is being started reads from its parent what it
    is: where that ends before it is told, the child says so in a traceback, and nobody knows that it has to be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    # One that is ignored, here and in children, or not Python's to handle stays as it is.
    before = {number: found for number in _ENDING if (found := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
