"""Pages of a server, read whole in bounded time and room: one that never ends is none."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from threading import Thread
from types import MappingProxyType

ASK_S = 5.0
"""For a whole page, whatever trickles in before."""
MOST_BYTES = 1 << 24


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Raises OSError, ValueError or HTTPException where there is no such page."""
    found: list[bytes | Exception] = []

    def read() -> None:
        try:
            # The timeout of a connection is one of each of its pieces.
            with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=ASK_S) as response:
                found.append(response.read(MOST_BYTES))
        except Exception as error:
            found.append(error)

    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(ASK_S)
    if not found:
        raise TimeoutError(f"no whole answer within {ASK_S:g} s")
    (answer,) = found
    if isinstance(answer, Exception):
        raise answer
    return answer
