"""What a simulated static batch is charged, against what the padded executor computes."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_models import MHA, network, prompt_of
from torch import Tensor

from baselines.dllm.method import method
from baselines.dllm.static import executor as static_batch
from baselines.dllm.static.executor import PaddedTorchExecutor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.roofline import step_work
from engines.dllm.plan import StepOutcome, StepPlan
from engines.dllm.request import Request
from engines.dllm.sequence import cache_rows


@pytest.mark.parametrize("system", ["fast-dllm", "sparse-dllm", "llada"])
def test_a_padded_batch_is_charged_the_keys_it_computes(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """Every member's attention spans as many keys as the longest member's."""
    chosen = method(system, "llada", {})
    generation = GenerationConfig(gen_length=16, block_length=8, steps=16)
    prompts = [prompt_of(MHA, i, length) for i, length in enumerate((5, 7, 40))]
    config = EngineConfig(max_num_batched_tokens=3 * 56, max_model_len=56, max_num_seqs=3, sparsity=chosen.sparsity)
    asked = [
        Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation)
        for i, prompt in enumerate(prompts)
    ]
    rows = 3 * max(cache_rows(request, chosen.sparsity) for request in asked) if chosen.rule.caches else 0
    engine = Engine(
        StaticBatchScheduler(config, KvPool(rows), chosen.rule, batch_size=3, exact_steps=chosen.exact_steps),
        PaddedTorchExecutor(network(MHA), config, rows, batch_size=3),
    )
    computed: list[int] = []
    charged: list[int] = []
    attention, execute = static_batch.F.scaled_dot_product_attention, PaddedTorchExecutor.execute

    def counting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        computed.append(q.shape[0] * q.shape[2] * k.shape[2])
        return attention(q, k, v, **options)

    def charging(self: PaddedTorchExecutor, plan: StepPlan) -> StepOutcome:
        charged.append(step_work(plan, config).attention_pairs)
        return execute(self, plan)

    monkeypatch.setattr(static_batch.F, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(PaddedTorchExecutor, "execute", charging)
    for request in asked:
        engine.submit(request)
    engine.run()
    assert len(charged) == 16
    assert computed[:: MHA.layers] == charged
