"""How a server is run; nothing of the engine behind it."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.errors import require
from engines.knobs import Checked, Range

Held = Annotated[int, Range(1, 1 << 30)]
"""Requests that wait, or bytes of one."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")
"""As browsers write it."""
Seconds = Annotated[float, Range(above=0, most=86_400)]


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Checked):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """Port to listen on; 0 is any that is free."""
    max_queue: Held = 256
    """Requests that may wait; one more is refused with 429."""
    request_timeout: Seconds = 600.0
    """Seconds for a request, waiting included; it may ask for less."""
    drain_timeout: Seconds = 60.0
    """Seconds for requests to end after SIGTERM; those that are left then fail."""
    api_key: str | None = None
    """Asked for as a bearer token under /v1 and of /tokenize and /detokenize; None asks for none."""
    unknown_fields: Literal["count", "refuse"] = "count"
    """count or refuse fields of requests that are unknown: those counted have no effect and stand in /metrics."""
    allow_origin: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser, as 'https://example.org'; '*' is any."""
    max_body_bytes: Held = 1 << 22
    max_bytes_in_flight: Held = 1 << 26
    """The bodies of all requests under way together; small ones are taken nonetheless."""
    body_timeout_s: Seconds = 30.0
    """For a body to come whole."""
    max_connections: Held = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.host.strip() != "",
            f"host={self.host!r} is empty: give an address, or 0.0.0.0 for all of this machine's",
        )
        key = self.api_key
        # Never shown: it may be a real one with a slip of the pen.
        require(
            key is None or (key.isascii() and key.isprintable() and " " not in key and key != ""),
            "api_key must be printable ASCII without blanks: choose another",
        )
        for origin in self.allow_origin:
            require(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                f"allow_origin={origin!r} is no origin: give scheme://host or scheme://host:port in small letters, without "
                f"a path or a slash at the end",
            )
