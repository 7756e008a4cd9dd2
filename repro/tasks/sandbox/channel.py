"""What a graded program and its judge say to each other: a kind and bytes. Values are plain ones of builtin types, so that
nothing of the program, no class with an ``==`` of its own, gets into the judge."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

CONFINED, NOT_CONFINED, RAN, FAILED, VALUE, RAISED = b"c", b"!", b"r", b"f", b"v", b"e"
MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class OverError(BaseException):
    """The other side has ended, or closed its end."""


class StrangeError(BaseException):
    """What came is none of it."""


def send(descriptor: int, kind: bytes, content: bytes = b"") -> None:
    left = memoryview(kind + len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> tuple[bytes, bytes]:
    kind = read_exactly(descriptor, 1)
    if kind not in (CONFINED, NOT_CONFINED, RAN, FAILED, VALUE, RAISED):
        raise StrangeError
    count = int.from_bytes(read_exactly(descriptor, _LENGTH_BYTES), "big")
    if count > MAX_FRAME_BYTES:
        raise StrangeError
    return kind, read_exactly(descriptor, count)


def read_exactly(descriptor: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        if not (piece := os.read(descriptor, min(count - len(found), 1 << 20))):
            raise OverError
        found += piece
    return bytes(found)


def pack(value: object) -> bytes:
    return pickle.dumps(_plain(value))


def unpack(content: bytes) -> Any:
    """What a program has sent: whatever is in it, no name is looked up."""
    try:
        return _Plain(io.BytesIO(content)).load()
    except MemoryError:
        raise
    except Exception:
        raise StrangeError from None


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _plain(value: Any) -> Any:
    """With builtin types in the place of classes that are derived from them."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in dict.items(value)}
    kind: Any
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_plain(each) for each in kind.__iter__(value))
    plain: Any
    for kind, plain in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared with an answer")
