"""How a server is run; nothing of the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass

from engines.bounds import check_fields
from engines.errors import require

MOST_HELD = 1 << 30
"""Requests that wait, or bytes of one."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose."""
    max_queue: int = 256
    """Requests that may wait; one more is refused with 429."""
    request_timeout_s: float = 600.0
    """For a whole request, from its arrival. A request may ask for less."""
    drain_timeout_s: float = 60.0
    """For requests to end after SIGTERM; those that are left then fail."""
    api_key: str | None = None
    """Asked for as a bearer token under /v1; None asks for none."""
    max_body_bytes: int = 1 << 22
    max_bytes_in_flight: int = 1 << 26
    """Of the bodies of all requests under way; small ones are taken nonetheless."""
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    """For a head, and for a body, to come whole."""
    max_connections: int = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 <= self.port < 1 << 16, f"port={self.port} must be between 0 and 65535")
        for name in ("max_queue", "max_body_bytes", "max_bytes_in_flight", "max_connections"):
            count = getattr(self, name)
            require(1 <= count <= MOST_HELD, f"{name}={count} must be at least 1 and at most {MOST_HELD}")
        for name in ("request_timeout_s", "drain_timeout_s", "head_timeout_s", "body_timeout_s"):
            value = getattr(self, name)
            require(0 < value <= 86_400, f"{name}={value:g} must be above 0 and at most a day")
        key = self.api_key
        # Never shown: it may be a real one with a slip of the pen.
        require(
            key is None or (key.isascii() and key.isprintable() and " " not in key and key != ""),
            "api_key must be printable ASCII without blanks: choose another",
        )
