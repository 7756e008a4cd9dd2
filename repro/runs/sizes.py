"""Sizes in bytes, as a user writes them."""

from __future__ import annotations

import re

from engines.errors import UserError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(name: str, text: str) -> int:
    """'24GB' (10^9), '64MiB' (2^20) or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KIB|MIB|GIB)?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else float(match[1]) * _UNITS[(match[2] or "B").upper()]
    if not 1 <= size < float("inf"):
        raise UserError(f"{name}={text!r} is not a size: write it like 24GB or 64MiB")
    return int(size)
