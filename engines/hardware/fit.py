"""Fits a card's roofline to timed steps: one share of the matrix peak for products and attention, one of the bandwidth, and what every
step takes besides.

Squared relative errors are least. Which parts of a step are bound by arithmetic depends on the ratio of the two shares alone, and changes
at one ratio for each part: between two of these, seconds are linear in the constants, and on one of them too. All are tried, so
that the best of all constants is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

import numpy as np

from engines.errors import UserError, require
from engines.hardware.catalogue import Gpu
from engines.hardware.roofline import Calibration, Roofline, StepWork
from engines.least_squares import Column, nonnegative_fit, reduced
from engines.models.shape import ModelShape

LEAST_ROWS = 4
"""One more than constants: each is predicted by the others."""
_ROUNDING = 1e-9

Parts = Sequence[tuple[float, float]]
"""Seconds that each part's arithmetic and traffic take at the peaks."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    name: str
    shape: ModelShape
    work: StepWork
    seconds: float

    def predicted_s(self, card: Gpu, calibration: Calibration) -> float:
        return Roofline(self.shape, card, calibration).step_time(self.work).total_s


def fit_steps(steps: Sequence[TimedStep], card: Gpu, source: str) -> Calibration:
    """``source`` says where the steps are from. Refuses steps that do not tell a constant, or are faster than the card can be."""
    require(
        len(steps) >= LEAST_ROWS,
        f"{source} has {len(steps)} timed steps and three constants are fitted: time {LEAST_ROWS} or more",
    )
    return _fitted(steps, card, source)


def left_out(steps: Sequence[TimedStep], card: Gpu, source: str) -> list[float | None]:
    """Seconds of each step by constants that are fitted to the others; None where these do not tell them."""
    found: list[float | None] = []
    for place, step in enumerate(steps):
        others = [*steps[:place], *steps[place + 1 :]]
        try:
            found.append(step.predicted_s(card, _fitted(others, card, source)))
        except UserError:
            found.append(None)
    return found


def _fitted(steps: Sequence[TimedStep], card: Gpu, source: str) -> Calibration:
    rows = [Roofline(step.shape, card).floors(step.work) for step in steps]
    seconds = [step.seconds for step in steps]
    inverse_share, inverse_bandwidth, overhead_s = _best(rows, seconds)
    _check_told(rows, seconds, inverse_share, inverse_bandwidth, source)
    for inverse, peak in ((inverse_share, "matrix peak"), (inverse_bandwidth, "memory bandwidth")):
        require(
            inverse >= 1 - _ROUNDING,
            f"{source} has steps that take {1 / inverse:.4g} times the {peak} of {card.name}: check the card's datasheet and the steps",
        )
    share = min(1.0, 1 / inverse_share)
    return Calibration(
        gpu=card.name,
        matmul_efficiency=share,
        attention_efficiency=share,
        bandwidth_efficiency=min(1.0, 1 / inverse_bandwidth),
        step_overhead_s=overhead_s,
        fitted_on=(f"{len(steps)} steps of {source}",),
        note="three constants fitted to measured steps: matmul = attention share of peak, share of bandwidth, and the overhead of a step",
    )


def _best(rows: Sequence[Parts], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Arithmetic and traffic of a step at the peaks are multiplied by the first two; the third comes on top."""
    turns = sorted({traffic / arithmetic for parts in rows for arithmetic, traffic in parts if arithmetic})
    between = [turns[0] / 2, *((low * high) ** 0.5 for low, high in pairwise(turns)), turns[-1] * 2]
    candidates = []
    for ratio in between:
        share, bandwidth, overhead = _solved(_columns(rows, ratio), seconds)
        candidates.append((share, bandwidth, overhead))
    for ratio in turns:
        alone = [fsum(max(ratio * arithmetic, traffic) for arithmetic, traffic in parts) for parts in rows]
        bandwidth, overhead = _solved([alone, [1.0] * len(rows)], seconds)
        candidates.append((ratio * bandwidth, bandwidth, overhead))
    return min(candidates, key=lambda constants: _loss(rows, seconds, constants))


def _columns(rows: Sequence[Parts], ratio: float) -> list[Column]:
    """What the three constants are multiplied by, of each step, where arithmetic is ``ratio`` times as dear as traffic."""
    return [
        [fsum(a for a, t in parts if ratio * a > t) for parts in rows],
        [fsum(t for a, t in parts if ratio * a <= t) for parts in rows],
        [1.0] * len(rows),
    ]


def _solved(columns: Sequence[Column], seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(nonnegative_fit(np.array(columns).T, np.array(seconds)).tolist())


def _loss(rows: Sequence[Parts], seconds: Sequence[float], constants: tuple[float, float, float]) -> float:
    share, bandwidth, overhead = constants
    errors = [
        (fsum(max(share * a, bandwidth * t) for a, t in parts) + overhead) / due - 1
        for parts, due in zip(rows, seconds, strict=True)
    ]
    return fsum(error * error for error in errors)


def _check_told(rows: Sequence[Parts], seconds: Sequence[float], share: float, bandwidth: float, source: str) -> None:
    fixes = {"arithmetic": (share, "the matrix peak", "more rows"), "memory": (bandwidth, "the bandwidth", "few rows")}
    columns = _columns(rows, share / bandwidth if bandwidth else 1.0)
    for column, (bound, (found, what, fix)) in zip(columns, fixes.items(), strict=False):
        require(
            found > 0 and any(column),
            f"none of the steps of {source} is bound by {bound}, so that they do not tell the share of {what}: time one of {fix}",
        )
    relative = [[value / due for value, due in zip(column, seconds, strict=True)] for column in columns]
    lengths = [fsum(value * value for value in column) ** 0.5 for column in relative]
    scaled = [[value / length for value in column] for column, length in zip(relative, lengths, strict=True)]
    require(
        len(reduced(scaled, [1.0] * len(rows)).target) == len(columns),
        f"the steps of {source} do not tell the constants apart: time steps of other sizes",
    )
