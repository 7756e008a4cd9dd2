"""Kept-alive connections that know whether a request was cut off before a byte of its answer came. This module needs aiohttp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiohttp import TCPConnector
from aiohttp.client_proto import ResponseHandler


class _Counting(ResponseHandler):
    """Counts in ``num_bytes`` the bytes received so far."""

    num_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        super().data_received(data)


_used: ContextVar[list[tuple[_Counting, int]]] = ContextVar("used")
"""The connections that this task's requests used, each with the number of bytes received on it before."""


class CountingConnector(TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory: Any = partial(_Counting, loop=self._loop)

    async def connect(self, *args: Any, **options: Any) -> Any:
        connection = await super().connect(*args, **options)
        protocol = connection.protocol
        if isinstance(protocol, _Counting):
            _used.get([]).append((protocol, protocol.num_bytes))
        return connection

    @contextmanager
    def watching(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that says whether a request sent in the body got no byte, on a connection that had been used before."""
        used: list[tuple[_Counting, int]] = []
        token = _used.set(used)
        try:
            yield lambda: any(0 < num_before == protocol.num_bytes for protocol, num_before in used[-1:])
        finally:
            _used.reset(token)
