"""Least squares with a few coefficients, whose results have the same bits on every machine.

Linear algebra libraries use different kernels on different CPUs, so their last digits differ, and simulations depend on these fits.
We use only sums that are rounded once (``math.fsum``), products and square roots, whose results IEEE 754 fixes.
"""

from collections.abc import Sequence
from itertools import combinations
from math import fsum, sqrt
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DEPENDENT = 1e-12
"""A column is a linear combination of the others if removing them leaves no more length than this."""

Column = Sequence[float]
Floats = npt.NDArray[np.float64]


class Reduced(NamedTuple):
    """A triangular system with the same least-squares solutions as the original, for every subset of the columns."""

    columns: list[list[float]]
    target: list[float]
    rest: float
    """Sum of squares that no coefficients can remove."""


def without(column: Column, share: float, unit: Column) -> list[float]:
    return [value - share * part for value, part in zip(column, unit, strict=True)]


def dot(a: Column, b: Column) -> float:
    return fsum(map(mul, a, b))


def reduced(columns: Sequence[Column], target: Column) -> Reduced:
    """Reduce a system by modified Gram-Schmidt, always taking the longest remaining column. The caller scales the columns."""
    left, rest = [list(column) for column in columns], list(target)
    waiting = list(range(len(left)))
    rows: list[list[float]] = []
    found: list[float] = []
    while waiting:
        squared, place = max((dot(left[place], left[place]), -place) for place in waiting)
        place, length = -place, sqrt(squared)
        if length <= DEPENDENT:
            break
        unit = [value / length for value in left[place]]
        waiting.remove(place)
        row = [0.0] * len(left)
        row[place] = length
        for other in waiting:
            row[other] = dot(unit, left[other])
            left[other] = without(left[other], row[other], unit)
        found.append(dot(unit, rest))
        rest = without(rest, found[-1], unit)
        rows.append(row)
    made = [[row[place] for row in rows] for place in range(len(left))]
    return Reduced(made, found, dot(rest, rest))


def least_squares(columns: Sequence[Column], target: Column) -> list[float]:
    """Return the coefficients of the columns. If the columns depend on each other, return the shortest of the best solutions,
    measured with columns scaled to length 1."""
    norms = [sqrt(dot(column, column)) or 1.0 for column in columns]
    scaled = [[value / norm for value in column] for column, norm in zip(columns, norms, strict=True)]
    made = reduced(scaled, target)
    # T x = t has full row rank, so x is a combination of T's rows. We begin with the last: if T is square, this is substitution.
    units: list[list[float]] = []
    shares: list[float] = []
    for row, due in reversed(list(zip(zip(*made.columns, strict=True), made.target, strict=True))):
        own = list(row)
        for unit, share in zip(units, shares, strict=True):
            along = dot(unit, own)
            own = without(own, along, unit)
            due -= along * share
        length = sqrt(dot(own, own))
        units.append([value / length for value in own])
        shares.append(due / length)
    return [
        fsum([share * unit[place] for unit, share in zip(units, shares, strict=True)]) / norm
        for place, norm in enumerate(norms)
    ]


def nonnegative_fit(features: Floats, times: Floats, *, known: Floats | None = None) -> Floats:
    """Return the coefficients >= 0 with the least squared relative error. We try every set of active ones, so the result is
    exact; it suits a few coefficients. ``known`` is a part of each time that does not depend on them."""
    target = [1.0] * len(times) if known is None else (1 - known / times).tolist()
    scaled = (features / times[:, None]).T.tolist()
    norms = [sqrt(dot(column, column)) for column in scaled]
    active = [place for place, norm in enumerate(norms) if norm > 0]
    made = reduced([[value / norms[place] for value in scaled[place]] for place in active], target)
    best_loss, best = fsum([each * each for each in target]), np.zeros(features.shape[1])
    for size in range(1, len(active) + 1):
        for columns in combinations(range(len(active)), size):
            part = [made.columns[column] for column in columns]
            solution = least_squares(part, made.target)
            if min(solution) < 0:
                continue
            missed = [
                fsum([*(c * x for c, x in zip(solution, row, strict=True)), -due])
                for row, due in zip(zip(*part, strict=True), made.target, strict=True)
            ]
            loss = made.rest + fsum([miss * miss for miss in missed])
            if loss < best_loss:
                best_loss, best = loss, np.zeros(features.shape[1])
                for column, found in zip(columns, solution, strict=True):
                    best[active[column]] = found / norms[active[column]]
    return best
