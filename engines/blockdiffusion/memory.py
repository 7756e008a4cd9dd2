"""How many tokens of K/V a card holds beside a model's weights and the worst step, from shapes alone."""

from __future__ import annotations

from engines.dllm.memory.budget import GUARD_FRACTION
from engines.errors import require
from engines.models.shape import ModelShape

_LOGIT_BYTES = 10
"""A logit of a chunk takes these: itself, and two copies in float32 while it is reduced."""
_EXPERT_COPIES = 3
"""Rows as experts take them, what they make of them, and that sorted back, all as many as experts are chosen."""


def pool_tokens(shape: ModelShape, memory_bytes: int, *, rows: int, logit_rows: int) -> int:
    """``rows`` are those of a step. A layer's keys and values are copied out of the pool while it attends."""
    step = rows * shape.activation_bytes_per_query_token
    if shape.num_experts > 1:
        step += rows * _EXPERT_COPIES * shape.experts_per_token * shape.d_model * shape.dtype_bytes
    logits = logit_rows * shape.vocab_rows * _LOGIT_BYTES
    left = memory_bytes - shape.weight_bytes - step - logits - round(GUARD_FRACTION * memory_bytes)
    found = left // (shape.kv_bytes_per_token + shape.kv_bytes_per_token // shape.n_layers)
    require(
        found > 0,
        f"memory_limit={memory_bytes}: {shape.name} takes {shape.weight_bytes} bytes of weights and {step + logits} of a step of "
        f"max_num_batched_tokens={rows}: give more memory or a smaller step",
    )
    return found
