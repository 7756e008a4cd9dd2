"""The largest static batch a memory holds (the paper's "preliminary profiling", §6.1)."""

from __future__ import annotations

from dataclasses import dataclass

from engines.dllm.budget import GUARD_FRACTION
from engines.errors import UserError
from engines.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class StaticFootprint:
    """Bytes of a padded batch: a fixed part and one per member, all members at the longest length."""

    fixed_bytes: int
    per_request_bytes: int

    def batch_size(self, memory_bytes: int) -> int:
        return max(0, memory_bytes - self.fixed_bytes) // self.per_request_bytes


def static_footprint(
    shape: ModelShape, memory_bytes: int, longest: int, *, kv_rows: int, logit_bytes_per_value: int
) -> StaticFootprint:
    """Every one of ``longest`` rows has activations and logits, with whatever softmax copies the method
    makes of them; ``kv_rows`` is what one request holds in its cache."""
    per_row = shape.activation_bytes_per_query_token + logit_bytes_per_value * shape.vocab_rows
    return StaticFootprint(
        fixed_bytes=shape.weight_bytes + round(memory_bytes * GUARD_FRACTION),
        per_request_bytes=longest * per_row + kv_rows * shape.kv_bytes_per_token,
    )


def largest_batch(footprint: StaticFootprint, memory_bytes: int, longest: int) -> int:
    """The search by arithmetic; refused when not even one request fits."""
    size = footprint.batch_size(memory_bytes)
    if size == 0:
        raise UserError(
            f"memory_bytes={memory_bytes}: budget too small for one request of {longest} tokens in a static batch: "
            f"give more memory or shorten the requests"
        )
    return size
