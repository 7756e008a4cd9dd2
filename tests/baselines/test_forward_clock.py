"""Every executor counts the same two stretches of a step as its forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from support.tiny_models import MHA, network, prompt_of

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.layout import Layouts
from engines.dllm.executor.output import CandidateChoice, Commit
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler, Scheduler
from engines.models.llada import LLaDABlock, LLaDAModelLM
from engines.runtime import step_timer as timer
from repro.systems.dllm.system import method

GENERATION = GenerationConfig(gen_length=16, block_length=8, steps=16)
SYSTEMS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("llada", {}),
    ("fast-dllm", {"cache": "none"}),
    ("fast-dllm", {"cache": "prefix"}),
    ("fast-dllm", {"cache": "dual"}),
    ("sparse-dllm", {}),
    ("dllm-cache", {}),
    ("dllm-serve", {}),
)


def engine_of(system: str, options: Mapping[str, str], prompts: Sequence[tuple[int, ...]]) -> Engine:
    """An engine with all prompts submitted: a static batch of a published method, packed steps of dLLM-Serve."""
    chosen, size = method(system), len(prompts)
    sampler = chosen.sampler("llada", options)
    longest = max(map(len, prompts)) + GENERATION.gen_length
    config = EngineConfig(
        max_num_batched_tokens=size * longest,
        max_model_len=longest,
        max_num_seqs=size,
        sparsity=sampler.sparsity,
        decode=sampler.decode,
        suppress_mask_token=sampler.suppress_mask_token,
    )
    rows = size * sampler.rows_of_request(longest, GENERATION)
    pool, model = KvPool(rows), network(MHA)
    scheduler: Scheduler
    if isinstance(chosen, PublishedMethod):
        scheduler = StaticBatchScheduler(config, pool, sampler.rule, batch_size=size, exact_steps=sampler.exact_steps)
        executor = chosen.static_torch(model, config, sampler, rows, batch_size=size)
    else:
        scheduler = PhaseScheduler(config, pool, sampler.rule)
        executor = chosen.packed_torch(model, config, rows, stop_ids=None, block_length=GENERATION.block_length)
    engine = Engine(scheduler, executor)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=GENERATION))
    return engine


@pytest.mark.parametrize(("system", "options"), SYSTEMS)
def test_the_forward_is_counted_alike(system, options, monkeypatch):
    """On a clock that only what is listed here moves: layers and output head are in, all else is not."""
    now = 0.0

    def takes(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(timer, "perf_counter", lambda: now)
    monkeypatch.setattr(LLaDABlock, "mlp", takes(1, LLaDABlock.mlp))
    monkeypatch.setattr(LLaDAModelLM, "logits", takes(10, LLaDAModelLM.logits))
    outside = ((RequestState, "admit"), (Layouts, "of"), (CandidateChoice, "of"), (CandidateChoice, "sampling"))
    for part, name in (*outside, (Commit, "__call__")):
        monkeypatch.setattr(part, name, takes(1000, getattr(part, name)))
    prompts = [prompt_of(MHA, i, 6) for i in range(2)]
    records = engine_of(system, options, prompts).run()
    assert {record.outcome.forward_s for record in records} == {MHA.layers + 10}
