"""Pages of a server, read whole in bounded time and room, from the address that is named alone: redirects are not followed."""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from threading import Thread
from types import MappingProxyType
from urllib.parse import urlsplit

ASK_S = 5.0
"""For a whole page, whatever trickles in before."""
MOST_BYTES = 1 << 24
_LONGEST_SHOWN = 100
_MOST_DIGITS = 18
"""A length of more is not read, and so the end of the body is not known."""


class NoPage(OSError):
    """Why there is no such page, in a few words; ``status`` is None where the server said none."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The body of an answer with status 200; raises NoPage. Neither proxies nor redirects get to see the headers."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ASK_S)
    found: list[bytes | Exception] = []
    opened: list[socket.socket] = []

    def read() -> None:
        try:
            connection.connect()
            opened.append(connection.sock)
            connection.request("GET", parts.path or "/", headers={**headers, "Connection": "close"})
            with connection.getresponse() as response:
                found.append(_body(response))
        except Exception as error:
            found.append(error)
        finally:
            connection.close()

    # The timeout of a connection is one of each of its pieces.
    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(ASK_S)
    answer = found[0] if found else TimeoutError()
    if isinstance(answer, TimeoutError):  # of all of it or of a piece, whichever was seen first
        for each in opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        raise NoPage(f"no whole answer within {ASK_S:g} s") from None
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, NoPage):
        raise answer
    if isinstance(answer, IncompleteRead):
        raise NoPage("its body broke off") from None
    if isinstance(answer, OSError) and str(answer):
        raise NoPage(str(answer)) from None
    kind_of = "what it says is no HTTP: " if isinstance(answer, HTTPException | ValueError) else ""
    raise NoPage(f"{kind_of}{type(answer).__name__}") from None


def _body(response: HTTPResponse) -> bytes:
    status, headers = response.status, response.headers
    if 300 <= status < 400:
        raise NoPage(redirect(status, headers.get("Location")), status)
    if status != 200:
        raise NoPage(f"status {status}", status)
    if wrong := unread(lambda name: headers.get_all(name, [])):
        raise NoPage(wrong)
    content = response.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise NoPage(f"its body is longer than {MOST_BYTES} bytes")
    if response.length:
        raise NoPage(f"its body broke off, {response.length} bytes before its Content-Length")
    return content


def redirect(status: int, location: str | None) -> str:
    """What is said of one, which is never followed: another host may be anybody's."""
    try:
        host = urlsplit(location or "").netloc.rpartition("@")[2]
    except ValueError:
        host = "?"
    place = f"the host {host[:_LONGEST_SHOWN]!r}" if host else "another path of this host" if location else "nowhere"
    return f"status {status}, a redirect to {place}, which is not followed"


def unread(values_of: Callable[[str], Sequence[str]]) -> str | None:
    """Why the body behind a head is not read, by the values of its fields: where it ends is not known, or it is compressed, and
    so without a bound, though that was not asked for."""
    coding = ", ".join(values_of("Content-Encoding")).strip().lower()
    if coding not in ("", "identity"):
        return f"its body is compressed ({coding[:_LONGEST_SHOWN]!r}), which was not asked for"
    lengths = {*values_of("Content-Length")}
    if len(lengths) > 1 or not all(each.isascii() and each.isdigit() and len(each) <= _MOST_DIGITS for each in lengths):
        return "its Content-Length is no length"
    if [each.strip().lower() for each in values_of("Transfer-Encoding")] not in ([], ["chunked"]):
        return "its Transfer-Encoding is not known here"
    return None
