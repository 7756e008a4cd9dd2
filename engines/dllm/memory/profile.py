"""Measures what the worst packed step allocates, with ``max_num_logits`` enforced (dLLM-Serve §4.2).

The dummy step really runs the worst case: Refresh requests that fill the token budget to the last
token, building their caches, on the model and device that will serve.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.autograd.profiler import profile

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.decode.denoise import reduce_in_chunks
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.kernel_choice import KernelChoice
from engines.dllm.memory.budget import logit_rows_at_once
from engines.dllm.phase import DelayedCache
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.dllm.sequence import cache_rows
from engines.models.protocol import DiffusionModel
from engines.runtime.machine import without_collection


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """Bytes above what was allocated before (weights, KV pool, request state)."""

    activation_bytes: int
    """Peak of a whole worst-case step; its few logit rows are included."""
    logits_bytes: int
    """Peak of the output head on a full budget of rows: in chunks of max_num_logits, or all at once if monolithic."""


def measure_worst_step(model: DiffusionModel, config: EngineConfig, generation: GenerationConfig) -> MeasuredPeak:
    # No step is longer than all requests that may run together.
    longest = min(config.max_model_len, model.config.max_sequence_length)
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    config = replace(config, max_num_batched_tokens=num_tokens)
    executor_config = replace(
        config,
        max_num_seqs=config.max_num_batched_tokens,
        logit_rows="decomposed",
        scheduler="phase",
        tie_policy="stable",
    )
    requests = _filling_requests(model, executor_config, generation)
    rows = sum(cache_rows(request.total_len, request.generation, config.sparsity) for request in requests)
    # Delay 0 builds the cache in the very first step, so that one step holds all temporaries.
    engine = Engine(
        PhaseScheduler(executor_config, KvPool(rows), DelayedCache(delay=0)),
        packed_executor(model, executor_config, rows, num_slots=len(requests)),
    )
    for request in requests:
        engine.submit(request)
    device = next(model.parameters()).device
    activation_bytes = peak_bytes(engine.step, device)
    engine.close()

    hidden = torch.zeros(
        (config.max_num_batched_tokens, model.config.d_model), dtype=next(model.parameters()).dtype, device=device
    )
    reduction = KernelChoice(model, config).reduction  # the one that serves

    @torch.inference_mode()
    def head() -> None:
        reduce_in_chunks(model.logits, hidden, logit_rows_at_once(config, config.logit_rows), reduction, None)

    return MeasuredPeak(activation_bytes=activation_bytes, logits_bytes=peak_bytes(head, device))


def _filling_requests(model: DiffusionModel, config: EngineConfig, generation: GenerationConfig) -> list[Request]:
    """Requests of the longest length, and one of what is left, that together fill the budget."""
    longest = min(config.max_model_len, model.config.max_sequence_length, config.max_num_batched_tokens)
    full, rest = divmod(config.max_num_batched_tokens, longest)
    lengths = [longest] * full + ([rest] if rest > generation.gen_length else [])
    token = 0 if model.config.mask_token_id else 1
    return [
        Request(
            request_id=i,
            prompt_len=length - generation.gen_length,
            prompt_ids=(token,) * (length - generation.gen_length),
            generation=generation,
        )
        for i, length in enumerate(lengths)
    ]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes ``run`` held at once, beyond what was allocated when it began."""
    # Whether garbage is collected in the middle of a run hangs on what ran before: none is, and a peak is the same each time.
    with without_collection():
        return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    gc.collect()  # what earlier runs left would hide as many bytes when it is freed
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], object]) -> int:
    """From the allocator's own events: exact, kernels' internal temporaries included."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    # torch.profiler is this one with schedules and traces, and loads the compiler with them.
    with profile(profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak
