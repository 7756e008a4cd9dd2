"""A client of plain sockets for tests of a server: it can say anything, and leave at any time."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any, NamedTuple

TIMEOUT_S = 120.0
"""Far beyond what any answer takes: a hang fails, a slow machine does not."""


class Said(NamedTuple):
    status: int
    body: Any
    """Parsed where it is JSON, else text."""
    headers: Mapping[str, str]


def ask(
    port: int, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
) -> Said:
    """One request on a connection of its own. ``body`` is sent as JSON unless it is bytes."""
    with _sent(port, path, body, method, headers) as response:
        content = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return Said(response.status, json.loads(content) if is_json else content.decode(), dict(response.headers))


def metrics(port: int) -> dict[str, float]:
    """By name and labels, as they are written."""
    lines = [line.rpartition(" ") for line in ask(port, "/metrics").body.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


@contextmanager
def streaming(port: int, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Iterator[Iterator[Any]]:
    """The events of a stream, parsed; leaving before its end closes the connection."""
    with _sent(port, path, body, None, headers) as response:
        assert response.status == 200, response.read()
        yield _events(response)


def _events(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: "):
            content = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if content == b"[DONE]" else json.loads(content)


@contextmanager
def _sent(
    port: int, path: str, body: Any, method: str | None, headers: Mapping[str, str] | None
) -> Iterator[HTTPResponse]:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    own = {"Content-Type": "application/json", **(headers or {})}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, content, own)
        yield connection.getresponse()
    finally:
        connection.close()


def leave(port: int, path: str, body: Any) -> socket.socket:
    """Send a request and read nothing of its answer; closing the socket is leaving."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    end = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    end.sendall(head.encode() + content)
    return end
