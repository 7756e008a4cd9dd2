"""The cache pool of continuous batching, sized by the memory plan (dLLM-Serve §4.2-§4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from engines.dllm.config import EngineConfig
from engines.dllm.memory.budget import REDUCTION_ROWS, MemoryPlan, logit_rows_at_once, plan_memory
from engines.dllm.method import Sampler
from engines.dllm.scheduling.registry import scheduler_of
from repro.systems.dllm.deployment import Deployment
from repro.systems.dllm.shapes import model_shape


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
    shape = model_shape(settings)
    per_request = deployment.sampler.rows_of_request(deployment.longest, settings.generation)
    row_bytes = method.cache_row_bytes(shape)
    plan = plan_memory(
        shape,
        settings.memory_limit,
        config,
        logit_rows=config.logit_rows,
        logit_copies=_logit_copies(config, deployment.sampler, shape.dtype_bytes),
        # Counted in KV rows; a method without a cache still needs its worst step to fit.
        rows_of_one_request=max(1, -(-per_request * row_bytes // shape.kv_bytes_per_token)),
        activations_measured_bytes=activations_measured_bytes,
    )
    # More rows than all slots together can use would only cost memory.
    return min(plan.kv_bytes // row_bytes, config.max_num_seqs * per_request), plan


def _logit_copies(config: EngineConfig, sampler: Sampler, dtype_bytes: int) -> int:
    """Whole buffers of a chunk of logits: itself, and what reducing it takes, rounded up."""
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced = min(rows, REDUCTION_ROWS) if sampler.decode.confidence_dtype == "float64" else rows
    return 1 - (-reduced * sampler.reduction_bytes_per_value(dtype_bytes) // (rows * dtype_bytes))
