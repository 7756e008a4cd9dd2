"""The performance model: all that AMPD's policies know about speed (AMPD §3, profiler).

It has three functions, each a piecewise alpha-beta model fitted to a profile: T_pre(l_hist, l_incr; theta),
T_dec(b; theta) and T_kv(l_ctx; theta_src -> theta_dst). We find the linear pieces, and the knees between them,
by least squares.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import fsum
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.cluster.hardware import GPUS_PER_SERVER, Hardware
from engines.errors import require
from engines.least_squares import least_squares
from engines.policies.views import Chunk

Floats = npt.NDArray[np.float64]

_MAX_PIECES = 4
TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """A piecewise function. Piece i holds for x above ``knees[i - 1]`` and up to ``knees[i]``; the first and last piece are open."""

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
    """Fit as few pieces as bring the mean relative error to ``tolerance``, at most ``max_pieces``.

    Knees are values of ``x``. We take the knees of the least squared relative error. ``features`` has a row per
    measurement; a piece needs more measurements than features.
    """
    require(bool((y > 0).all()), "a profile holds a time that is not positive: measure again")
    values = np.unique(x)
    segments = _Segments(x, features / y[:, None], values)
    fit: Piecewise | None = None
    for num_pieces in range(1, max_pieces + 1):
        if fit is not None and fit.mean_error <= tolerance:
            break
        bounds = _best_bounds(segments, len(values), num_pieces)
        if bounds is None:
            break
        knees = values[np.array(bounds[1:-1], dtype=np.int64) - 1]
        pieces = np.array([segments.fit(first, end).coefficients for first, end in pairwise(bounds)])
        error = np.abs((features * pieces[np.searchsorted(knees, x)]).sum(axis=1) / y - 1)
        fit = Piecewise(
            knees=tuple(knees.tolist()),
            pieces=tuple(map(tuple, pieces.tolist())),
            mean_error=float(error.mean()),
            max_error=float(error.max()),
        )
    if fit is None:
        raise ValueError(f"{len(y)} measurements are too few to fit {features.shape[1]} coefficients")
    return fit


class _Piece(NamedTuple):
    loss: float
    coefficients: list[float]


class _Segments:
    """Fits a piece to neighbouring distinct x, on demand. Most profiles need one or two pieces, and then few of all possible
    pieces are fitted."""

    def __init__(self, x: Floats, scaled: Floats, values: Floats) -> None:
        order = np.argsort(x, kind="stable")
        self._rows = scaled[order].tolist()
        self._starts = [*np.searchsorted(x[order], values).tolist(), len(x)]
        self._least = scaled.shape[1] + 1
        self._fitted: dict[tuple[int, int], _Piece] = {}

    def is_long_enough(self, first: int, end: int) -> bool:
        return self._starts[end] - self._starts[first] >= self._least

    def fit(self, first: int, end: int) -> _Piece:
        piece = self._fitted.get((first, end))
        if piece is None:
            rows = self._rows[self._starts[first] : self._starts[end]]
            solution = least_squares(list(zip(*rows, strict=True)), [1.0] * len(rows))
            # A product of matrices would round these differently on each machine.
            missed = [fsum([*map(mul, solution, row), -1.0]) for row in rows]
            piece = self._fitted[first, end] = _Piece(fsum([miss * miss for miss in missed]), solution)
        return piece


def _best_bounds(segments: _Segments, num_values: int, num_pieces: int) -> list[int] | None:
    """Return where the pieces begin and end, by dynamic programming over the last piece's first value; None if none fit."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, -1)}]
    for num_left in reversed(range(num_pieces)):
        reached: dict[int, tuple[float, int]] = {}
        for first, (loss_before, _) in sorted(best[-1].items()):
            # The last piece ends where the values do.
            for end in range(first + 1 if num_left else num_values, num_values + 1):
                if first < end and segments.is_long_enough(first, end):
                    loss = loss_before + segments.fit(first, end).loss
                    if end not in reached or loss < reached[end][0]:
                        reached[end] = loss, first
        best.append(reached)
    if num_values not in best[-1]:
        return None
    bounds = [num_values]
    for reached in reversed(best[1:]):
        bounds.append(reached[bounds[-1]][1])
    return bounds[::-1]


