"""The role of every comparison, computed: perturb the runs behind a finding, and see what moves it.

A figure's ``findings`` are functions of stored runs. A value that no change of any run moves is by construction. One
that only what the fit determines can move is implied by the fit, and fitted where it is the number that was fitted to.
Everything else is a prediction. Runs that move a value are the runs it rests on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from repro.reports.claims import Answer, Finding, Role
from repro.runs.record import REQUESTS, LazyTables, RunRecord, Table
from repro.runs.store import StoredRun

Findings = Callable[[Sequence[StoredRun]], list[Finding]]

NEAR, FAR = 1e-3, 2.5
"""Largest logarithm of a factor. Near, a least or largest value stays that of the same run; far, orderings change."""
DRAWS = {NEAR: 2, FAR: 16}
"""Draws of each size. One would do near; far, an ordering turns in some draws only."""
MOST_ALONE = 400
"""Runs of a figure up to which each is perturbed alone to see which ones a value rests on; of more, on all."""
CHANGED = 1e-9
"""Relative, beyond rounding."""

_CHOSEN = frozenset({"n", "num_requests"})
"""Entries of a summary that the workload chooses and no run finds."""
_FOUND_TIMES = ("submit_lag_s", "admitted_s", "first_output_s", "finished_s")
_FOUND_MARKS = ("correct", "correct_strict")


def answers(
    findings: Findings,
    runs: Sequence[StoredRun],
    *,
    determined: Callable[[StoredRun], Collection[str]] = lambda run: (),
    targets: Collection[str] = (),
    command: str | None = None,
    command_s: float | None = None,
) -> list[Answer]:
    """``determined`` names the metrics of a run that the fit determines; ``targets`` are the claims it was made to meet."""
    found = {finding.claim: finding for finding in findings(runs)}
    if not found:
        return []
    held = [frozenset(determined(run)) for run in runs]
    nothing, everything = [frozenset[str]()] * len(runs), range(len(runs))
    moved = partial(_moved, findings, found, runs)
    near, far = (moved(everything, nothing, size, DRAWS[size]) for size in (NEAR, FAR))
    near_rest, far_rest = near, far
    if any(held):
        near_rest, far_rest = (moved(everything, held, size, DRAWS[size]) for size in (NEAR, FAR))
    alone = [moved([index], nothing, NEAR, 1) for index in everything] if len(runs) <= MOST_ALONE else []

    def role(claim: str, place: int) -> Role:
        if not near[claim][place] and not far[claim][place]:
            return "by construction"
        # A rank or an ordering moves under large changes only; any other value is judged by small ones.
        moves = near_rest if near[claim][place] else far_rest
        if moves[claim][place]:
            return "prediction"
        return "fitted" if claim in targets else "implied by the fit"

    def deciding(claim: str) -> tuple[StoredRun, ...]:
        if any(near[claim]) and alone:
            return tuple(run for run, moves in zip(runs, alone, strict=True) if any(moves[claim]))
        return tuple(runs) if any(near[claim]) or any(far[claim]) else ()

    return [
        Answer(
            finding=finding,
            roles=tuple(role(claim, place) for place in range(len(finding.values))),
            runs=deciding(claim),
            command=command,
            command_s=command_s,
        )
        for claim, finding in found.items()
    ]


def _moved(
    findings: Findings,
    found: Mapping[str, Finding],
    runs: Sequence[StoredRun],
    indices: Iterable[int],
    kept: Sequence[frozenset[str]],
    size: float,
    draws: int,
) -> Mapping[str, list[bool]]:
    """Whether each value of each claim moves where the runs at ``indices`` are perturbed, but for the metrics kept."""
    chosen = set(indices)
    seen = {claim: [False] * len(finding.values) for claim, finding in found.items()}
    for draw in range(draws):
        changed = [
            Perturbed(run, size=size, seed=draws * index + draw, kept=kept[index]) if index in chosen else run
            for index, run in enumerate(runs)
        ]
        for finding in findings(changed):
            if finding.claim in found:
                marks = differing(found[finding.claim], finding)
                seen[finding.claim] = [a or b for a, b in zip(seen[finding.claim], marks, strict=True)]
    return seen


def differing(before: Finding, after: Finding) -> list[bool]:
    if len(before.values) != len(after.values) or before.of != after.of:
        return [True] * len(before.values)
    turned = before.holds is not after.holds
    return [
        turned or abs(b - a) > CHANGED * max(abs(a), abs(b)) for a, b in zip(before.values, after.values, strict=True)
    ]


class Perturbed(StoredRun):
    """A stored run with every number it found multiplied by a random factor of its own, and some marks of its answers
    turned; what was asked of it stays, and so do the metrics kept. With all of them, its record stays too."""

    def __init__(self, run: StoredRun, *, size: float, seed: int, kept: Collection[str] = ()) -> None:
        super().__init__(run.cell, run.file, run.manifest, run.provenance, run.other_code)
        self.__dict__.update(_run=run, _size=size, _seed=seed, _kept=kept)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        return _ScaledSummary(self)

    @cached_property
    def record(self) -> RunRecord:
        run = self.__dict__["_run"]
        record: RunRecord = run.record
        if run.summary.keys() <= set(self.__dict__["_kept"]):
            return record
        # Read when they are asked for: those of a simulated run would be made again.
        return replace(record, tables=LazyTables(record.tables, self._perturbed))

    def _perturbed(self, name: str) -> Table:
        own: Table = self.__dict__["_run"].record.tables[name]
        if name != REQUESTS:
            return own
        size, draw = self.__dict__["_size"], random.Random(self.__dict__["_seed"] + 1)
        times = {name: _scaled(own[name], draw, size) for name in _FOUND_TIMES if name in own}
        marks = {name: _turned(own[name], draw, min(0.5, size)) for name in _FOUND_MARKS if name in own}
        return {**own, **times, **marks}


class _ScaledSummary(Mapping[str, Any]):
    """Each metric is scaled when it is asked for: a finding asks for few of them."""

    def __init__(self, of: Perturbed) -> None:
        parts = of.__dict__
        self._own: Mapping[str, Any] = parts["_run"].summary
        self._size, self._seed, self._kept = parts["_size"], parts["_seed"], parts["_kept"]
        self._shares = {metric.name for metric in of.family.metrics if metric.unit == "share"}
        self._scaled: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._kept:
            return self._own[name]
        if name not in self._scaled:
            own, draw = self._own[name], random.Random(f"{self._seed} {name}")
            if name in self._shares and own == 0:  # no factor moves a share of nothing, which is found all the same
                self._scaled[name] = draw.uniform(0, self._size)
            else:
                self._scaled[name] = own if name in _CHOSEN else _scaled(own, draw, self._size)
        return self._scaled[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _turned(marks: Sequence[bool | None], draw: random.Random, share: float) -> list[bool | None]:
    """The marks with this share of them turned, at least one where there is any."""
    known = [place for place, mark in enumerate(marks) if mark is not None]
    chosen = set(draw.sample(known, min(len(known), max(1, round(share * len(known))))))
    return [not mark if place in chosen else mark for place, mark in enumerate(marks)]


def _scaled(value: Any, draw: random.Random, size: float) -> Any:
    if isinstance(value, Mapping):
        return {name: part if name in _CHOSEN else _scaled(part, draw, size) for name, part in value.items()}
    if isinstance(value, list):
        return [_scaled(part, draw, size) for part in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * math.exp(draw.uniform(-size, size))
    return value
