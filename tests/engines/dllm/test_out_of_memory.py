"""A step that runs out of memory costs its requests, not the engine."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine_runs import free_runs
from support.tiny_models import GQA, network, request_on

from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduced
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.step import Head
from engines.dllm.plan import Request
from engines.dllm.scheduling import SCHEDULERS, KvPool
from repro.runs.step_driver import WallClock
from repro.systems.dllm.record import drive_engine

CONFIG = EngineConfig(max_num_batched_tokens=120, max_num_logits=16, max_num_seqs=4, max_model_len=60)
KV_ROWS = 200
MESSAGES = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
}


class StarvedHead:
    """Fails in the steps named."""

    def __init__(self, head: Head, fails_at: frozenset[int], error: RuntimeError) -> None:
        self._head, self._fails_at, self._error = head, fails_at, error
        self.logit_rows = head.logit_rows
        self._num_steps = 0

    def __call__(self, *inputs: Any) -> Reduced:
        self._num_steps += 1
        if self._num_steps - 1 in self._fails_at:
            raise self._error
        return self._head(*inputs)


def requests(count: int) -> list[Request]:
    generation = GenerationConfig(gen_length=16, block_length=8, steps=16)
    return [request_on(GQA, i, 20 + i, generation) for i in range(count)]


def engine_of(
    scheduler: str, *, fails_at: frozenset[int] = frozenset(), error: RuntimeError = MESSAGES["cuda"]
) -> Engine:
    config = replace(CONFIG, scheduler=scheduler)
    executor = packed_executor(network(GQA), config, KV_ROWS)
    executor.head = StarvedHead(executor.head, fails_at, error)
    return Engine(SCHEDULERS[scheduler](config, KvPool(KV_ROWS), DelayedCache(delay=1)), executor)


@pytest.mark.parametrize("error", MESSAGES)
@pytest.mark.parametrize("scheduler", ["phase", "request", "lookahead"])
def test_the_engine_lives_on(scheduler, error):
    wanted = requests(7)
    calm = engine_of(scheduler)
    for request in wanted:
        calm.submit(request)
    calm.run()
    expected = {request.request_id: calm.take_output(request.request_id) for request in wanted}

    # The first step of all, and one in the middle of others' generations.
    engine = engine_of(scheduler, fails_at=frozenset({0, 9}), error=MESSAGES[error])
    record = drive_engine(engine, wanted, WallClock())
    status = dict(zip(record.requests["request_id"], record.requests["status"], strict=True))
    lost = {request_id for request_id, state in status.items() if state == "failed"}
    assert 0 < len(lost) < len(wanted)
    assert {engine.take_output(i) == expected[i] for i in status if i not in lost} == {True}
    for request_id, reason in zip(record.requests["request_id"], record.requests["error"], strict=True):
        assert (reason is not None) == (request_id in lost)
        assert reason is None or ("out of memory" in reason and "max_num_batched_tokens=120" in reason)
    assert engine.scheduler.pool.used_rows == 0
    assert free_runs(engine.scheduler.pool) == ((0, KV_ROWS),)
    assert not engine.has_work
    failed_steps = [i for i, count in enumerate(record.tables["steps"]["num_failed"]) if count]
    assert failed_steps == [0, 9]

    # What failed can be asked for again.
    for request in wanted:
        if request.request_id in lost:
            engine.submit(request)
    engine.run()
    assert all(engine.take_output(request_id) == expected[request_id] for request_id in lost)


def test_other_errors_are_not_swallowed():
    engine = engine_of("phase", fails_at=frozenset({0}), error=RuntimeError("shape mismatch"))
    engine.submit(requests(1)[0])
    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.step()