TOKENS = tuple(sorted({round(2 ** (power / 2)) for power in range(27)}))
"""l_incr of the profile: 1 to 8192, two per octave."""
HISTORIES = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = tuple(sorted({round(2 ** (power / 2)) for power in range(17)}))
"""b of the profile: 1 to 256."""


@dataclass(frozen=True, kw_only=True)
class PerformanceModel:
    prefill: dict[int, Piecewise]
    """By degree. Features 1, l_incr, l_incr (l_hist + l_incr / 2), l_hist: alpha-beta with attention's share."""
    decode: dict[int, Piecewise]
    """By degree. Features 1, b; at the profile's context."""
    transfer: dict[tuple[int, int], Piecewise]
    """By source and target degree. Features 1, l_ctx."""
    decode_context: int

    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        """T_pre."""
        a, b, c, d = self.prefill[degree].at(tokens)
        return a + b * tokens + c * tokens * (history + 0.5 * tokens) + d * history

    def decode_s(self, batch: float, degree: int) -> float:
        """T_dec."""
        a, b = self.decode[degree].at(batch)
        return a + b * batch

    def transfer_s(self, tokens: int, source_degree: int, target_degree: int) -> float:
        """T_kv; 0 if there is nothing to send."""
        if tokens <= 0:
            return 0.0
        a, b = self.transfer[source_degree, target_degree].at(tokens)
        return a + b * tokens

    @property
    def max_error(self) -> float:
        """Largest relative error of any fit on its own profile."""
        fits = (*self.prefill.values(), *self.decode.values(), *self.transfer.values())
        return max(fit.max_error for fit in fits)


def profile_hardware(
    hardware: Hardware, *, num_gpus: int, degrees: Sequence[int] | None = None, decode_context: int = 1024
) -> PerformanceModel:
    """Return the model fitted to times of the simulated hardware. Prefills are timed on a decode worker: besides transfers, the model
    knows no overhead of remote ones (eqs. 1, 2). Theta names no server, so all transfers take the slowest link of ``num_gpus`` GPUs.
    Each sequence of a decode step has ``decode_context`` tokens."""
    links = hardware.links
    link = links.intra if num_gpus <= GPUS_PER_SERVER else links.inter
    degrees = hardware.degrees() if degrees is None else degrees
    require(bool(degrees), "degrees=(): profile at least one tensor-parallel degree")
    grid = list(product(HISTORIES, TOKENS))
    attention = tuple([(1, incr, incr * (history + 0.5 * incr), history) for history, incr in grid])
    sequences, transfers = tuple([(1, batch) for batch in BATCHES]), tuple([(1, length) for length in TOKENS])
    prefill, decode = {}, {}
    for degree in degrees:
        cost = hardware.cost(degree)
        prefill[degree] = _fit(attention, tuple([cost.step_s((Chunk(*point),), 0, 0) for point in grid]))
        steps_s = [cost.decode_line(batch).at(batch * decode_context) for batch in BATCHES]
        decode[degree] = _fit(sequences, tuple(steps_s))
    transfer = {
        pair: _fit(transfers, tuple([links.transfer_s(length, link, *pair) for length in TOKENS]))
        for pair in product(degrees, degrees)
    }
    return PerformanceModel(prefill=prefill, decode=decode, transfer=transfer, decode_context=decode_context)


@lru_cache(maxsize=1024)
def _fit(features: tuple[tuple[float, ...], ...], times_s: tuple[float, ...]) -> Piecewise:
    """Fit pieces over the second feature. Cached: models for other values of ``decode_context`` share most fits, and a fit takes
    longer than its profile."""
    columns = np.array(features, dtype=np.float64)
    return fit_piecewise(columns[:, 1], columns, np.array(times_s))
