"""What is done to measured times before anything is composed of them: spikes go, and nothing streams faster than memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SPIKE = 1.2
"""A time is a spike where it is so many times longer than both of its neighbours."""
LARGE_WEIGHTS = 8
"""Products with weights of so many times the L2 cache are what memory's speed is read from."""
FEW_ROWS = 8
"""Up to so many rows, products of large weights are bound by memory on every card, and move little else."""


def spikes(times: Floats) -> npt.NDArray[np.bool_]:
    """Where ``times``, [..., points] along a growing size, are ``SPIKE`` times as long as at both neighbours.

    Steps stay: behind a full tile (257 rows against 256) the next size is as slow. So do dips, which full tiles are; both ends; and
    two long times side by side.
    """
    found = np.zeros(times.shape, dtype=np.bool_)
    before, at, after = times[..., :-2], times[..., 1:-1], times[..., 2:]
    found[..., 1:-1] = at > SPIKE * np.maximum(before, after)
    return found


def filled(sizes: Floats, times: Floats, gone: npt.NDArray[np.bool_]) -> Floats:
    """``times``, [curves, points], with those that are ``gone`` put on the line between what stays beside them."""
    found = times.copy()
    for curve in np.flatnonzero(gone.any(axis=-1)):
        keep = ~gone[curve] & ~np.isnan(times[curve])
        found[curve, gone[curve]] = np.interp(sizes[gone[curve]], sizes[keep], times[curve, keep])
    return found


_REACHED = 95
"""Percentile of what large products move a second: a single time may still be too short."""


class Streamed(NamedTuple):
    times: Floats
    """[products, rows], none below what it moves takes from memory."""
    bandwidth: float
    """Bytes per second that the largest products reach."""
    raised: npt.NDArray[np.bool_]
    impossible: npt.NDArray[np.bool_]
    """What was faster than the datasheet's memory allows: the weights had stayed in the L2 cache between repetitions."""


def streamed(
    times: Floats, num_bytes: Floats, rows: Floats, weights: Floats, *, bandwidth: float, cache: float
) -> Streamed:
    """Raise what is faster than weights can be read from memory at the rate that large products reach.

    ``times`` and ``num_bytes`` are [products, rows], ``weights`` bytes by product, ``bandwidth`` the datasheet's in bytes per
    second and ``cache`` the bytes of the L2. A product that is timed over and over finds its weights in the cache; in a
    forward, other layers have been there since.
    """
    large = times[weights >= LARGE_WEIGHTS * cache][:, rows <= FEW_ROWS]
    moved = num_bytes[weights >= LARGE_WEIGHTS * cache][:, rows <= FEW_ROWS]
    reached = min(bandwidth, float(np.nanpercentile(moved / large, _REACHED)))
    floor = num_bytes / reached
    raised = times < floor
    return Streamed(np.where(raised, floor, times), reached, raised, times < num_bytes / bandwidth)
