"""Which requests a static batch takes together, and that nobody's tokens depend on it.

What a simulated static batch is charged, against what the padded executor computes.

Every executor counts the same two stretches of a step as its forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine_runs import Recorder, rows_of
from support.tables import data_beside
from support.tiny_models import GQA, MHA, network, prompt_of
from torch import Tensor

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static import executor as static_batch
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.executor.layout import Layouts
from engines.dllm.executor.output import CandidateChoice, Commit
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler, Scheduler
from engines.dllm.simulated import step_work
from engines.kernels import probe
from engines.kernels.host import Runs
from engines.models.llada import LLaDABlock, LLaDAModelLM
from engines.runtime import step_timer as timer
from repro.families.dllm.system import method

DATA = data_beside(__file__, "static_batches")

PLAIN = GenerationConfig(gen_length=16, block_length=8, steps=16)
CACHE, SUFFIX = DelayedCache(), DelayedCache(delay=0, window="suffix")


@pytest.mark.parametrize(
    ("rule", "other", "together"),
    [
        (CACHE, PLAIN, (0, 1, 2)),
        (CACHE, replace(PLAIN, gen_length=32, steps=32), (0, 1, 2)),
        (CACHE, replace(PLAIN, gen_length=8, steps=8), (0, 1, 2)),
        (CACHE, replace(PLAIN, steps=8), (0, 2)),
        (CACHE, replace(PLAIN, block_length=16), (0, 2)),
        (CACHE, replace(PLAIN, gen_length=20, steps=20), (0, 1, 2)),
        (SUFFIX, replace(PLAIN, gen_length=32, steps=32), (0, 1, 2)),
        (NoCache(), replace(PLAIN, gen_length=20, steps=20), (0, 1, 2)),
        (NoCache(), replace(PLAIN, steps=8), (0, 1, 2)),
    ],
    ids=["same", "longer", "shorter", "steps", "block", "ragged", "suffix", "full, ragged", "full, steps"],
)
def test_members_stay_in_step(rule, other, together):
    """The oldest, and the next ones that go with it; who does not is the oldest in turn."""
    scheduler = StaticBatchScheduler(EngineConfig(), KvPool(10_000), rule, batch_size=8)
    for i, generation in enumerate((PLAIN, other, PLAIN)):
        scheduler.submit(Request(request_id=i, prompt_len=10, generation=generation))
    plan = scheduler.schedule()
    assert plan is not None
    assert tuple(item.request_id for item in plan.items) == together
    assert plan.pad_to == 10 + max(16, other.gen_length if 1 in together else 0)
    assert [waiting.request.request_id for waiting in scheduler.waiting] == [i for i in range(3) if i not in together]


def test_each_batch_has_room_for_its_own_longest():
    """Room for 100 tokens: three of 26, then a long one alone, though it waited before the third."""

    def room(longest: int, members: int) -> bool:
        return longest * members <= 100

    scheduler = StaticBatchScheduler(EngineConfig(), KvPool(10_000), CACHE, batch_size=8, room=room)
    for i, prompt_len in enumerate((10, 10, 10, 80, 10)):
        scheduler.submit(Request(request_id=i, prompt_len=prompt_len, generation=PLAIN))
    plan = scheduler.schedule()
    assert plan is not None
    assert ([item.request_id for item in plan.items], plan.pad_to) == ([0, 1, 2], 26)


def test_of_one_length_alone_where_the_method_cannot_mix_them():
    scheduler = StaticBatchScheduler(EngineConfig(), KvPool(0), NoCache(), batch_size=8, mixes_lengths=False)
    for i, gen_length in enumerate((16, 32, 16)):
        generation = replace(PLAIN, gen_length=gen_length, steps=gen_length)
        scheduler.submit(Request(request_id=i, prompt_len=10, generation=generation))
    plan = scheduler.schedule()
    assert plan is not None
    assert [item.request_id for item in plan.items] == [0, 2]


@pytest.mark.parametrize(
    ("system", "options"), DATA["batches_of_several_lengths"], ids=["dual", "prefix", "sparse", "llada"]
)
@pytest.mark.parametrize("model", [MHA, GQA], ids=["mha", "gqa"])
def test_in_a_batch_of_several_lengths_each_has_the_tokens_it_has_alone(system, options, model):
    chosen = method(system).sampler("llada", options)
    asked = []
    for i, (prompt_len, gen_length) in enumerate(((5, 16), (17, 24), (9, 8), (30, 21))):
        generation = replace(PLAIN, gen_length=gen_length, steps=gen_length)
        prompt = prompt_of(model, i, prompt_len)
        asked.append(Request(request_id=i, prompt_len=prompt_len, prompt_ids=prompt, generation=generation))
    longest = max(request.total_len for request in asked)
    config = EngineConfig(max_num_batched_tokens=len(asked) * longest, max_model_len=longest, sparsity=chosen.sparsity)
    slab = max(rows_of(request, chosen.sparsity, chosen.rule.window) for request in asked) if chosen.rule.caches else 0

    def served(requests: Sequence[Request], batch_size: int) -> tuple[int, list[tuple[int, ...] | None]]:
        rows = batch_size * slab
        scheduler = StaticBatchScheduler(
            config, KvPool(rows), chosen.rule, batch_size=batch_size, exact_steps=chosen.exact_steps
        )
        engine = Engine(scheduler, padded_executor(network(model), config, rows, batch_size=batch_size))
        for request in requests:
            engine.submit(request)
        return len(engine.run()), [engine.take_output(request.request_id) for request in requests]

    num_steps, together = served(asked, len(asked))
    assert num_steps == 24
    assert together == [served([request], 1)[1][0] for request in asked]


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


GENERATION = GenerationConfig(gen_length=16, block_length=8, steps=16)
SYSTEMS: tuple[tuple[str, Mapping[str, str]], ...] = DATA["systems"]


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
