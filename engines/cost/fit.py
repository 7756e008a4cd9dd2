"""Fits a card's roofline to timed steps: one share of the matrix peak for products and attention, one share of the bandwidth, and the
overhead of every step. If the steps tell, it also fits what some kinds of steps take besides.

The fit has the least squared relative errors. Only the ratio of the two shares decides which parts of a step are bound by arithmetic,
and each part changes at one ratio. Between two of these ratios, and on each of them, seconds are linear in the constants. We try all of
these cases, so we find the best constants. A share stays the datasheet's if no step is bound by it, so that none tells it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import fsum
from typing import NamedTuple

import numpy as np

from engines.cost.roofline import Calibration, CardCalibration, Gpu, Roofline, StepWork
from engines.errors import UserError, require
from engines.least_squares import Floats, nonnegative_fit, reduced
from engines.models.shape import ModelShape

LEAST_ROWS = 4
"""One more than there are constants, so that we can predict each step from the others."""
_ROUNDING = 1e-9
_DEPENDENT = 1e-6
"""A kind of step depends on the kinds before it if they leave at most this of its squares, which sum to 1."""

SHARES = {"arithmetic": ("the matrix peak", "more rows"), "memory": ("the bandwidth", "few rows")}
"""By what bounds a step: the peak that the share is of, and the steps that tell the share."""
KINDS: dict[str, Callable[[StepWork], int]] = {
    "layout_s": lambda work: work.new_layout,
    "build_s": lambda work: work.builds,
}
"""Constants that only some steps have, and how often a step has each."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    name: str
    shape: ModelShape
    work: StepWork
    seconds: float

    def predicted_s(self, card: Gpu, calibration: Calibration) -> float:
        return Roofline(self.shape, card, calibration).step_time(self.work).total_s


class FittedConstants(NamedTuple):
    """The constants that are fitted besides the overhead of every step."""

    shares: tuple[str, ...]
    """Some of ``SHARES``; the others stay 1."""
    kinds: tuple[str, ...]
    """Some of ``KINDS``; the others stay 0."""


class Fit(NamedTuple):
    calibration: CardCalibration
    free: FittedConstants
    left_out: list[float | None]
    """Seconds of each step by constants fitted to the other steps; None if the others do not tell the constants."""

    @property
    def datasheet_shares(self) -> tuple[str, ...]:
        """The names in ``SHARES`` whose share stays the datasheet's."""
        return tuple(bound for bound in SHARES if bound not in self.free.shares)


def fit_steps(steps: Sequence[TimedStep], card: Gpu, source: str) -> Fit:
    """``source`` names the source of the steps. A share stays the datasheet's if no step is bound by it, or if fitting it does not
    predict left-out steps better. Raises UserError if steps do not tell the constants apart, or are faster than the card can be."""
    require(
        len(steps) >= LEAST_ROWS,
        f"{source} has {len(steps)} timed steps and three constants are fitted: time {LEAST_ROWS} or more",
    )
    kinds, timed = _identified_kinds(steps), _Timed.of(steps, card)
    timed.check_possible(card, source)
    best = timed.best(FittedConstants(tuple(SHARES), kinds))
    bounds = timed.bounds(best)
    fits = []
    for shares in (tuple(SHARES), ("arithmetic",), ("memory",)):
        # A fit above a peak follows the noise of the steps, because no step is above the peak itself.
        if {*shares} <= {*bounds} and all(best.inverse[bound] >= 1 - _ROUNDING for bound in shares):
            free = FittedConstants(shares, kinds)
            try:
                fits.append(Fit(_fit(steps, card, source, free), free, _predictions(steps, card, source, free)))
            except UserError:
                if len(shares) < len(SHARES):
                    continue
                raise
    require(bool(fits), f"the steps of {source} do not tell the constants apart: time steps of other sizes")
    return min(fits, key=lambda fit: _left_out_error(steps, fit, fits))


def _left_out_error(steps: Sequence[TimedStep], fit: Fit, fits: Sequence[Fit]) -> float:
    """Sum of squared relative errors over the left-out steps that all fits predict."""
    errors = []
    for index, step in enumerate(steps):
        predictions = [other.left_out[index] for other in fits]
        our_s = fit.left_out[index]
        if our_s is not None and None not in predictions:
            errors.append(our_s / step.seconds - 1)
    return fsum(error * error for error in errors)


def _predictions(steps: Sequence[TimedStep], card: Gpu, source: str, free: FittedConstants) -> list[float | None]:
    predictions: list[float | None] = []
    for index, step in enumerate(steps):
        others = [*steps[:index], *steps[index + 1 :]]
        try:
            predictions.append(step.predicted_s(card, _fit(others, card, source, free)))
        except UserError:
            predictions.append(None)
    return predictions


