"""Bytes that a static batch holds, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from engines.dllm.memory.budget import GUARD_FRACTION
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
