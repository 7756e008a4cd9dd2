"""Splitting a GPU's memory into weights, activations, logits, guard band and KV pool (dLLM-Serve §4.2, §4.3).

The pool gets what the worst packed step leaves. With monolithic logits that step materialises one
row per query token; decomposed, never more than ``max_num_logits`` rows, and the difference
becomes KV rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from engines.dllm.config import EngineConfig, GenerationConfig, LogitRows, SparsityConfig
from engines.dllm.request import Request
from engines.dllm.sequence import cache_rows
from engines.errors import UserError
from engines.models.shape import ModelShape

GUARD_FRACTION = 0.05
"""Share of the whole memory for the CUDA context, fragmentation and kernel workspaces; the paper says "small"."""

REDUCTION_ROWS = 128
"""Rows of logits whose copies are alive together where a step reduces logits in parts."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The parts sum to ``total_bytes``; ``kv_bytes`` is negative when the worst step does not fit."""

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
    """Logit rows alive together in the worst packed step.

    That step holds nothing but Reuse blocks, whose every query row is a logit row, so the number
    of rows wanted is ``max_num_batched_tokens``.
    """
    if logit_rows not in get_args(LogitRows):
        raise UserError(f"logit_rows={logit_rows!r} is unknown: use one of {', '.join(get_args(LogitRows))}")
    worst = config.max_num_batched_tokens
    return min(config.max_num_logits, worst) if logit_rows == "decomposed" else worst


def divide_memory(
    shape: ModelShape,
    memory_bytes: int,
    config: EngineConfig,
    *,
    logit_rows: LogitRows,
    guard_fraction: float = GUARD_FRACTION,
    logits_dtype_bytes: int | None = None,
    logit_copies: int = 2,
    activations_measured_bytes: int | None = None,
) -> MemoryPlan:
    """The split, without asking whether it is of any use.

    ``logit_copies`` counts whole buffers of a chunk: 2 for logits and their stored softmax, 1 where
    maximum and normaliser are fused. ``activations_measured_bytes`` replaces the shape's formula by
    a measured peak, which must not include logits.
    """
    if memory_bytes < 1:
        raise UserError(f"memory_bytes={memory_bytes} must be at least 1")
    if not 0 <= guard_fraction < 1:
        raise UserError(f"guard_fraction={guard_fraction} must be in [0, 1)")
    if logit_copies < 1 or (logits_dtype_bytes is not None and logits_dtype_bytes < 1):
        raise UserError(f"logit_copies={logit_copies} and logits_dtype_bytes={logits_dtype_bytes} must be at least 1")
    if activations_measured_bytes is not None and activations_measured_bytes < 0:
        raise UserError(f"activations_measured_bytes={activations_measured_bytes} must not be negative")
    activations = activations_measured_bytes
    if activations is None:
        activations = config.max_num_batched_tokens * shape.activation_bytes_per_query_token
    logits = logit_rows_at_once(config, logit_rows) * shape.logits_bytes_per_row(logits_dtype_bytes) * logit_copies
    guard = round(memory_bytes * guard_fraction)
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


def plan_memory(
    shape: ModelShape,
    memory_bytes: int,
    config: EngineConfig,
    *,
    logit_rows: LogitRows,
    guard_fraction: float = GUARD_FRACTION,
    logits_dtype_bytes: int | None = None,
    logit_copies: int = 2,
    activations_measured_bytes: int | None = None,
    rows_of_one_request: int | None = None,
) -> MemoryPlan:
    """``divide_memory``, refused when the pool cannot hold one request.

    ``rows_of_one_request`` is the smallest pool worth starting with; None asks for the longest
    request a scheduler admits, with default generation settings.
    """
    plan = divide_memory(
        shape,
        memory_bytes,
        config,
        logit_rows=logit_rows,
        guard_fraction=guard_fraction,
        logits_dtype_bytes=logits_dtype_bytes,
        logit_copies=logit_copies,
        activations_measured_bytes=activations_measured_bytes,
    )
    needed = _rows_of_longest(config) if rows_of_one_request is None else rows_of_one_request
    if plan.kv_rows < needed:
        knobs = [f"max_num_batched_tokens={config.max_num_batched_tokens}"]
        if logit_rows == "decomposed":
            knobs.append(f"max_num_logits={config.max_num_logits}")
        if rows_of_one_request is None:
            knobs.append(f"max_model_len={config.max_model_len}")
        raise UserError(
            f"memory_bytes={memory_bytes}: budget too small for one request, which needs {needed} KV rows of "
            f"{shape.kv_bytes_per_token} bytes while {plan.kv_bytes} bytes are left for KV: "
            f"give more memory or lower {', '.join(knobs)}"
        )
    return plan


def _rows_of_longest(config: EngineConfig) -> int:
    """Rows of the longest request a scheduler admits: it must also fit one packed step."""
    longest = min(config.max_model_len, config.max_num_batched_tokens)
    generation = GenerationConfig(gen_length=min(GenerationConfig().gen_length, longest))
    return rows_for_request(longest, generation, config.sparsity)


def rows_for_request(total_len: int, generation: GenerationConfig, sparsity: SparsityConfig) -> int:
    """Pool rows a request holds for life: max over its blocks b of kept_rows(T - B_b) + B_b.

    The block's own K and V lie behind the retained rows; the last block may be shorter.
    """
    if total_len < generation.gen_length:
        raise UserError(
            f"total_len={total_len} is less than gen_length={generation.gen_length}: it includes the prompt"
        )
    request = Request(request_id=0, prompt_len=total_len - generation.gen_length, generation=generation)
    return cache_rows(request, sparsity)


def concurrency(plan: MemoryPlan, config: EngineConfig, total_len: int, generation: GenerationConfig) -> int:
    """Requests of this size that can be alive together: pool rows and ``max_num_seqs`` permitting."""
    return min(config.max_num_seqs, plan.kv_rows // rows_for_request(total_len, generation, config.sparsity))
