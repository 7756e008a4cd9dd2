"""A step that runs out of memory costs its requests, and logits that are not finite their own: never the engine, and no other."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.engine_runs import free_runs
from support.tiny_models import GQA, network, request_on
from torch import Tensor

from engines.dllm.config import DecodeConfig, DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduced
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.step import Candidates, Head
from engines.dllm.plan import Request
from engines.dllm.scheduling import SCHEDULERS, KvPool
from repro.families.dllm.record import DLLM, drive_engine
from repro.runs.record import RunRecord
from repro.runs.step_driver import WallClock

CONFIG = EngineConfig(max_num_batched_tokens=120, max_num_logits=16, max_num_seqs=4, max_model_len=60)
GENERATION = GenerationConfig(gen_length=16, block_length=8, steps=16)
KV_ROWS = 200
LACKS_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
}


class FailingHead:
    """In the steps named it fails by an error, or its model's logits of one item have a value that is not finite."""

    def __init__(self, head: Head, fault: RuntimeError | float, steps: tuple[int, ...]) -> None:
        self._head, self._fault, self._steps = head, fault, steps
        self.logit_rows = head.logit_rows
        self._num_steps = 0

    def __call__(self, hidden: Tensor, guidance: Any, candidates: Candidates, sampling: Any) -> Reduced:
        self._num_steps += 1
        if self._num_steps - 1 in self._steps:
            if isinstance(self._fault, RuntimeError):
                raise self._fault
            hidden = hidden.clone()
            rows = candidates.row[: candidates.size][torch.from_numpy(candidates.item[: candidates.size] == 0)]
            hidden[rows] = self._fault
        return self._head(hidden, guidance, candidates, sampling)


def engine_of(config: EngineConfig, fault: RuntimeError | float = 0.0, steps: tuple[int, ...] = ()) -> Engine:
    executor = packed_executor(network(GQA), config, KV_ROWS)
    executor.head = FailingHead(executor.head, fault, steps)
    return Engine(SCHEDULERS[config.scheduler](config, KvPool(KV_ROWS), DelayedCache(delay=1)), executor)


def requests(count: int, generation: GenerationConfig = GENERATION) -> list[Request]:
    return [request_on(GQA, i, 20 + i, generation) for i in range(count)]


def served(engine: Engine, wanted: list[Request]) -> tuple[dict[int, Any], dict[int, str], RunRecord]:
    """Ids of those that were served, and why others were not."""
    record = drive_engine(engine, wanted, WallClock())
    errors = dict(zip(record.requests["request_id"], record.requests["error"], strict=True))
    lost = {request_id: reason for request_id, reason in errors.items() if reason is not None}
    assert {i for i, status in zip(errors, record.requests["status"], strict=True) if status == "failed"} == lost.keys()
    assert not engine.has_work
    assert free_runs(engine.scheduler.pool) == ((0, KV_ROWS),)
    return {i: engine.take_output(i) for i in errors if i not in lost}, lost, record


@pytest.mark.parametrize("error", LACKS_MEMORY)
@pytest.mark.parametrize("scheduler", ["phase", "request", "lookahead"])
def test_a_lack_of_memory_costs_the_requests_of_its_step(scheduler, error):
    config, wanted = replace(CONFIG, scheduler=scheduler), requests(7)
    expected, none, _ = served(engine_of(config), wanted)
    assert not none
    # The first step of all, and one in the middle of others' generations.
    engine = engine_of(config, LACKS_MEMORY[error], (0, 9))
    kept, lost, record = served(engine, wanted)
    assert 0 < len(lost) < len(wanted)
    assert kept == {i: expected[i] for i in kept}
    assert all("out of memory" in reason and "max_num_batched_tokens=120" in reason for reason in lost.values())
    assert [i for i, count in enumerate(record.tables["steps"]["num_failed"]) if count] == [0, 9]
    # What failed can be asked for again.
    for request in wanted:
        if request.request_id in lost:
            engine.submit(request)
    engine.run()
    assert all(engine.take_output(request_id) == expected[request_id] for request_id in lost)


def test_other_errors_are_not_swallowed():
    engine = engine_of(CONFIG, RuntimeError("shape mismatch"), (0,))
    engine.submit(requests(1)[0])
    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.step()


RULES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}, {}),
    "several a step": ({"steps": 6}, {}, {}),
    "threshold": ({"threshold": 0.9}, {}, {}),
    "factor": ({"factor": 1.0}, {}, {}),
    "drawn": ({"temperature": 1.0, "top_p": 0.9, "top_k": 5}, {}, {}),
    "drawn positions": ({"alg_temp": 0.5}, {}, {}),
    "random remasking": ({"remasking": "random"}, {}, {}),
    "margin": ({}, {"confidence": "margin"}, {}),
    "entropy": ({}, {"confidence": "neg_entropy"}, {}),
    "sampler": ({"temperature": 0.7}, {"confidence_of": "sampler"}, {}),
    "origin": ({}, {"quota": "origin"}, {}),
    "first position": ({}, {"first_step": "first_and_ranked"}, {}),
    "float64": ({}, {"confidence_dtype": "float64"}, {}),
    "parity": ({}, {}, {"tie_policy": "parity"}),
    "mask may be chosen": ({}, {}, {"suppress_mask_token": False}),
}
"""Settings of the generation, of decoding and of the engine."""


@cache
def undisturbed(rule: str) -> tuple[EngineConfig, list[Request], dict[int, Any]]:
    generated, decode, engine = RULES[rule]
    config = replace(CONFIG, decode=DecodeConfig(**decode), **engine)
    wanted = requests(3, replace(GENERATION, **generated))
    return config, wanted, served(engine_of(config), wanted)[0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", RULES)
def test_logits_that_are_not_finite_cost_their_request_alone(rule, value):
    config, wanted, expected = undisturbed(rule)
    engine = engine_of(config, value, (3,))
    kept, lost, record = served(engine, wanted)
    ((failed, reason),) = lost.items()
    assert "not finite" in reason
    assert "float32" in reason
    assert kept == {i: ids for i, ids in expected.items() if i != failed}
    verdict = DLLM.assess(record)
    assert not verdict.valid
    assert "not finite" in verdict.reasons[0]
    # The slot it had is as good as new.
    engine.submit(request_on(GQA, 9, 20, wanted[0].generation, seed=0))
    engine.run()
    assert engine.take_output(9) == expected[0]
