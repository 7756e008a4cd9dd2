"""A digest of a file's content within it, so that an edit by hand is seen. It is a seal against edits, and none against a forger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "seal"
"""Its name in a file."""


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, SEAL: _digest(value)}


def is_whole(value: Mapping[str, Any]) -> bool:
    """Whether a sealed value is as it was written."""
    return value.get(SEAL) == _digest({name: part for name, part in value.items() if name != SEAL})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
