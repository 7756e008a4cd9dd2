"""Which verdicts hang on a choice of ours, as ``repro.reports.flips`` found them: ``results/flips-PAPER.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

from engines.errors import UserError
from repro.paths import RESULTS

Kind = Literal["free", "reading"]
"""What no source prints of a system; or what the paper leaves open of what it measured."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    kind: Kind
    change: str
    claim: str
    default: str
    changed: str
    default_value: str
    changed_value: str


def flips_path(paper: str, root: Path = RESULTS) -> Path:
    return root / f"flips-{paper}.csv"


def as_csv(found: Sequence[Flip]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Flip)])
    writer.writerows([astuple(each) for each in found])
    return text.getvalue()


def read_flips(paper: str, root: Path = RESULTS) -> Mapping[str, tuple[Flip, ...]]:
    """By claim; nothing of a paper that has no such file."""
    path = flips_path(paper, root)
    if not path.is_file():
        return {}
    found: dict[str, tuple[Flip, ...]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                each = Flip(**row)  # type: ignore[arg-type]
                found[each.claim] = (*found.get(each.claim, ()), each)
    except (OSError, UnicodeDecodeError, csv.Error, TypeError) as error:
        raise UserError(
            f"{path.name} cannot be read ({type(error).__name__}): run 'python -m repro.reports.flips' again"
        ) from error
    return found


def undecided(verdict: str, found: Sequence[Flip]) -> str | None:
    """Why a verdict is none: what turns it, with the value there. None where nothing does, or where the runs of the flips, which are
    fewer, gave another verdict by themselves."""
    turning = [each for each in found if each.default == verdict and each.changed in _OPPOSITE.get(verdict, ())]
    if not turning:
        return None
    texts = ", ".join(f"{each.change} ({each.changed_value})" for each in turning)
    return f"holds by default; not with {texts}" if verdict == "reproduced" else f"holds with {texts}; not by default"


_OPPOSITE: Mapping[str, tuple[str, ...]] = {"reproduced": ("not reproduced",), "not reproduced": ("reproduced",)}
