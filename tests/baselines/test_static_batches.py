"""Which requests a static batch takes together, and that nobody's tokens depend on it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.engine_runs import rows_of
from support.tiny_models import GQA, MHA, network, prompt_of

from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.phase import DelayedCache, NoCache
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from repro.systems.dllm.system import method

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
    ("system", "options"),
    [("fast-dllm", {}), ("fast-dllm", {"cache": "prefix"}), ("sparse-dllm", {}), ("llada", {})],
    ids=["dual", "prefix", "sparse", "llada"],
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
