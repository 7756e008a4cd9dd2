"""The two sides of a comparison, each said in one text: ``WHERE@NAME=VALUE,NAME=VALUE``.

WHERE is a folder of runs or, among those of one folder, a system, or the name of a run, in which * and ? stand for others.
NAME is a field of a cell, a knob or ``code``; each part may be left out. A run that both sides would take belongs to the side that says
more: ``laps@seed=0 laps`` are the runs of a seed, and all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engines.errors import RunError, UserError, require
from engines.knobs import knobs_of
from repro.runs.store import SUFFIX, StoredRun
from repro.runs.system import settings_of
from repro.workbench.folder import Folder, folder_of, name_of, run_files

FIELDS = ("system", "dataset", "platform", "executor", "rate", "seed")
CODE = "code"
"""The digest of the code that made a run, told by its beginning."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    """What it was given as, for messages: a or b."""
    said: str
    runs: tuple[StoredRun, ...]
    warning: str | None = None
    """What could not be read where it was looked for."""

    def __str__(self) -> str:
        return f"{self.name}={self.said!r}"


def sides_of(a: object, b: object, root: Path) -> tuple[Side, Side]:
    """Texts are looked for among the runs in ``root``, unless they name a folder; runs are what they are."""
    read: dict[Path, Folder] = {}

    def side(name: str, given: object) -> Side:
        if isinstance(given, str | Path):
            return _selected(name, str(given), root, read)
        if isinstance(given, Sequence) and given and all(isinstance(run, StoredRun) for run in given):
            return Side(name=name, said=f"{len(given)} runs", runs=tuple(given))
        raise UserError(f"{name}={given!r} is no side to compare: give a folder, a selector or a list of stored runs")

    first, second = side("a", a), side("b", b)
    own, others = ({run.file for run in each.runs} for each in (first, second))
    if own == others:
        raise UserError(f"{first} and {second} are the same runs: tell them apart, as in laps@code=CODE")
    if own < others:
        return first, _without(second, own)
    if others < own:
        return _without(first, others), second
    require(not own & others, f"{first} and {second} have {len(own & others)} runs in common: say more of one of them")
    return first, second


def _without(side: Side, files: set[Path]) -> Side:
    kept = tuple(run for run in side.runs if run.file not in files)
    return Side(name=side.name, said=side.said, runs=kept, warning=side.warning)


def _selected(name: str, text: str, root: Path, read: dict[Path, Folder]) -> Side:
    require(bool(text.strip()), f"{name}={text!r} says nothing: give a folder, a system or a run's name")
    where, _, conditions = (text, "", "") if holds_runs(text) else text.partition("@")
    is_folder = holds_runs(where) or (bool(where) and Path(where).is_dir())
    place = Path(where) if is_folder else root
    if place not in read:
        read[place] = folder_of(place, name if is_folder else "result_dir")
    runs: Sequence[StoredRun] = read[place].runs
    if where and not is_folder:
        pattern = where.removesuffix(SUFFIX)
        runs = [run for run in runs if run.cell.system == where or fnmatchcase(name_of(run), pattern)]
        there = ", ".join(sorted({run.cell.system for run in read[place].runs}))
        require(
            runs != [],
            f"{name}={text!r} is no folder, and no system or run in {root}: systems there are {there}; or give another "
            f"--result-dir",
        )
    for condition in filter(None, conditions.split(",")):
        runs = _matching(runs, condition, f"{name}={text!r}")
    return Side(name=name, said=text, runs=tuple(runs), warning=read[place].warning)


def holds_runs(text: str) -> bool:
    """Whether a text is the path of a folder with a run's file in it."""
    with suppress(OSError, ValueError):
        return bool(text.strip()) and Path(text).is_dir() and bool(run_files(Path(text)))
    return False


def _matching(runs: Sequence[StoredRun], condition: str, who: str) -> list[StoredRun]:
    name, equals, text = condition.partition("=")
    require(
        bool(name and equals and text), f"{who}: {condition!r} is no condition: write NAME=VALUE, several with commas"
    )
    try:
        value = None if text == "inf" else json.loads(text)
    except ValueError:
        value = text
    found = [run for run in runs if _is(run, name, value, text)]
    if not found:
        there = {said_of(name, value_of(run, name)) for run in runs}
        if there == {"default"} and not any(name in _defaults(run.cell.system) for run in runs):
            known = sorted({knob for run in runs for knob in run.cell.asked})
            raise UserError(f"{who}: {name!r} is unknown: use {', '.join((*FIELDS, CODE, *known))}")
        raise UserError(f"{who}: no run has {condition}: use {', '.join(sorted(there))}")
    return found


def value_of(run: StoredRun, name: str) -> Any:
    """What a run has of a field, a knob (None at its default) or the code."""
    if name == CODE:
        return run.code_digest
    return getattr(run.cell, name) if name in FIELDS else run.cell.asked.get(name)


def _is(run: StoredRun, name: str, value: Any, text: str) -> bool:
    own = value_of(run, name)
    if name == CODE:
        return own is not None and str(own).startswith(text)
    if own is None and name not in FIELDS:
        return value is None or text == "default" or _defaults(run.cell.system).get(name) == value
    return (own == value and isinstance(own, bool) == isinstance(value, bool)) or own == text


def _defaults(system: str) -> dict[str, Any]:
    """What the knobs of a system are where nothing is said; nothing of a system that is no longer there."""
    with suppress(UserError, RunError, ImportError):
        return {name: knob.default for kind in settings_of(system) for name, knob in knobs_of(kind).items()}
    return {}


def said_of(name: str, value: Any) -> str:
    """As a condition has it."""
    if value is None:
        return "inf" if name == "rate" else "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(runs: Iterable[StoredRun]) -> list[str]:
    """What tells runs apart, the seed aside: fields, knobs, and the code only where nothing else does."""
    held = list(runs)
    knobs = sorted({name for run in held for name in run.cell.asked})
    asked = [name for name in (*FIELDS, *knobs) if name != "seed"]
    found = [name for name in asked if len({value_of(run, name) for run in held}) > 1]
    return found or ([CODE] if len({run.code_digest for run in held}) > 1 else [])
