"""Runs whose found numbers are changed at random: what moves with them is found, what does not is by construction."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from repro.reports.claims import Finding
from repro.runs.record import REQUESTS, LazyTables, RunRecord, Table
from repro.runs.store import StoredRun

NEAR, FAR = 1e-3, 2.5
"""Largest logarithm of a factor. Near, a least or largest value stays that of the same run; far, orderings change."""
DRAWS = {NEAR: 2, FAR: 16}
"""Draws of each size. One would do near; far, an ordering turns in some draws only."""
ROUNDING = 1e-9
"""Relative."""

_CHOSEN = frozenset({"n", "num_requests"})
"""Entries of a summary that the workload chooses and no run finds."""
_LIMITED = frozenset({"most_postponed"})
"""Counts that the code keeps within a limit: runs are below where they are, never above."""
_TIMES = ("submit_lag_s", "admitted_s", "first_output_s", "finished_s")
_MARKS = ("correct", "correct_strict")


def unmoved(findings: Callable[[Sequence[StoredRun]], list[Finding]], runs: Sequence[StoredRun]) -> set[str]:
    """Claims of which a value stays whatever the runs find."""
    found = {finding.claim: finding for finding in findings(runs)}
    still = {claim: set(range(len(finding.values))) for claim, finding in found.items()}
    for size, draws in DRAWS.items():
        for draw in range(draws):
            if not any(still.values()):
                return set()
            changed = [Perturbed(run, size=size, seed=draws * at + draw) for at, run in enumerate(runs)]
            for after in findings(changed):
                if before := found.get(after.claim):
                    still[after.claim] -= differing(before, after)
    return {claim for claim, places in still.items() if places}


def differing(before: Finding, after: Finding) -> set[int]:
    """Places of the values that are others."""
    everywhere = set(range(len(before.values)))
    if len(before.values) != len(after.values) or before.of != after.of or before.holds is not after.holds:
        return everywhere
    pairs = list(zip(before.values, after.values, strict=True))
    return {at for at in everywhere if not math.isclose(*pairs[at], rel_tol=ROUNDING)}


class Perturbed(StoredRun):
    """A run with every number it found multiplied by a random factor of its own, and some marks of its answers turned; what was
    asked of it stays."""

    def __init__(self, run: StoredRun, *, size: float, seed: int) -> None:
        super().__init__(run.cell, run.file, run.manifest, run.provenance, run.other_code)
        vars(self).update(_run=run, _size=size, _seed=seed, validity=run.validity, summary=_Scaled(run, size, seed))

    @property
    def obtained(self) -> str:
        return str(vars(self)["_run"].obtained)

    def total(self, table: str, column: str) -> float:
        return float(vars(self)["_run"].total(table, column))

    @cached_property
    def record(self) -> RunRecord:
        record: RunRecord = vars(self)["_run"].record
        return replace(record, tables=LazyTables(record.tables, self._perturbed))

    def _perturbed(self, name: str) -> Table:
        own: Table = vars(self)["_run"].record.tables[name]
        if name != REQUESTS:
            return own
        size, draw = vars(self)["_size"], random.Random(vars(self)["_seed"] + 1)
        times = {name: _scaled(own[name], draw, size) for name in _TIMES if name in own}
        marks = {name: _turned(own[name], draw, min(0.5, size)) for name in _MARKS if name in own}
        return {**own, **times, **marks}


class _Scaled(Mapping[str, Any]):
    """A summary of which each metric is scaled when it is asked for: a finding asks for few of them."""

    def __init__(self, run: StoredRun, size: float, seed: int) -> None:
        self._own, self._size, self._seed = run.summary, size, seed
        self._shares = {metric.name for metric in run.family.metrics if metric.unit == "share"}
        self._scaled: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._scaled:
            own, draw = self._own[name], random.Random(f"{self._seed} {name}")
            if name in self._shares and own == 0:  # no factor moves a share of nothing, which is found all the same
                self._scaled[name] = draw.uniform(0, self._size)
            else:
                self._scaled[name] = own if name in _CHOSEN else _scaled(own, draw, self._size)
            if name in _LIMITED:
                self._scaled[name] = min(own, self._scaled[name])
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
