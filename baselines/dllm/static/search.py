"""The largest static batch that fits in memory, found by running batches (the paper's "preliminary profiling", §6.1).

Sizes are doubled, then approached in halving strides. A size is run only if the last two peaks, continued
in a straight line, leave room for it. A padded batch takes the same memory for each member, so the line is
nearly exact; what it misses is for the guard band, which the limit leaves free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.dllm.memory import GUARD_FRACTION
from engines.errors import UserError
from engines.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class StaticFootprint:
    """A padded batch in its largest step: a fixed part and one per member, all members at the longest length."""

    fixed_bytes: int
    per_request_bytes: int

    def peak_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.per_request_bytes


def base_bytes(shape: ModelShape, memory_bytes: int) -> int:
    """Weights and guard band: held without any request."""
    return shape.weight_bytes + round(memory_bytes * GUARD_FRACTION)


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    size: int
    peak_bytes: int
    """Peak of the step that takes most, everything included."""
    probes: tuple[tuple[int, int], ...]
    """(size, peak) of every batch that was run, in order."""


def largest_batch(peak_bytes: Callable[[int], int], limit_bytes: int, *, fixed_bytes: int = 0, most: int) -> FoundBatch:
    """The largest size of 1 to ``most`` whose ``peak_bytes`` is within the limit; refused if one member is not.

    ``fixed_bytes`` is what is held without any member: the line's first point. Only a batch of one is run on
    no more evidence than that.
    """
    probes: list[tuple[int, int]] = []
    fitting = [(0, fixed_bytes)]
    stride, is_doubling, ceiling = 1, True, most
    while stride:
        size = fitting[-1][0] + stride
        is_safe = len(fitting) == 1 or _continued(fitting, size) <= limit_bytes
        if size <= ceiling and is_safe:
            peak = peak_bytes(size)
            probes.append((size, peak))
            if peak <= limit_bytes:
                fitting.append((size, peak))
                # While approaching, the same stride again: the line may have become flatter.
                stride = size if is_doubling else stride
                continue
            if size == 1:
                raise UserError(
                    f"memory_bytes={limit_bytes}: budget too small for one request in a static batch, which takes "
                    f"{peak} bytes: give more memory or shorten the requests"
                )
            ceiling = size - 1
        stride, is_doubling = stride // 2, False
    size, peak = fitting[-1]
    return FoundBatch(size=size, peak_bytes=peak, probes=tuple(probes))


def _continued(points: list[tuple[int, int]], size: int) -> int:
    """The straight line through the last two (size, peak) points, at ``size``; rounded up."""
    (n0, peak0), (n1, peak1) = points[-2:]
    return peak1 - (peak0 - peak1) * (size - n1) // (n1 - n0)
