"""Code that is other than that of stored runs and gives their numbers all the same: runs are made again, and it is kept which
code was seen to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.files import replace_text
from repro.runs.seal import is_whole, sealed

FILE = "held.json"

Pair = tuple[str, str]
"""Digests of code: a stored run's, and today's."""


@dataclass(frozen=True, kw_only=True)
class Held:
    made_again: Mapping[Pair, int] = field(default_factory=dict)
    """How many runs of a pair gave the same numbers; a pair in which one did not is not there."""

    def is_same(self, stored: str, now: str) -> bool:
        return stored == now or (stored, now) in self.made_again

    def after(self, made_again: Mapping[Pair, int]) -> Held:
        """With what was seen since; 0 of a pair of which a run gave other numbers, which is then not held."""
        seen = {**self.made_again, **made_again}
        return Held(made_again={pair: num for pair, num in seen.items() if num and pair[0] != pair[1]})

    def others(self, stored: Iterable[str], today: Collection[str]) -> set[str]:
        """Code of which none of today's gives the numbers."""
        return {code for code in stored if not any(self.is_same(code, now) for now in today)}

    def told(self, pairs: Mapping[Pair, int]) -> str:
        """What is said of the runs of a figure that other code made; nothing where none did."""
        other = Counter({pair: num for pair, num in pairs.items() if pair[0] != pair[1]})
        sample = sum(self.made_again[pair] for pair in other)
        return f"; {other.total()} by other code, of whose runs {sample} made again are the same" if other else ""


def read_held(root: Path) -> Held:
    path = root / FILE
    if not path.is_file():
        return Held()
    try:
        value: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if not is_whole(value):
            raise ValueError("it is not as it was written")
        return Held(made_again={(each["stored"], each["now"]): int(each["runs"]) for each in value["held"]})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): make it anew with 'repro check-results --again 10 --accept'"
        ) from error


def save_held(root: Path, held: Held) -> Path:
    rows = [{"stored": stored, "now": now, "runs": num} for (stored, now), num in sorted(held.made_again.items())]
    return replace_text(root / FILE, json.dumps(sealed({"held": rows}), indent=1) + "\n")
