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
    remaining, rest = [list(column) for column in columns], list(target)
    indices = list(range(len(remaining)))
    rows: list[list[float]] = []
    new_target: list[float] = []
    while indices:
        squared, index = max((dot(remaining[index], remaining[index]), -index) for index in indices)
        index, length = -index, sqrt(squared)
        if length <= DEPENDENT:
            break
        unit = [value / length for value in remaining[index]]
        indices.remove(index)
        row = [0.0] * len(remaining)
        row[index] = length
        for other in indices:
            row[other] = dot(unit, remaining[other])
            remaining[other] = without(remaining[other], row[other], unit)
        new_target.append(dot(unit, rest))
        rest = without(rest, new_target[-1], unit)
        rows.append(row)
    new_columns = [[row[index] for row in rows] for index in range(len(remaining))]
    return Reduced(new_columns, new_target, dot(rest, rest))


def least_squares(columns: Sequence[Column], target: Column) -> list[float]:
    """Return the coefficients of the columns. If the columns depend on each other, return the shortest of the best solutions,
    measured with columns scaled to length 1."""
    norms = [sqrt(dot(column, column)) or 1.0 for column in columns]
    scaled = [[value / norm for value in column] for column, norm in zip(columns, norms, strict=True)]
    system = reduced(scaled, target)
    # T x = t has full row rank, so x is a combination of T's rows. We begin with the last: if T is square, this is substitution.
    units: list[list[float]] = []
    shares: list[float] = []
    for row, due in reversed(list(zip(zip(*system.columns, strict=True), system.target, strict=True))):
        vector = list(row)
        for unit, share in zip(units, shares, strict=True):
            overlap = dot(unit, vector)
            vector = without(vector, overlap, unit)
            due -= overlap * share
        length = sqrt(dot(vector, vector))
        units.append([value / length for value in vector])
        shares.append(due / length)
    return [
        fsum([share * unit[index] for unit, share in zip(units, shares, strict=True)]) / norm
        for index, norm in enumerate(norms)
    ]


def nonnegative_fit(features: Floats, times: Floats, *, known: Floats | None = None) -> Floats:
    """Return the coefficients >= 0 with the least squared relative error. We try every set of active ones, so the result is
    exact; it suits a few coefficients. ``known`` is a part of each time that does not depend on them."""
    target = [1.0] * len(times) if known is None else (1 - known / times).tolist()
    scaled = (features / times[:, None]).T.tolist()
    norms = [sqrt(dot(column, column)) for column in scaled]
    active = [index for index, norm in enumerate(norms) if norm > 0]
    system = reduced([[value / norms[index] for value in scaled[index]] for index in active], target)
    best_loss, best = fsum([value * value for value in target]), np.zeros(features.shape[1])
    for size in range(1, len(active) + 1):
        for columns in combinations(range(len(active)), size):
            chosen = [system.columns[column] for column in columns]
            solution = least_squares(chosen, system.target)
            if min(solution) < 0:
                continue
            residuals = [
                fsum([*(c * x for c, x in zip(solution, row, strict=True)), -due])
                for row, due in zip(zip(*chosen, strict=True), system.target, strict=True)
            ]
            loss = system.rest + fsum([residual * residual for residual in residuals])
            if loss < best_loss:
                best_loss, best = loss, np.zeros(features.shape[1])
                for column, coefficient in zip(columns, solution, strict=True):
                    best[active[column]] = coefficient / norms[active[column]]
    return best
