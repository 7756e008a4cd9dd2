"""A digest of a file's content within it, so that an edit by hand is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "seal"


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, _SEAL: _digest(value)}


def is_whole(value: Mapping[str, Any]) -> bool:
    """Whether a sealed value is as it was written."""
    return value.get(_SEAL) == _digest({name: part for name, part in value.items() if name != _SEAL})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
