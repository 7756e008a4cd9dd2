"""Piecewise alpha-beta models: linear pieces and the knees between them, found by least squares."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

import numpy as np
import numpy.typing as npt

from engines.errors import require
from engines.least_squares import least_squares

Floats = npt.NDArray[np.float64]

_MAX_PIECES = 4
TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Piece i holds for x up to ``knees[i]`` (and beyond the knee before), the last one without end."""

    knees: tuple[float, ...]
    pieces: tuple[tuple[float, ...], ...]
    """Coefficients of the features."""
    mean_error: float
    """Mean and largest |fit - measured| / measured over the profile."""
    max_error: float

    def at(self, x: float) -> tuple[float, ...]:
        return self.pieces[bisect_left(self.knees, x)]


def fit_piecewise(
    x: Floats, features: Floats, y: Floats, *, max_pieces: int = _MAX_PIECES, tolerance: float = TOLERANCE
) -> Piecewise:
    """As few pieces as bring the mean relative error under ``tolerance``, at most ``max_pieces``.

    Among all places for that many knees, values of ``x``, the best are taken: those of least squared relative error.
    ``features`` has a row per measurement; a piece needs more measurements than features.
    """
    require(bool((y > 0).all()), "a profile holds a time that is not positive: measure again")
    values = np.unique(x)
    segments = _fit_segments(x, features / y[:, None], values)
    if (0, len(values)) not in segments:
        raise ValueError(f"{len(y)} measurements are too few to fit {features.shape[1]} coefficients")
    best = _piece(x, features, y, [0, len(values)], values, segments)
    for num_pieces in range(2, max_pieces + 1):
        bounds = _best_bounds(segments, len(values), num_pieces)
        if bounds is None or best.mean_error <= tolerance:
            break
        best = _piece(x, features, y, bounds, values, segments)
    return best


_Segments = dict[tuple[int, int], tuple[float, Floats]]
"""(first, end) of the distinct x -> loss and coefficients of one piece over them."""


def _fit_segments(x: Floats, scaled: Floats, values: Floats) -> _Segments:
    least = scaled.shape[1] + 1
    order = np.argsort(x, kind="stable")
    starts = np.append(np.searchsorted(x[order], values), len(x))
    found: _Segments = {}
    for first in range(len(values)):
        for end in range(first + 1, len(values) + 1):
            rows = scaled[order[starts[first] : starts[end]]]
            if len(rows) < least:
                continue
            columns = rows.T.tolist()
            solution = least_squares(columns, [1.0] * len(rows))
            # As a product of matrices would round them, no two machines would have them alike.
            missed = [fsum([*(c * x for c, x in zip(solution, row, strict=True)), -1.0]) for row in rows.tolist()]
            found[first, end] = fsum([miss * miss for miss in missed]), np.array(solution)
    return found


def _best_bounds(segments: _Segments, num_values: int, num_pieces: int) -> list[int] | None:
    """Where the pieces begin and end: dynamic programming over the last piece's first value."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, -1)}]
    for _ in range(num_pieces):
        reached: dict[int, tuple[float, int]] = {}
        for (first, end), (loss, _) in segments.items():
            before = best[-1].get(first)
            if before is not None and (end not in reached or before[0] + loss < reached[end][0]):
                reached[end] = before[0] + loss, first
        best.append(reached)
    if num_values not in best[-1]:
        return None
    bounds = [num_values]
    for reached in reversed(best[1:]):
        bounds.append(reached[bounds[-1]][1])
    return bounds[::-1]


def _piece(x: Floats, features: Floats, y: Floats, bounds: list[int], values: Floats, segments: _Segments) -> Piecewise:
    knees = tuple(float(values[end - 1]) for end in bounds[1:-1])
    pieces = [segments[first, end][1] for first, end in pairwise(bounds)]
    which = np.searchsorted(np.array(knees), x)
    error = np.abs((features * np.array(pieces)[which]).sum(axis=1) / y - 1)
    return Piecewise(
        knees=knees,
        pieces=tuple(tuple(piece.tolist()) for piece in pieces),
        mean_error=float(error.mean()),
        max_error=float(error.max()),
    )
