"""Continuous batching on dLLM-Serve's engine: packed steps, logits in chunks, and a cache pool sized by the
memory plan (dLLM-Serve §4.2-§4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

from baselines.method import Method
from engines.dllm.budget import REDUCTION_ROWS, MemoryPlan, logit_rows_at_once, plan_memory
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.kv_pool import KvPool
from engines.dllm.plan import Executor
from engines.dllm.schedulers import SCHEDULERS
from repro.settings import Settings
from repro.systems import backend
from repro.systems.base import (
    CONTINUOUS_KNOBS,
    Assembled,
    Resources,
    Serving,
    System,
    engine_config,
    rows_of_request,
)


class ContinuousBatching(Serving):
    knobs = CONTINUOUS_KNOBS

    def plan(self, system: System, settings: Settings, chosen: Method, lengths: Sequence[int]) -> Resources:
        chosen, longest = system.packed_method(settings, chosen), max(lengths)
        config = engine_config(settings, chosen)
        SCHEDULERS[config.scheduler].check(config, settings.generation)
        kv_rows, plan = _pool(system, settings, config, chosen, longest)
        facts = {
            "kv_rows": kv_rows,
            "activation_bytes": plan.activation_bytes,
            "logits_bytes": plan.logits_bytes,
            "kv_bytes": plan.kv_bytes,
            "memory_plan": asdict(plan),
        }
        return Resources(config=config, method=chosen, kv_rows=kv_rows, longest=longest, facts=facts)

    def assemble(self, system: System, settings: Settings, resources: Resources) -> Assembled:
        config, chosen, kv_rows, facts = resources.config, resources.method, resources.kv_rows, {}
        executor: Executor
        if settings.executor == "roofline":
            executor = system.packed_roofline(backend.roofline(settings), config, chosen)
        else:
            # The offline profiler (§4.2): the pool gets what the measured worst step leaves.
            key = backend.model_key(settings)
            activation_bytes, logits_bytes = _measured_peak(key, config, settings.generation)
            kv_rows, plan = _pool(
                system, settings, config, chosen, resources.longest, activations_measured_bytes=activation_bytes
            )
            facts = {
                "kv_rows": kv_rows,
                "measured_activation_bytes": activation_bytes,
                "measured_logits_bytes": logits_bytes,
                "memory_plan": asdict(plan),
            }
            executor = system.packed_torch(backend.load(*key), config, kv_rows, stop_ids=backend.stop_ids(settings))
        scheduler = SCHEDULERS[config.scheduler](config, KvPool(kv_rows), chosen.rule, exact_steps=chosen.exact_steps)
        return Assembled(engine=Engine(scheduler, executor), config=config, facts=facts)


def _pool(
    system: System,
    settings: Settings,
    config: EngineConfig,
    chosen: Method,
    longest: int,
    *,
    activations_measured_bytes: int | None = None,
) -> tuple[int, MemoryPlan]:
    """Rows of the pool, in the system's own size."""
    shape = backend.model_shape(settings)
    per_request = rows_of_request(longest, settings.generation, chosen)
    row_bytes = system.cache_row_bytes(shape)
    plan = plan_memory(
        shape, settings.memory_bytes, config,
        logit_rows=config.logit_rows,
        logit_copies=_logit_copies(config, chosen, shape.dtype_bytes),
        # Counted in KV rows; a method without a cache still needs its worst step to fit.
        rows_of_one_request=max(1, -(-per_request * row_bytes // shape.kv_bytes_per_token)),
        activations_measured_bytes=activations_measured_bytes,
    )  # fmt: skip
    # More rows than all slots together can use would only cost memory.
    return min(plan.kv_bytes // row_bytes, config.max_num_seqs * per_request), plan


def _logit_copies(config: EngineConfig, chosen: Method, dtype_bytes: int) -> int:
    """Whole buffers of a chunk of logits: itself, and what reducing it takes, rounded up."""
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced = min(rows, REDUCTION_ROWS) if chosen.decode.confidence_dtype == "float64" else rows
    return 1 - (-reduced * chosen.reduction_bytes_per_value(dtype_bytes) // (rows * dtype_bytes))


@lru_cache(maxsize=8)
def _measured_peak(key: backend.ModelKey, config: EngineConfig, generation: GenerationConfig) -> tuple[int, int]:
    """(activation bytes, logits bytes) of the worst step, measured once per sweep."""
    from engines.dllm.memory_profile import measure_worst_step

    peak = measure_worst_step(backend.load(*key), config, generation)
    return peak.activation_bytes, peak.logits_bytes
