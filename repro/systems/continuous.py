"""Continuous batching on dLLM-Serve's engine: packed steps, logits in chunks, and a cache pool sized by the
memory plan (dLLM-Serve §4.2-§4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from baselines.dllm.method import Method
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.bounded import BoundedExecutor
from engines.dllm.memory.budget import REDUCTION_ROWS, MemoryPlan, logit_rows_at_once, plan_memory
from engines.dllm.plan import Executor
from engines.dllm.scheduling.registry import SCHEDULERS
from repro.systems import backend
from repro.systems.base import CONTINUOUS_KNOBS, Assembled, Resources, Serving, System, engine_config, rows_of_request
from repro.systems.settings import Settings

if TYPE_CHECKING:
    from engines.dllm.memory.profile import MeasuredPeak
    from engines.models.protocol import DiffusionModel
    from engines.parallel.group import TensorParallel


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

    def assemble(
        self, system: System, settings: Settings, resources: Resources, group: TensorParallel | None = None
    ) -> Assembled:
        config, chosen, kv_rows = resources.config, resources.method, resources.kv_rows
        facts: dict[str, Any] = {}
        executor: Executor
        if settings.executor == "roofline":
            executor = system.packed_roofline(backend.roofline(settings), config, chosen)
        else:
            # The offline profiler (§4.2): the pool gets what the measured worst step leaves.
            backend.lift_memory_limit(settings)
            bound = backend.measured_roofline(settings)
            if group is None:
                model = backend.load(*backend.model_key(settings))
                peak = _measured_peak(backend.model_key(settings), config, settings.generation)
            else:
                model = backend.load_part(settings, group)
                peak = _worst_peak(model, config, settings, group)
            # What logits take beyond the plan's own count must not come out of the guard band.
            beyond = max(0, peak.logits_bytes - resources.facts["logits_bytes"])
            graphs = _graph_bytes(config, settings, peak)
            kv_rows, plan = _pool(
                system,
                settings,
                config,
                chosen,
                resources.longest,
                activations_measured_bytes=peak.activation_bytes + beyond + graphs,
            )
            facts = {
                "kv_rows": kv_rows,
                "measured_activation_bytes": peak.activation_bytes,
                "measured_logits_bytes": peak.logits_bytes,
                "memory_plan": asdict(plan),
                **backend.set_memory_limit(settings),
            }
            packed = system.packed_torch(
                model,
                config,
                kv_rows,
                stop_ids=backend.stop_ids(settings),
                block_length=settings.generation.block_length,
                profile_every=settings.profile_every,
            )
            facts |= packed.paths()
            executor = packed
            if bound is not None:
                executor = BoundedExecutor(executor, system.packed_roofline(bound, config, chosen))
                facts |= backend.bound_facts(bound)
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
        shape,
        settings.memory_bytes,
        config,
        logit_rows=config.logit_rows,
        logit_copies=_logit_copies(config, chosen, shape.dtype_bytes),
        # Counted in KV rows; a method without a cache still needs its worst step to fit.
        rows_of_one_request=max(1, -(-per_request * row_bytes // shape.kv_bytes_per_token)),
        activations_measured_bytes=activations_measured_bytes,
    )
    # More rows than all slots together can use would only cost memory.
    return min(plan.kv_bytes // row_bytes, config.max_num_seqs * per_request), plan


def _logit_copies(config: EngineConfig, chosen: Method, dtype_bytes: int) -> int:
    """Whole buffers of a chunk of logits: itself, and what reducing it takes, rounded up."""
    rows = logit_rows_at_once(config, config.logit_rows)
    reduced = min(rows, REDUCTION_ROWS) if chosen.decode.confidence_dtype == "float64" else rows
    return 1 - (-reduced * chosen.reduction_bytes_per_value(dtype_bytes) // (rows * dtype_bytes))


def _graph_bytes(config: EngineConfig, settings: Settings, peak: MeasuredPeak) -> int:
    """What captured graphs keep: the activations of the largest, whose memory the others share, and everyone's output."""
    if not (config.cuda_graphs and settings.device.startswith("cuda")):
        return 0
    from engines.dllm.executor.graphs import MAX_ROWS, ROWS

    rows = MAX_ROWS + sum(ROWS) // 2
    return peak.activation_bytes * min(rows, config.max_num_batched_tokens) // config.max_num_batched_tokens


@lru_cache(maxsize=8)
def _measured_peak(key: backend.ModelKey, config: EngineConfig, generation: GenerationConfig) -> MeasuredPeak:
    """Of the worst step, measured once per sweep."""
    from engines.dllm.memory.profile import measure_worst_step

    return measure_worst_step(backend.load(*key), config, generation)


def _worst_peak(model: DiffusionModel, config: EngineConfig, settings: Settings, group: TensorParallel) -> MeasuredPeak:
    """Of the rank that takes most: all must lay out the same pool."""
    from engines.dllm.memory.profile import measure_worst_step

    peaks = group.gathered(measure_worst_step(model, config, settings.generation))
    return max(peaks, key=lambda peak: (peak.activation_bytes, peak.logits_bytes))
