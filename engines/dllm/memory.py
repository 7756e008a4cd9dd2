"""Splits a GPU's memory into weights, activations, logits, guard band and KV pool (dLLM-Serve §4.2, §4.3).

The pool gets what the worst packed step leaves. With monolithic logits, that step makes one row of logits per query token. Decomposed, it
makes at most ``max_num_logits`` rows at a time, and the difference becomes KV rows.
"""

from dataclasses import dataclass

from engines.dllm.config import EngineConfig, GenerationConfig, LogitRows, SparsityConfig, Window
from engines.errors import require
from engines.models.shape import ModelShape

GUARD_FRACTION = 0.05
"""Share of the whole memory for the CUDA context, fragmentation and kernel workspaces; the paper says "small"."""

REDUCTION_ROWS = 128
"""If a step reduces logits in parts, copies of this many rows exist at a time."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The parts of the memory, which sum to ``total_bytes``; ``kv_bytes`` is negative if the worst step does not fit."""

    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    logits_bytes: int
    guard_bytes: int
    kv_bytes: int
    kv_rows: int
    """Whole rows of the pool; one row is K and V of one token over all layers and heads."""

    @property
    def fits(self) -> bool:
        """Whether the worst step fits at all, with or without room for KV."""
        return self.kv_bytes >= 0


def logit_rows_at_once(config: EngineConfig, logit_rows: LogitRows) -> int:
    """Return how many logit rows exist at once in the worst packed step.

    That step holds only Reuse blocks, whose query rows are all logit rows, so it wants ``max_num_batched_tokens`` rows.
    """
    max_rows = config.max_num_batched_tokens
    return min(config.max_num_logits, max_rows) if logit_rows == "decomposed" else max_rows


def divide_memory(
    shape: ModelShape,
    memory_bytes: int,
    config: EngineConfig,
    *,
    logit_rows: LogitRows,
    logit_copies: int = 2,
    activations_measured_bytes: int | None = None,
) -> MemoryPlan:
    """Return the split, without checking whether it is of any use.

    ``logit_copies`` counts whole buffers of a chunk: 2 for logits and their stored softmax, 1 if maximum and normaliser are fused.
    ``activations_measured_bytes`` replaces the shape's formula by a measured peak, which must not include logits.
    """
    activations = activations_measured_bytes
    if activations is None:
        activations = config.max_num_batched_tokens * shape.activation_bytes_per_query_token
    logits = logit_rows_at_once(config, logit_rows) * shape.logits_bytes_per_row * logit_copies
    guard = round(memory_bytes * GUARD_FRACTION)
    kv = memory_bytes - shape.weight_bytes - activations - logits - guard
    return MemoryPlan(
        total_bytes=memory_bytes,
        weights_bytes=shape.weight_bytes,
        activation_bytes=activations,
        logits_bytes=logits,
        guard_bytes=guard,
        kv_bytes=kv,
        kv_rows=max(0, kv) // shape.kv_bytes_per_token,
    )


def concurrency(plan: MemoryPlan, config: EngineConfig, total_len: int, generation: GenerationConfig) -> int:
    """Return how many requests of this size can be alive together, within the pool's rows and ``max_num_seqs``."""
    return min(config.max_num_seqs, plan.kv_rows // cache_rows(total_len, generation, config.sparsity))


def cache_rows(total_len: int, generation: GenerationConfig, sparsity: SparsityConfig, window: Window = "block") -> int:
    """Return the KV rows that a request of ``total_len`` tokens, prompt and answer, holds for life. They are the max over its blocks b of
    kept_rows(T - B_b) + B_b (§4.5). A block's own K and V lie behind the retained rows; the last block may be shorter."""
    require(
        total_len >= generation.gen_length,
        f"total_len={total_len} is less than gen_length={generation.gen_length}: it includes the prompt",
    )
    if window == "suffix":
        lengths = set(range(generation.gen_length, 0, -generation.block_length))
    else:
        last_length = generation.gen_length - (generation.num_blocks - 1) * generation.block_length
        lengths = {last_length} if generation.num_blocks == 1 else {generation.block_length, last_length}
    return max(sparsity.kept_rows(total_len - length) + length for length in lengths)
