"""Memory dLLM-Cache holds, as a static batch and request by request."""

from __future__ import annotations

from dataclasses import dataclass

from baselines.dllm.static.search import StaticFootprint, base_bytes
from engines.dllm.config import GenerationConfig
from engines.dllm.memory.budget import REDUCTION_ROWS
from engines.dllm.scheduling.phase import Phase, Window
from engines.models.shape import ModelShape


def memory_bytes_per_token(shape: ModelShape) -> int:
    """K, V, attention output and MLP output of one token over all layers: twice a plain KV cache
    without grouped queries, 1 MiB for LLaDA-8B in bfloat16."""
    return shape.kv_bytes_per_token + shape.n_layers * 2 * shape.d_model * shape.dtype_bytes


def feature_cache_footprint(
    shape: ModelShape,
    memory_bytes: int,
    longest: int,
    generation: GenerationConfig,
    *,
    copied_bytes: int,
    is_upstream: bool = False,
) -> StaticFootprint:
    """Every one of ``longest`` rows has activations and cached features, the response rows have logits.

    ``copied_bytes`` per logit are alive while logits are reduced: of REDUCTION_ROWS at a time, of all at once upstream.

    Guidance caches the features of a second forward, and what it adds to each response row's logits.
    """
    guided = generation.cfg_scale > 0
    per_row = shape.activation_bytes_per_query_token + (1 + guided) * memory_bytes_per_token(shape)
    logits = generation.gen_length * (1 + guided) * shape.logits_bytes_per_row
    copies = copied_bytes * shape.vocab_rows
    return StaticFootprint(
        fixed_bytes=base_bytes(shape, memory_bytes) + (0 if is_upstream else REDUCTION_ROWS * copies),
        per_request_bytes=longest * per_row + logits + (generation.gen_length * copies if is_upstream else 0),
    )


@dataclass(frozen=True, kw_only=True)
class FeatureCaches:
    """dLLM-Cache under continuous batching. A request reserves a row of features for each of its tokens, and
    is charged all of them at every step: the first layer always recomputes every row."""

    caches: bool = True
    window: Window = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.FULL
