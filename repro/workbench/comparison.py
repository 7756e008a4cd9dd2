"""Two sides' runs, paired by seed and by everything else that is equal: how many times as large a metric is on the second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Literal, NamedTuple

from engines.errors import UserError, require
from engines.knobs import Range, check_value
from repro.runs.cell import COMPARISON, Scalar, plain
from repro.runs.statistics import Interval, paired_ratio
from repro.runs.store import StoredRun
from repro.workbench.folder import name_of, numbers_of
from repro.workbench.sides import FIELDS, Side, differing, said_of, value_of

Tolerance = Annotated[float, Range(0, 10)]
Verdict = Literal["higher", "lower", "same", "unclear"]
Setting = tuple[tuple[str, Scalar], ...]
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting's, over its repeats."""

    setting: Setting
    """By which it differs from the other rows; empty of the row of all."""
    a: float
    b: float
    """Geometric means."""
    ratio: Interval
    """b over a, pair by pair; without an interval where there is one pair, or a value that is not positive."""
    tolerance: float

    @property
    def verdict(self) -> Verdict:
        """higher or lower where the whole interval lies beyond the tolerance, same where it lies within, else unclear."""
        low, high, most = self.ratio.low, self.ratio.high, 1 + self.tolerance
        if low is None or high is None:
            return "unclear"
        if low > most or high < 1 / most:
            return "higher" if low > most else "lower"
        return "same" if low >= 1 / most and high <= most else "unclear"

    @property
    def is_changed(self) -> bool:
        return self.verdict in ("higher", "lower")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    metric: str
    tolerance: float
    changes: tuple[Change, ...]
    """A row for each setting that both sides have."""
    overall: Change | None
    """All of them, each seed's geometric mean; None of one setting, or where not all have the same seeds."""
    is_in_order: bool
    """The sides have no seed in common: the first of one is held against the first of the other, and so on."""
    num_unpaired: int
    """Runs without a partner."""
    num_invalid: int
    """Pairs left out as one of the two is INVALID."""
    num_undefined: int
    """Pairs left out as one of the two has no such number."""

    @property
    def rows(self) -> tuple[Change, ...]:
        return self.changes if self.overall is None else (*self.changes, self.overall)

    @property
    def is_changed(self) -> bool:
        return any(row.is_changed for row in self.rows)


class Pair(NamedTuple):
    a: StoredRun
    b: StoredRun


def compare_sides(a: Side, b: Side, metric: str, tolerance: float = TOLERANCE) -> Comparison:
    check_value(Tolerance, "tolerance", plain(tolerance))
    _check_metric(metric, (*a.runs, *b.runs))
    names = _equal_names(a, b)
    first, second = _by_setting(a, names), _by_setting(b, names)
    is_in_order = not {run.cell.seed for run in a.runs} & {run.cell.seed for run in b.runs}
    pairs = {
        setting: _pairs(first[setting], second[setting], is_in_order=is_in_order)
        for setting in sorted(first.keys() & second.keys(), key=_order)
    }
    num_paired = sum(map(len, pairs.values()))
    if not num_paired:
        raise UserError(
            f"{a} and {b} have no pair of runs that are equal in {', '.join((*names, 'seed'))}: make the same cells"
        )
    every = [pair for held in pairs.values() for pair in held.values()]
    invalid = [pair for pair in every if not _is_valid(pair)]
    values = {setting: _values(held, metric) for setting, held in pairs.items()}
    varied = [name for name in names if len({dict(setting)[name] for setting in values}) > 1]
    changes = {
        setting: _change(tuple((name, dict(setting)[name]) for name in varied), found, tolerance)
        for setting, found in values.items()
        if found
    }
    return Comparison(
        metric=metric,
        tolerance=tolerance,
        changes=tuple(changes.values()),
        overall=_overall([values[setting] for setting in changes], tolerance),
        is_in_order=is_in_order,
        num_unpaired=len(a.runs) + len(b.runs) - 2 * num_paired,
        num_invalid=len(invalid),
        num_undefined=len(every) - len(invalid) - sum(map(len, values.values())),
    )


