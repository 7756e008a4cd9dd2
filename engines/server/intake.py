"""What comes in: whose requests are read, of which form, how many bytes of them at once, and for how long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.server.errors import ApiError, refused, unavailable
from engines.server.settings import ServerSettings

LARGE_BODY = 1 << 16
"""Bytes from which a body is worked on behind the others; smaller ones are taken whatever is held."""


class Intake:
    """Reads bodies. Those read count as held until ``release``."""

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
        """Take no body any more, and give up those that have not come whole."""
        self.is_closed = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    async def read(self, request: Request) -> bytes:
        """The caller releases its length."""
        self._check_open()
        self._check_form(request.headers)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s) as limit:
                self._limits.add(limit)
                try:
                    async for part in request.stream():
                        size += len(part)
                        self._held += len(part)
                        self._check_size(size)
                        parts.append(part)
                finally:
                    self._limits.discard(limit)
            self._check_open()
        except BaseException as error:
            self.release(size)
            if isinstance(error, TimeoutError):
                self._check_open()
                after = f"after {self._settings.body_timeout_s:g} s"
                raise refused(f"the body was not complete {after}: send it at once", status=408) from None
            raise
        return b"".join(parts)

    def release(self, size: int) -> None:
        self._held -= size

    def _check_open(self) -> None:
        if self.is_closed:
            raise unavailable("the server is ending")

    def _check_form(self, headers: Headers) -> None:
        """A page of another origin can send any type but JSON without asking."""
        types = headers.getlist("content-type")
        if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
            given = ", ".join(types) or "missing"
            raise refused(f"Content-Type is {given}: send the body as 'Content-Type: application/json'", status=415)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise refused(f"Content-Encoding={encoding!r} is not read here: send the body as it is", status=415)
        length = headers.get("content-length")
        if length is not None:
            self._check_body(int(length))

    def _check_size(self, size: int) -> None:
        self._check_body(size)
        most = self._settings.max_bytes_in_flight
        if size > LARGE_BODY and self._held > most:
            raise unavailable(f"the requests under way have {most} bytes, the most that are held")

    def _check_body(self, size: int) -> None:
        most = self._settings.max_body_bytes
        if size > most:
            raise refused(f"the body has more than {most} bytes, the most that is taken: send less", status=413)


def own_names(host: str) -> frozenset[str] | None:
    """What requests may call a server that listens on this machine alone; None where it can be called anything."""
    try:
        is_loopback = _is_loopback_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        is_loopback = False
    return frozenset({"localhost", host.lower()}) if is_loopback else None


class Addressed:
    """Refuses requests that were not meant for this server, and passes the others on. A page of a name that was made to point at this
    machine (DNS rebinding) gives itself away by the Host that a browser sends."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None, say: Callable[..., Awaitable[Response]]) -> None:
        self._app, self._names, self._say = app, names, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        try:
            self._check(scope["headers"])
        except ApiError as error:
            answer = await self._say(Request(scope), error)
        await answer(scope, receive, send)

    def _check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        names = {name for name, _ in headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            raise ApiError(400, "Transfer-Encoding and Content-Length are two lengths of one body: send one of them")
        if self._names is None:
            return
        for host in (value.decode("latin-1") for name, value in headers if name == b"host"):
            name = _name(host)
            if name not in self._names and not _is_loopback_address(name):
                raise ApiError(
                    421,
                    f"Host={host!r} is not this server, which listens on this machine alone: use localhost, or start it "
                    f"with another --host",
                )


def _name(host: str) -> str:
    """Without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_loopback_address(name: str | int) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
