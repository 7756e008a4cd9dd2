"""JSON that people and servers write: a key that is given twice is refused, as nobody can tell which value was meant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engines.errors import UserError

_LONGEST_KEY = 60


class RepeatedKeyError(json.JSONDecodeError):
    """``msg`` names the key; where in the text it stands is not known."""

    def __str__(self) -> str:
        return self.msg


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            shown = key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 3]}..."
            raise RepeatedKeyError(f"the key {shown!r} is given twice", "", 0)
        found[key] = value
    return found


DECODER = json.JSONDecoder(object_pairs_hook=unique)


def json_object(name: str, text: str, *, example: str) -> dict[str, Any]:
    """The object that a setting's text is; refused by the setting's name where it is none."""
    try:
        found = json.loads(text, object_pairs_hook=unique)
        json.dumps(found, allow_nan=False)
    except RepeatedKeyError as error:
        raise UserError(f"{name}={text!r}: {error}: keep one") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{name}={text!r} is no JSON object: write it like '{example}'")
    return found
