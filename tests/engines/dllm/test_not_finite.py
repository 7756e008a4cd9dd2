"""Logits that are not finite cost their request, and no other; whatever the decode rule."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.tiny_models import GQA, network, request_on
from torch import Tensor

from engines.dllm.config import DecodeConfig, DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduced
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.step import Candidates, Head
from engines.dllm.scheduling import SCHEDULERS, KvPool
from repro.runs.step_driver import WallClock
from repro.systems.dllm.record import DLLM, drive_engine

CONFIG = EngineConfig(max_num_batched_tokens=120, max_num_logits=16, max_num_seqs=4, max_model_len=60)
KV_ROWS = 200
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


class SpoiledHead:
    """Its model's logits of one item are not finite, in one step."""

    def __init__(self, head: Head, model: Any, step: int, value: float) -> None:
        self._head, self._model, self._step, self._value = head, model, step, value
        self.logit_rows = head.logit_rows
        self._num_steps = 0

    def __call__(self, hidden: Tensor, guidance: Any, candidates: Candidates, sampling: Any) -> Reduced:
        if self._num_steps == self._step:
            hidden = hidden.clone()
            rows = candidates.row[: candidates.size][torch.from_numpy(candidates.item[: candidates.size] == 0)]
            hidden[rows] = self._value
        self._num_steps += 1
        return self._head(hidden, guidance, candidates, sampling)


def run(config: EngineConfig, generation: GenerationConfig, step: int | None, value: float = 0.0) -> tuple[Engine, Any]:
    executor = packed_executor(network(GQA), config, KV_ROWS)
    if step is not None:
        executor.head = SpoiledHead(executor.head, network(GQA), step, value)
    engine = Engine(SCHEDULERS["phase"](config, KvPool(KV_ROWS), DelayedCache(delay=1)), executor)
    requests = [request_on(GQA, i, 20 + i, generation) for i in range(3)]
    return engine, drive_engine(engine, requests, WallClock())


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


def settings_of(rule: str) -> tuple[EngineConfig, GenerationConfig]:
    generated, decode, engine = RULES[rule]
    generation = GenerationConfig(**{"gen_length": 16, "block_length": 8, "steps": 16, **generated})
    return replace(CONFIG, decode=DecodeConfig(**decode), **engine), generation


@cache
def undisturbed(rule: str) -> dict[int, Any]:
    calm, _ = run(*settings_of(rule), None)
    return {i: calm.take_output(i) for i in range(3)}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("rule", RULES)
def test_the_request_fails_and_the_others_do_not(rule, value):
    config, generation = settings_of(rule)
    kept = undisturbed(rule)
    spoiled, record = run(config, generation, 3, value)
    failed = [error for error in record.requests["error"] if error is not None]
    assert record.requests["status"].count("failed") == 1
    assert "not finite" in failed[0]
    assert "float32" in failed[0]
    ok = [
        i for i, status in zip(record.requests["request_id"], record.requests["status"], strict=True) if status == "ok"
    ]
    assert [spoiled.take_output(i) for i in ok] == [kept[i] for i in ok]
    verdict = DLLM.assess(record)
    assert not verdict.valid
    assert "not finite" in verdict.reasons[0]
    assert not spoiled.has_work

    # The slot it had is as good as new.
    spoiled.submit(request_on(GQA, 9, 20, generation, seed=0))
    spoiled.run()
    assert spoiled.take_output(9) == kept[0]
