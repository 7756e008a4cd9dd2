"""Independent random streams from one workload seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

import numpy as np


def derive_seed(seed: int, *labels: str | int) -> int:
    """Makes a 32-bit seed for the named stream; it is the same on every machine and library version.

    Streams are named rather than numbered in order of use, so that a new stream (or a longer
    workload) never shifts the draws of the others.
    """
    text = "/".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def shuffled(num_rows: int, seed: int, *labels: str, step: int = 1) -> Iterator[int]:
    """Yields rows in random order, and all of them again in another order, without end; laps have streams ``step``
    apart."""
    for lap in count():
        rng = np.random.default_rng(derive_seed(seed, *labels, lap * step))
        yield from rng.permutation(num_rows).tolist()
