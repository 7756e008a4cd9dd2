"""A client's connection: uvicorn's, with refusals in one sentence.

``Addressed`` decides whose requests we read. ``Intake`` decides in which form, how many bytes at once, and for how long.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.server.errors import ApiError, refusal, unavailable
from engines.server.settings import ServerSettings

_MOST_AHEAD = 1 << 14
"""Most bytes of the next requests that we read while we answer one."""
_LINGER_S = 2.0
"""Seconds for a client to finish sending its body, before it reads why we refused it."""


class Connection(H11Protocol):
    """uvicorn's connection, with refusals in OpenAI's format. ``on_refusal`` is called with their status."""

    def __init__(self, *args: Any, on_refusal: Callable[[int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_refusal = on_refusal

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MOST_AHEAD:
            # Otherwise we would not notice that a client leaves if it has already sent its next request.
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; called while h11's exception is handled."""
        reason = sys.exc_info()[1]
        status = reason.error_status_hint if isinstance(reason, h11.RemoteProtocolError) else 400
        sentence = f"what came is no request in HTTP/1.1 ({reason or msg}): send one"
        if status == 431:
            sentence = "the head of the request is too long: send fewer or shorter headers"
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise another answer has begun
            content = json.dumps(ApiError(status, sentence).body).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
            parts: tuple[Any, ...] = (
                h11.Response(status_code=status, headers=list(headers.items())),
                h11.Data(data=content),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
            self._on_refusal(status)
        self.transport.close()


LARGE_BODY = 1 << 16
"""From so many bytes on, a body is parsed behind the others. Smaller ones are taken however many bytes are held."""


class Intake:
    """Reads bodies. Their bytes count as held until ``release``."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held = 0
        self._limits: set[asyncio.Timeout] = set()
        """One for each body that is being read."""
        self.is_closed = False

    @property
    def num_reading(self) -> int:
        return len(self._limits)

    def close(self) -> None:
        """Take no more bodies, and give up those that have not arrived whole."""
        self.is_closed = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    async def read(self, request: Request) -> bytes:
        """Return a request's body; the caller releases its length. Raises ApiError if the body is refused."""
        self._check_open()
        stream = request.stream()
        parts: list[bytes] = []
        size = 0
        try:
            self._check_form(request.headers)
            async with asyncio.timeout(self._settings.body_timeout_s) as limit:
                self._limits.add(limit)
                try:
                    async for part in stream:
                        size += len(part)
                        self._held += len(part)
                        self._check_body(size)
                        max_bytes = self._settings.max_bytes_in_flight
                        if size > LARGE_BODY and self._held > max_bytes:
                            raise unavailable(f"the requests under way have {max_bytes} bytes, the most that are held")
                        parts.append(part)
                finally:
                    self._limits.discard(limit)
            self._check_open()
        except BaseException as error:
            self.release(size)
            if isinstance(error, TimeoutError):
                self._check_open()
                after = f"after {self._settings.body_timeout_s:g} s"
                raise refusal(f"the body was not complete {after}: send it at once", status=408) from None
            if isinstance(error, ApiError) and error.status < 500 and "expect" not in request.headers:
                await _drain(stream)
            raise
        return b"".join(parts)

    def release(self, size: int) -> None:
        self._held -= size

    def _check_open(self) -> None:
        if self.is_closed:
            raise unavailable("the server is ending")

    def _check_form(self, headers: Headers) -> None:
        """Raise ApiError unless the body is plain JSON: pages of other origins can send any other type without asking."""
        types = headers.getlist("content-type")
        if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
            given = ", ".join(types) or "missing"
            raise refusal(f"Content-Type is {given}: send the body as 'Content-Type: application/json'", status=415)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise refusal(f"Content-Encoding={encoding!r} is not read here: send the body as it is", status=415)
        length = headers.get("content-length")
        if length is not None:
            self._check_body(int(length))

    def _check_body(self, size: int) -> None:
        limit = self._settings.max_body_bytes
        if size > limit:
            raise refusal(f"the body has more than {limit} bytes, the most that is taken: send less", status=413)


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Read what is left of a body. If we closed the connection instead, a client that still sends would not get the refusal."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_LINGER_S):
            async for _ in stream:
                pass


def host_names(host: str) -> frozenset[str] | None:
    """Return the names by which requests may call a server that listens only on this machine; None if any name will do."""
    try:
        is_loopback = _is_loopback_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        is_loopback = False
    return frozenset({"localhost", host.lower()}) if is_loopback else None


class Addressed:
    """Refuses requests that were not meant for this server, and passes the others on. If a page's name was made to point at this machine
    (DNS rebinding), the Host that the browser sends reveals it."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None, refuse: Callable[..., Awaitable[Response]]) -> None:
        self._app, self._names, self._refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        try:
            self._check(scope["headers"])
        except ApiError as error:
            answer = await self._refuse(Request(scope), error)
        await answer(scope, receive, send)

    def _check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        names = {name for name, _ in headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            raise ApiError(400, "Transfer-Encoding and Content-Length are two lengths of one body: send one of them")
        if self._names is None:
            return
        for host in (value.decode("latin-1") for name, value in headers if name == b"host"):
            name = _host_name(host)
            if name not in self._names and not _is_loopback_address(name):
                raise ApiError(
                    421,
                    f"Host={host!r} is not this server, which listens on this machine alone: use localhost, or start it "
                    f"with another --host",
                )


def _host_name(host: str) -> str:
    """Return a host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_loopback_address(name: str | int) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
