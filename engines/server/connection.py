"""One client's connection: uvicorn's, with the bounds on time and number that it lacks, and refusals in a sentence.

``Addressed`` says whose requests are read, and ``Intake`` of which form, how many bytes of them at once, and for how long.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any, Literal, cast

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.server.errors import ApiError, refused, unavailable
from engines.server.settings import ServerSettings

_MOST_HEAD, _MOST_HEADERS = 1 << 14, 128
"""Bytes, where it does not come at once, and lines."""
MOST_PIECES = 1 << 13
"""Pieces of a body: each is worked on apart, however little it holds."""
_STALL_S = 75.0
"""For a client that reads nothing of its answer."""
_LINGER_S = 2.0
"""For a client to send what it is sending, and to read why it was refused."""


class Connection(H11Protocol):
    """Closed where a head, or the rest of a body that was answered already, does not come in ``head_timeout_s``, or where
    the client takes nothing of its answer for ``_STALL_S``.

    Of more than ``most`` connections the one that is idle the longest is closed, where none is the new one is refused.
    ``on_refusal`` hears the status of a refusal that the routes do not know of.
    """

    def __init__(
        self,
        *given: Any,
        settings: ServerSettings,
        most: int,
        idle: dict[Connection, None],
        on_refusal: Callable[[int], None],
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self.conn = _Messages(h11.SERVER, _MOST_HEAD)
        self._settings, self._most, self._idle, self._on_refusal = settings, most, idle, on_refusal
        self._awaited: Literal["head", "rest"] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_over = False
        """Whether what comes is no longer looked at."""

    # -- what asyncio and uvicorn call -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _Lingering(transport, self._is_being_sent))
        if len(self.connections) > self._most:
            spare = next(iter(self._idle), None)
            if spare is None:
                self._refuse(unavailable(f"{self._most} connections are open, the most that are held"))
                return
            del self._idle[spare]
            spare.transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MOST_HEAD:
            # Of a client that has sent its next request already one would not hear that it leaves.
            self.flow.resume_reading()
        self._watch()

    def eof_received(self) -> None:
        """A client that ends its side, or half of it, has left: what is being answered ends at once, even where some of it
        waits to be read. What was answered before is still sent; then the connection is closed."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self.transport.get_write_buffer_size():
            self._bound_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self._cancel_stall()
        if self._deadline is not None:
            self._deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 raised."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        sentence = {
            413: f"the body comes in more than {MOST_PIECES} pieces: send larger ones",
            431: "the head of the request is too long: send fewer or shorter headers",
        }.get(status, f"what came is no request in HTTP/1.1 ({error or msg}): send one")
        self._refuse(ApiError(status, sentence))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any other."""

    # -- bounds ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Bound the time for what the client has to send next."""
        if self._is_over:
            return
        awaited: Literal["head", "rest"] | None = None
        if self.conn.our_state is h11.IDLE:
            self._idle[self] = None
        else:
            self._idle.pop(self, None)
        if self.conn.their_state is h11.IDLE:
            # Of the next request something may have come with the one before.
            if self.timeout_keep_alive_task is None or self.conn.trailing_data[0]:
                awaited = "head"
        elif self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            awaited = "rest"
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = awaited and self.loop.call_later(self._settings.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self._awaited == "head" and self.conn.trailing_data[0]:
            after = f"after {self._settings.head_timeout_s:g} s"
            self._refuse(ApiError(408, f"the head of the request was not complete {after}: send it at once"))
        else:
            self.transport.close()

    def _bound_writing(self) -> None:
        if self._stall is None:
            self._stall = self.loop.call_later(_STALL_S, self._end_stalled)

    def _end_stalled(self) -> None:
        self._stall = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, error: ApiError) -> None:
        """The last answer of this connection."""
        if self._is_over or self.transport.is_closing():
            return
        self._is_over = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else another answer has begun
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            content = json.dumps(error.body).encode()
            own = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
            parts: tuple[Any, ...] = (
                h11.Response(status_code=error.status, headers=list({**own, **error.headers}.items())),
                h11.Data(data=content),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
            self._on_refusal(error.status)
        self.transport.close()

    def _is_being_sent(self) -> bool:
        """Whether the client may be in the middle of a request; what is left of it is then not looked at."""
        self._is_over = self._is_over or self.conn.their_state is h11.SEND_BODY
        return self._is_over


class _Messages(h11.Connection):
    _num_pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Data:
            self._num_pieces += 1
            if self._num_pieces > MOST_PIECES:
                raise h11.RemoteProtocolError(f"a body in more than {MOST_PIECES} pieces", error_status_hint=413)
        elif type(event) is h11.Request:
            self._num_pieces = 0
            if len(event.headers) > _MOST_HEADERS:
                raise h11.RemoteProtocolError(f"more than {_MOST_HEADERS} headers", error_status_hint=431)
        return event


class _Lingering:
    """``transport``, whose end waits a little where ``is_unread``: closed with something unread, it would take the answer
    before from a client that has not read that yet. Closed twice it waits no longer."""

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]) -> None:
        self._transport, self._is_unread = transport, is_unread
        self._is_ending = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._is_ending or self._transport.is_closing() or not self._is_unread():
            self._transport.close()
            return
        self._is_ending = True
        if not self._transport.get_write_buffer_size():
            try:
                self._transport.write_eof()
            except OSError:  # the client is gone
                self._transport.close()
                return
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)


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
