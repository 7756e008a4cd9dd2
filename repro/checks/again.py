"""Simulated runs of the committed tables, made again: a sample of them, and the numbers that drawing reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from engines.errors import RunError, UserError
from repro.checks.results import Checked, command_of
from repro.reports.run_table import Place, RunTable, TableRun, digest_of, read_table, tables_in, value_at
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import MANIFEST, StoredRun, pack, part_of, parts_of

ELSEWHERE = ("provenance",)
"""Parts of a run that tell where it was made and no number of it."""


def make_again(root: Path, most: int, seed: int = 0, advance: Callable[[], None] = lambda: None) -> list[Checked]:
    """``most`` simulated runs of the tables below ``root``, drawn with ``seed`` and spread over the figures."""
    found = []
    for table, at in _sample([read_table(path) for path in tables_in(root)], most, random.Random(seed)):
        name = table.entry.name
        try:
            run = next(run for run in table.runs if run.asked == at)
            name = f"{name}: {run.cell.folder_name}"
            differs = _differs(table, run)
        except (UserError, RunError) as error:
            differs = str(error)
        found.append(
            Checked(
                figure=name,
                path=table.path,
                status="differs" if differs else "same",
                reason=differs or "made again, with the same numbers",
                command=command_of(table),
            )
        )
        advance()
    return found


def _sample(tables: Sequence[RunTable], most: int, draw: random.Random) -> Iterator[tuple[RunTable, str]]:
    """Tables in turn, each with the asked key of another of its simulated rows."""
    left = []
    for table in tables:
        rows = [row["asked"] for row in table.fixed if not row["obtained"].startswith("measured")]
        left.append((table, draw.sample(rows, len(rows))))
    draw.shuffle(left)
    while most > 0 and any(rows for _, rows in left):
        for table, rows in left:
            if rows and most > 0:
                most -= 1
                yield table, rows.pop()


def _differs(table: RunTable, stored: TableRun) -> str | None:
    """In what a cell's run of today is not the stored one."""
    cell = next(cell for cell in table.cells if cell.key == stored.asked)
    experiment = prepare(cell)
    if experiment.cell.key != stored.cell.key:
        return f"its key is {experiment.cell.key} today: its requests, settings, or the constants behind it are others"
    run = made(experiment)
    for place in table.places:
        before, now = (_told(each, place) for each in (stored, run))
        if place[0] not in ELSEWHERE and not _is_alike(before, now):
            return f"{'/'.join(place)} is {before!r}, and {now!r} made again"
    if digest_of(run.summary) != stored.digest:
        return "a number that drawing does not read is another one made again"
    return None


def made(experiment: Experiment) -> StoredRun:
    """The experiment's run, made now and stored nowhere."""
    record = experiment.run()
    packed = pack(experiment, record, {})
    manifest = part_of(parts_of(packed.content), MANIFEST)
    run = StoredRun(packed.cell, Path(), manifest, packed.provenance, content=packed.content)
    vars(run)["record"] = record
    return run


def _told(run: StoredRun, place: Place) -> Any:
    try:
        return value_at(run, place)
    except KeyError:
        return None


def _is_alike(before: Any, now: Any) -> bool:
    """The same, up to the last places in which processors differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_alike(before[name], now[name]) for name in before)
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_is_alike, before, now))
    numbers = (int, float)
    if isinstance(before, numbers) and isinstance(now, numbers) and isinstance(before, bool) is isinstance(now, bool):
        return isclose(before, now)
    return bool(before == now)