def _identified_kinds(steps: Sequence[TimedStep]) -> tuple[str, ...]:
    """The kinds that only some steps have, independent of the kinds before. Each further kind needs one more step."""
    kinds: list[str] = []
    columns = [[1.0] * len(steps)]
    for name, count in KINDS.items():
        column = [float(count(step.work)) for step in steps]
        length = fsum(value * value for value in column) ** 0.5
        if not length or len(steps) < LEAST_ROWS + len(kinds) + 1:
            continue
        scaled = [value / length for value in column]
        if reduced([[value / len(steps) ** 0.5 for value in columns[0]], *columns[1:]], scaled).rest > _DEPENDENT:
            kinds.append(name)
            columns.append(scaled)
    return tuple(kinds)


def _fit(steps: Sequence[TimedStep], card: Gpu, source: str, free: FittedConstants) -> CardCalibration:
    timed = _Timed.of(steps, card)
    best = timed.best(free)
    timed.check_bounds(best, free, source)
    shares = {bound: min(1.0, 1 / inverse) for bound, inverse in best.inverse.items()}
    default_note = "".join(f"; {SHARES[bound][0]} is the datasheet's" for bound in SHARES if bound not in free.shares)
    return CardCalibration(
        gpu=card.name,
        matmul_efficiency=shares["arithmetic"],
        attention_efficiency=shares["arithmetic"],
        bandwidth_efficiency=shares["memory"],
        step_overhead_s=best.overhead_s,
        **best.kinds,
        fitted_on=(f"{len(steps)} steps of {source}",),
        note="constants fitted to measured steps: matmul = attention share of peak, share of bandwidth, and the overhead of a step"
        + default_note,
    )


class _Constants(NamedTuple):
    inverse: dict[str, float]
    """Factors on the seconds that arithmetic and traffic take at the peaks."""
    overhead_s: float
    kinds: dict[str, float]


class _Case(NamedTuple):
    """A choice of what bounds each part, so that seconds are linear."""

    columns: Sequence[Floats]
    known: Floats
    """Seconds of the parts whose share stays the datasheet's."""
    inverse: Callable[[Sequence[float]], dict[str, float]]
    """Returns the factors of ``_Constants`` for the coefficients of the columns."""


def _in_order(free: Sequence[str], solution: Sequence[float]) -> dict[str, float]:
    return dict.fromkeys(SHARES, 1.0) | dict(zip(free, solution, strict=True))


def _shares_at_ratio(ratio: float, solution: Sequence[float]) -> dict[str, float]:
    """On a turning ratio a part's arithmetic takes as long as its traffic."""
    (memory,) = solution
    return {"arithmetic": ratio * memory, "memory": memory}


def _fixed(inverse: dict[str, float], _: Sequence[float]) -> dict[str, float]:
    return inverse


