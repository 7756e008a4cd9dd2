"""Rows of packed steps as plain arrays; no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MIN_ROWS = 8
"""GEMMs with fewer rows take other kernels, whose rounding differs; a step is never narrower, so a request's numbers are
the same alone and in company (on CPU bit for bit)."""


def ranks(counts: Ints) -> Ints:
    """Place of every row within its own run, of runs of these lengths that lie one behind the other."""
    return np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
