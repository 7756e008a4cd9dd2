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


def static_footprint(
    shape: ModelShape,
    memory_bytes: int,
    longest: int,
    *,
    kv_rows: int,
    logit_bytes_per_value: int,
    reduction_bytes: int = 0,
) -> StaticFootprint:
    """Every one of ``longest`` rows has activations and logits; ``kv_rows`` is what one request holds in its
    cache. ``logit_bytes_per_value`` includes the copies that are made of all logits at once;
    ``reduction_bytes`` are temporaries that do not grow with the batch.
    """
    per_row = shape.activation_bytes_per_query_token + logit_bytes_per_value * shape.vocab_rows
    return StaticFootprint(
        fixed_bytes=base_bytes(shape, memory_bytes) + reduction_bytes,
        per_request_bytes=longest * per_row + kv_rows * shape.kv_bytes_per_token,
    )


def base_bytes(shape: ModelShape, memory_bytes: int) -> int:
    """Weights and guard band: held without any request."""
    return shape.weight_bytes + round(memory_bytes * GUARD_FRACTION)