class _Timed(NamedTuple):
    arithmetic: Floats
    """[steps, parts] seconds at the peaks."""
    traffic: Floats
    """[steps, parts] seconds at the bandwidth."""
    works: Sequence[StepWork]
    seconds: Floats

    @classmethod
    def of(cls, steps: Sequence[TimedStep], card: Gpu) -> "_Timed":
        floors = np.array([Roofline(step.shape, card).floors(step.work) for step in steps])
        seconds = np.array([step.seconds for step in steps])
        return cls(floors[:, :, 0], floors[:, :, 1], [step.work for step in steps], seconds)

    def best(self, free: FittedConstants) -> _Constants:
        """Solve cases in the order of the errors that even negative constants leave, until no other case can be better."""
        cases = self._cases(free)
        ones, kinds = np.ones(len(self.works)), [self._of_kind(name) for name in free.kinds]
        best: tuple[float, int, _Constants] | None = None
        for least_loss, index in sorted(zip(self._lower_bounds(cases, [ones, *kinds]), range(len(cases)), strict=True)):
            if best is not None and least_loss > best[0] + _ROUNDING:
                break
            case = cases[index]
            features = np.stack([*case.columns, ones, *kinds], axis=1)
            solution = nonnegative_fit(features, self.seconds, known=case.known).tolist()
            num = len(case.columns)
            constants = _Constants(
                case.inverse(solution[:num]), solution[num], dict(zip(free.kinds, solution[num + 1 :], strict=True))
            )
            candidate = self._loss(constants), index, constants
            best = candidate if best is None else min(best, candidate, key=lambda each: each[:2])
        assert best is not None
        return best[2]

    def _lower_bounds(self, cases: Sequence[_Case], others: Sequence[Floats]) -> list[float]:
        """A lower bound of the squares that each case leaves, by orthogonal columns. A library's last digits decide nothing here."""
        losses = [0.0] * len(cases)
        for num in {len(case.columns) for case in cases}:
            indices = [index for index, case in enumerate(cases) if len(case.columns) == num]
            features = np.stack([np.stack([*cases[index].columns, *others], axis=1) for index in indices])
            offsets = np.stack([cases[index].known for index in indices])
            target = 1 - offsets / self.seconds
            unit = np.linalg.qr(features / self.seconds[:, None]).Q
            along = np.einsum("cnk,cn->ck", unit, target)
            for index, loss in zip(indices, ((target**2).sum(axis=1) - (along**2).sum(axis=1)).tolist(), strict=True):
                losses[index] = loss
        return losses

    def check_possible(self, card: Gpu, source: str) -> None:
        """Raises UserError for steps that take less time than their arithmetic, or their traffic, at the peak."""
        for peak, floors in (("matrix peak", self.arithmetic), ("memory bandwidth", self.traffic)):
            times = float((_sum_parts(floors) / self.seconds).max())
            require(
                times <= 1 + _ROUNDING,
                f"{source} has steps that take {times:.4g} times the {peak} of {card.name}: check the card's datasheet and the steps",
            )

    def bounds(self, fitted: _Constants) -> tuple[str, ...]:
        """The shares that bound some part of a step."""
        columns = self._columns(_ratio(fitted))
        return tuple(bound for bound in SHARES if fitted.inverse[bound] > 0 and columns[bound].any())

    def check_bounds(self, fitted: _Constants, free: FittedConstants, source: str) -> None:
        bounds, columns = self.bounds(fitted), self._columns(_ratio(fitted))
        for bound in free.shares:
            share, fix = SHARES[bound]
            require(
                bound in bounds,
                f"none of the steps of {source} is bound by {bound}, so that they do not tell the share of {share}: time one of {fix}",
            )
        relative = [columns[bound] / self.seconds for bound in free.shares] + [1 / self.seconds]
        scaled = [(column / fsum((column * column).tolist()) ** 0.5).tolist() for column in relative]
        require(
            len(reduced(scaled, [1.0] * len(self.seconds)).target) == len(scaled),
            f"the steps of {source} do not tell the constants apart: time steps of other sizes",
        )

    def _cases(self, free: FittedConstants) -> list[_Case]:
        computes, zero = self.arithmetic > 0, np.zeros(len(self.works))
        ratios = sorted(set((self.traffic[computes] / self.arithmetic[computes]).tolist()))
        cases = []
        for ratio in [ratios[0] / 2, *((low * high) ** 0.5 for low, high in pairwise(ratios)), ratios[-1] * 2]:
            columns = self._columns(ratio)
            offset = sum((columns[bound] for bound in SHARES if bound not in free.shares), zero)
            cases.append(_Case([columns[bound] for bound in free.shares], offset, partial(_in_order, free.shares)))
        for ratio in ratios:
            column = _sum_parts(np.maximum(ratio * self.arithmetic, self.traffic))
            if len(free.shares) == len(SHARES):
                cases.append(_Case([column], zero, partial(_shares_at_ratio, ratio)))
            else:
                # If one share is 1, the ratio gives the other.
                scale = 1.0 if free.shares == ("arithmetic",) else 1 / ratio
                cases.append(_Case([], scale * column, partial(_fixed, _shares_at_ratio(ratio, [scale]))))
        return cases

    def _of_kind(self, name: str) -> Floats:
        return np.array([float(KINDS[name](work)) for work in self.works])

    def _columns(self, ratio: float) -> dict[str, Floats]:
        """Seconds at the peaks that each share applies to, by step, if arithmetic costs ``ratio`` times as much as traffic."""
        is_bound = ratio * self.arithmetic > self.traffic
        return {
            "arithmetic": _sum_parts(np.where(is_bound, self.arithmetic, 0.0)),
            "memory": _sum_parts(np.where(is_bound, 0.0, self.traffic)),
        }

    def _loss(self, fitted: _Constants) -> float:
        part_s = np.maximum(fitted.inverse["arithmetic"] * self.arithmetic, fitted.inverse["memory"] * self.traffic)
        kinds_s = sum(seconds * self._of_kind(name) for name, seconds in fitted.kinds.items())
        errors = (_sum_parts(part_s) + fitted.overhead_s + kinds_s) / self.seconds - 1
        return fsum((errors * errors).tolist())


def _sum_parts(parts: Floats) -> Floats:
    """[steps] sums of the parts, added in the same order on every machine."""
    first, second, third = parts.T
    return np.asarray(first + second + third)


def _ratio(fitted: _Constants) -> float:
    return fitted.inverse["arithmetic"] / fitted.inverse["memory"] if fitted.inverse["memory"] else 1.0
