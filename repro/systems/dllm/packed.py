"""The cache pool of continuous batching, sized by the memory plan (dLLM-Serve §4.2-§4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from engines.dllm.memory.budget import REDUCTION_ROWS, MemoryPlan, divide_memory, logit_rows_at_once
from engines.dllm.scheduling.registry import scheduler_of
from engines.errors import UserError
from repro.systems.dllm.deployment import Deployment


def planned(deployment: Deployment, lengths: Sequence[int]) -> Deployment:
    """The deployment with its pool, by arithmetic; refuses settings that cannot be served."""
    sampler = deployment.method.packed(deployment.sampler, is_simulated=deployment.settings.is_simulated)
    deployment = replace(deployment, sampler=sampler, longest=max(lengths))
    scheduler_of(deployment.config.scheduler).check(deployment.config, deployment.settings.generation)
    kv_rows, plan = pool(deployment)
    facts = {
        "kv_rows": kv_rows,
        "activation_bytes": plan.activation_bytes,
        "logits_bytes": plan.logits_bytes,
        "kv_bytes": plan.kv_bytes,
        "memory_plan": asdict(plan),
    }
    return replace(deployment, kv_rows=kv_rows, facts=facts)


def pool(deployment: Deployment, *, activations_measured_bytes: int | None = None) -> tuple[int, MemoryPlan]:
    """Rows of the pool, in the method's own size, and the split that leaves them."""
    method, settings, config = deployment.method, deployment.settings, deployment.config
    shape = settings.shape
    per_request = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    row_bytes = method.cache_row_bytes(shape)
    # Whole buffers of a chunk of logits: itself, and what reducing it takes, rounded up.
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced = min(rows, REDUCTION_ROWS) if deployment.sampler.decode.confidence_dtype == "float64" else rows
    copied = reduced * deployment.sampler.reduction_bytes_per_value(shape.dtype_bytes)
    plan = divide_memory(
        shape,
        settings.memory_limit,
        config,
        logit_rows=config.logit_rows,
        logit_copies=1 - (-copied // (rows * shape.dtype_bytes)),
        activations_measured_bytes=activations_measured_bytes,
    )
    # Counted in KV rows; a method without a cache still needs its worst step to fit.
    needed = max(1, -(-per_request * row_bytes // shape.kv_bytes_per_token))
    if plan.kv_rows < needed:
        knobs = ["max_num_batched_tokens", *(["max_num_logits"] if config.logit_rows == "decomposed" else [])]
        raise UserError(
            f"memory_bytes={settings.memory_limit}: budget too small for one request, which needs {needed} KV rows of "
            f"{shape.kv_bytes_per_token} bytes while {plan.kv_bytes} bytes are left for KV: give more memory or lower "
            f"{', '.join(f'{name}={getattr(config, name)}' for name in knobs)}"
        )
    # More rows than all slots together can use would only cost memory.
    return min(plan.kv_bytes // row_bytes, config.max_num_seqs * per_request), plan
