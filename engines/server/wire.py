"""What goes between the server and its engine's process: pickles behind their length, over a socket that both inherit, as the
engine's end, a ``multiprocessing.connection.Connection``, frames them."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from engines.server.protocol import EngineStatus, Event, Submission

_LENGTH = struct.Struct("!i")


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
