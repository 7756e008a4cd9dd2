"""What a simulated static batch is charged, against what the padded executor computes."""

from typing import Any

import pytest
import torch
from support.engine_runs import rows_of
from support.recorder import Recorder
from support.tiny_models import MHA, network, prompt_of
from torch import Tensor

from baselines.dllm.static import attend as static_batch
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.simulated import step_work
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from engines.kernels import probe
from engines.kernels.host import Runs
from repro.systems.dllm.system import method


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("system", ["fast-dllm", "sparse-dllm", "llada"])
def test_a_padded_batch_is_charged_the_keys_it_computes(monkeypatch, system, has_compiler):
    """Every member's attention spans as many keys as the longest member's."""
    if has_compiler and (fault := probe.host_fault(torch.float32)):
        pytest.skip(fault)
    if not has_compiler:
        monkeypatch.setattr(probe, "host_fault", lambda dtype: "there is no C++ compiler")
    chosen = method(system).sampler("llada", {})
    generation = GenerationConfig(gen_length=16, block_length=8, steps=16)
    prompts = [prompt_of(MHA, i, length) for i, length in enumerate((5, 7, 40))]
    config = EngineConfig(max_num_batched_tokens=3 * 56, max_model_len=56, max_num_seqs=3, sparsity=chosen.sparsity)
    asked = [
        Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation)
        for i, prompt in enumerate(prompts)
    ]
    rows = 3 * max(rows_of(request, chosen.sparsity) for request in asked) if chosen.rule.caches else 0
    recorder = Recorder(padded_executor(network(MHA), config, rows, batch_size=3))
    engine = Engine(
        StaticBatchScheduler(config, KvPool(rows), chosen.rule, batch_size=3, exact_steps=chosen.exact_steps), recorder
    )
    computed: list[int] = []
    attention = static_batch.F.scaled_dot_product_attention

    def counting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        computed.append(q.shape[0] * q.shape[2] * k.shape[2])
        return attention(q, k, v, **options)

    attend_runs = static_batch.attend_runs

    def counting_runs(q: Tensor, k: Tensor, v: Tensor, runs: Runs, out: Tensor) -> Tensor:
        computed.append(int(((runs.q_end - runs.q_start) * runs.k_len).sum()))
        return attend_runs(q, k, v, runs, out)

    monkeypatch.setattr(static_batch, "attend_runs", counting_runs)
    monkeypatch.setattr(static_batch.F, "scaled_dot_product_attention", counting)
    for request in asked:
        engine.submit(request)
    engine.run()
    charged = [step_work(plan, config).attention_pairs for plan in recorder.plans]
    assert len(charged) == 16
    assert computed[:: MHA.layers] == charged
