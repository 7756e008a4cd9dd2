"""Bytes dLLM-Cache holds, for the largest static batch of a memory."""

from __future__ import annotations

from baselines.static_memory import StaticFootprint
from engines.dllm.budget import GUARD_FRACTION
from engines.dllm.config import GenerationConfig
from engines.models.shape import ModelShape

LOGIT_COPIES = 2
"""Logits with their exponentials, then with their softmax."""


def memory_bytes_per_token(shape: ModelShape) -> int:
    """K, V, attention output and MLP output of one token over all layers: twice a plain KV cache
    without grouped queries, 1 MiB for LLaDA-8B in bfloat16."""
    return shape.kv_bytes_per_token + shape.n_layers * 2 * shape.d_model * shape.dtype_bytes


def feature_cache_footprint(
    shape: ModelShape, memory_bytes: int, longest: int, generation: GenerationConfig
) -> StaticFootprint:
    """Every one of ``longest`` rows has activations and cached features, the response rows have logits."""
    per_row = shape.activation_bytes_per_query_token + memory_bytes_per_token(shape)
    logits = generation.gen_length * LOGIT_COPIES * shape.logits_bytes_per_row()
    return StaticFootprint(
        fixed_bytes=shape.weight_bytes + round(memory_bytes * GUARD_FRACTION),
        per_request_bytes=longest * per_row + logits,
    )
