"""Pages of a server, read whole in bounded time and room, from the address that is named alone: neither proxies nor redirects get to see headers."""

from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, IncompleteRead
from threading import Thread
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

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


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirects)


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The body of an answer with status 200; raises NoPage."""
    found: list[bytes | NoPage] = []

    def read() -> None:
        try:
            found.append(_read(url, headers))
        except NoPage as error:
            found.append(error)

    # The timeout of a connection is one of each of its pieces.
    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(ASK_S)
    answer = found[0] if found else NoPage(f"no answer within {ASK_S:g} s")
    if isinstance(answer, NoPage):
        raise answer
    return answer


def _read(url: str, headers: Mapping[str, str]) -> bytes:
    try:
        with _OPENER.open(Request(url, headers=dict(headers)), timeout=ASK_S) as response:
            if response.status != 200:
                raise NoPage(f"status {response.status}", response.status)
            if wrong := unread(lambda name: response.headers.get_all(name, [])):
                raise NoPage(wrong)
            content: bytes = response.read(MOST_BYTES + 1)
            left = response.length
    except NoPage:
        raise
    except HTTPError as error:
        is_redirect = 300 <= error.code < 400
        said = redirect(error.code, error.headers.get("Location")) if is_redirect else f"status {error.code}"
        raise NoPage(said, error.code) from None
    except IncompleteRead:
        raise NoPage("its body broke off") from None
    except (HTTPException, ValueError) as error:
        raise NoPage(f"what it says is no HTTP: {type(error).__name__}") from None
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        said = f"no answer within {ASK_S:g} s" if isinstance(reason, TimeoutError) else str(reason)
        raise NoPage(said or type(reason).__name__) from None
    if len(content) > MOST_BYTES:
        raise NoPage(f"its body is longer than {MOST_BYTES} bytes")
    if left:
        raise NoPage(f"its body broke off, {left} bytes before its Content-Length")
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
