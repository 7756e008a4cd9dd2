"""Shapes to capture: the grid of LAPS §3.1, a ladder of packed sizes, and what a memory budget leaves of them."""

from __future__ import annotations

from collections.abc import Iterable

from engines.errors import require
from engines.policies.step import Bucket, Rung

LENGTHS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID: tuple[Bucket, ...] = tuple(Bucket(length, batch) for length in LENGTHS for batch in BATCHES)
"""All 42 shapes."""

LADDER: tuple[Rung, ...] = tuple(
    Rung(tokens) for tokens in (*range(16, 257, 16), *range(320, 1025, 64), *range(1152, 2049, 128))
)
"""Packed sizes, finer where a padded token costs a larger share."""

GRAPH_MB = {"Qwen2.5-7B": 228, "Qwen2.5-14B": 240, "Qwen2.5-32B": 277}
"""Memory of one captured prefill graph as the paper prints it (LAPS §4.2)."""


def graph_bytes(model: str, num_layers: int) -> int:
    """Memory of one graph: the paper's number, else a line through its 7B and 32B."""
    megabytes = GRAPH_MB.get(model)
    return round((190 + 1.36 * num_layers) * 1e6) if megabytes is None else megabytes * 10**6


def captured_buckets(
    budget_bytes: int | None, bytes_per_graph: int, shapes: Iterable[Bucket] = GRID
) -> tuple[Bucket, ...]:
    """The shapes a budget holds (None: all), those of fewest tokens first: only they are bound by launches.

    Of equal size the deeper one is kept: it also serves shorter batches of its length.
    """
    require(bytes_per_graph > 0, f"bytes_per_graph={bytes_per_graph} must be above 0")
    ordered = sorted(shapes, key=lambda shape: (shape.tokens, -shape.batch))
    if budget_bytes is None:
        return tuple(ordered)
    require(budget_bytes >= 0, f"budget_bytes={budget_bytes} must not be negative")
    return tuple(ordered[: budget_bytes // bytes_per_graph])
