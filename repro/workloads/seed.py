"""Independent random streams from one workload seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *labels: str | int) -> int:
    """A 32-bit seed for the named stream; the same on every machine and library version.

    Streams are named rather than numbered in order of use, so that a new stream (or a longer
    workload) never shifts the draws of the others.
    """
    text = "/".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
