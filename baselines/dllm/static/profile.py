"""Measures what a static batch holds in its worst steps, on the model and device that will serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from traceback import clear_frames

from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import peak_bytes
from engines.dllm.method import Sampler
from engines.dllm.phase import DelayedCache
from engines.dllm.plan import Executor, ExecutorError, Request
from engines.dllm.scheduling import KvPool
from engines.errors import is_out_of_memory
from engines.models.protocol import DiffusionModel


def static_batch_bytes(
    model: DiffusionModel,
    config: EngineConfig,
    sampler: Sampler,
    generation: GenerationConfig,
    *,
    longest: int,
    rows_per_request: int,
    batch_size: int,
    make_executor: Callable[[int], Executor],
) -> int:
    """The most bytes that ``batch_size`` requests of ``longest`` tokens hold at once, model weights apart:
    cache slabs, token ids, and the temporaries of a Refresh and of the step after it.

    ``make_executor`` is given the rows of the cache. A method that caches builds its cache in the very
    first step here, so that one step holds all temporaries. Raises ExecutorError where the device has not that much.
    """
    rule = replace(sampler.rule, delay=0) if isinstance(sampler.rule, DelayedCache) else sampler.rule
    prompt_len = longest - generation.gen_length
    token = 0 if model.config.mask_token_id else 1
    kv_rows = batch_size * rows_per_request

    def run() -> None:
        scheduler = StaticBatchScheduler(
            config, KvPool(kv_rows), rule, batch_size=batch_size, exact_steps=sampler.exact_steps
        )
        engine = Engine(scheduler, _made(make_executor, kv_rows))
        for i in range(batch_size):
            engine.submit(
                Request(request_id=i, prompt_len=prompt_len, prompt_ids=(token,) * prompt_len, generation=generation)
            )
        try:
            for _ in range(2):
                record = engine.step()
                if record is not None and record.done.failed:
                    raise ExecutorError(record.done.failed[0][1])
        finally:
            engine.close()

    return peak_bytes(run, next(model.parameters()).device)


def _made(make_executor: Callable[[int], Executor], kv_rows: int) -> Executor:
    """Its slabs may be what there is no memory for."""
    try:
        return make_executor(kv_rows)
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        # The frames that failed hold what was allocated.
        clear_frames(error.__traceback__)
        raise ExecutorError(f"out of memory for a cache of {kv_rows} rows") from error
