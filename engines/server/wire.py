"""What goes between the server and its engine's process: pickles behind their length, over a socket that both inherit."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from engines.server.protocol import EngineStatus, Event, Submission

_LENGTH = struct.Struct(">I")


class Cancel(NamedTuple):
    request_id: int


class Stop(NamedTuple):
    """Nothing that runs is waited for."""


Command = Submission | Cancel | Stop


class Able(NamedTuple):
    """The machine has what the model needs, which is loaded now."""


class Ready(NamedTuple):
    status: EngineStatus


class Report(NamedTuple):
    events: Sequence[Event]
    status: EngineStatus


class Unable(NamedTuple):
    """The model cannot be served; the process ends."""

    sentence: str
    is_users: bool
    """Whether it is the user's to mend."""


def frame(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """None at the end of the stream, in the middle of a frame too."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Channel:
    """The engine's end; one thread sends, another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._stream: IO[bytes] = end.makefile("rb")

    def send(self, message: Any) -> None:
        self._end.sendall(frame(message))

    def receive(self) -> Any:
        """None where the other end is gone."""
        try:
            header = self._stream.read(_LENGTH.size)
            if len(header) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(header)
            content = self._stream.read(length)
        except OSError:
            return None
        return pickle.loads(content) if len(content) == length else None