def _check_metric(metric: object, runs: Sequence[StoredRun]) -> None:
    require(isinstance(metric, str), f"metric={metric!r} must be a text: compare one metric at a time")
    known = dict.fromkeys(name for run in runs for name in numbers_of(run))
    if metric in known:
        return
    parts = [name for name in known if name.startswith(f"{metric}.")]
    if parts:
        raise UserError(f"metric={metric!r} is several numbers: use one of {', '.join(parts)}")
    near = get_close_matches(str(metric), known, 5, 0.6) or [*known]
    raise UserError(f"metric={metric!r} is unknown to these runs: use one of {', '.join(near)}")


def _equal_names(a: Side, b: Side) -> list[str]:
    """Fields and knobs in which runs are equal to their partners: all but the seed, and what tells the sides apart."""
    runs = (*a.runs, *b.runs)
    knobs = sorted({name for run in runs for name in run.cell.asked} - {COMPARISON})

    def values(side: Side, name: str) -> set[Scalar]:
        return {value_of(run, name) for run in side.runs}

    return [name for name in (*FIELDS, *knobs) if name != "seed" and values(a, name) & values(b, name)]


def _by_setting(side: Side, names: Sequence[str]) -> dict[Setting, dict[int, StoredRun]]:
    """By what is equal, and by seed. Refuses two runs in one place."""
    found: dict[Setting, dict[int, StoredRun]] = {}
    for run in side.runs:
        held = found.setdefault(tuple((name, value_of(run, name)) for name in names), {})
        if (other := held.setdefault(run.cell.seed, run)) is not run:
            apart = differing((other, run))
            fix = f"name one with @{apart[0]}={said_of(apart[0], value_of(other, apart[0]))}" if apart else "remove one"
            raise UserError(
                f"{side} has two runs for one of the other side, {name_of(other)} and {name_of(run)}, which differ in "
                f"{', '.join(apart) or 'nothing'}: {fix}"
            )
    return found


def _order(setting: Setting) -> list[tuple[bool, bool, float, str]]:
    """What is at its default comes first, numbers by their size, all at once last of the rates."""
    values = [math.inf if (name, value) == ("rate", None) else value for name, value in setting]
    return [
        (value is not None, isinstance(value, str), 0.0 if isinstance(value, str) else float(value or 0), str(value))
        for value in values
    ]


def _pairs(a: Mapping[int, StoredRun], b: Mapping[int, StoredRun], *, is_in_order: bool) -> dict[int, Pair]:
    """By the seed, or by the place of each in the order of seeds."""
    if is_in_order:
        return dict(enumerate(map(Pair, [a[seed] for seed in sorted(a)], [b[seed] for seed in sorted(b)])))
    return {seed: Pair(a[seed], b[seed]) for seed in sorted(a) if seed in b}


def _is_valid(pair: Pair) -> bool:
    return pair.a.validity.valid and pair.b.validity.valid


def _values(pairs: Mapping[int, Pair], metric: str) -> dict[int, tuple[float, float]]:
    """Both numbers of each pair that has them."""
    found = {}
    for seed, pair in pairs.items():
        first, second = (numbers_of(run).get(metric) for run in pair)
        if _is_valid(pair) and first is not None and second is not None:
            found[seed] = (float(first), float(second))
    return found


def _change(setting: Setting, values: Mapping[int, tuple[float, float]], tolerance: float) -> Change:
    a, b = ({seed: both[side] for seed, both in values.items()} for side in (0, 1))
    first, second = (_mean([*each.values()]) for each in (a, b))
    return Change(setting=setting, a=first, b=second, ratio=paired_ratio(b, a), tolerance=tolerance)


def _overall(rows: Sequence[Mapping[int, tuple[float, float]]], tolerance: float) -> Change | None:
    """A seed's value is the geometric mean over all settings: seeds are what repeats."""
    if len(rows) < 2 or any(row.keys() != rows[0].keys() for row in rows):
        return None
    means = {seed: (_mean([row[seed][0] for row in rows]), _mean([row[seed][1] for row in rows])) for seed in rows[0]}
    return _change((), means, tolerance)


def _mean(values: Sequence[float]) -> float:
    """Geometric, where all are positive."""
    if min(values) <= 0:
        return math.fsum(values) / len(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))
