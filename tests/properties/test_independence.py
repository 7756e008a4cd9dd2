"""A request's ids depend on the request alone: not on company, budget, pool, chunking or batching."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import Ids, chi_square, engine_for, rows_of, run_alone, run_together
from support.tables import data_beside
from support.tiny_models import GQA, LOUD, MHA, ONE_LAYER, TinyModel, network, request_on

from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    RefreshRule,
    SparsityConfig,
    Window,
)
from engines.dllm.denoise import Reduction, choose, reduce_in_chunks
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.method import Sampler
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.errors import UserError
from engines.runtime.noise import gumbel_argmax, row_keys, uniform
from repro.families.dllm.system import method

MAX_TOTAL = 40
PLAIN = DecodeConfig()


@lru_cache(maxsize=4096)
def alone(
    model: TinyModel,
    request: Request,
    sparsity: SparsityConfig,
    decode: DecodeConfig = PLAIN,
    cached: bool = True,
    window: Window = "block",
) -> Ids:
    """On an engine with room for everything, nobody else in it and all logits in one chunk."""
    request = replace(request, request_id=0)
    config = EngineConfig(max_num_seqs=1, max_model_len=model.max_len, sparsity=sparsity, decode=decode)
    rule = DelayedCache(delay=sparsity.refresh_delay, window=window) if cached else NoCache()
    return run_together(engine_for(model, config, rows_of(request, sparsity, window), rule), [(0, request)])[0]


@st.composite
def requests(draw: st.DrawFn, model: TinyModel, request_id: int, *, thresholds: bool = True) -> Request:
    gen = draw(st.integers(1, 14))
    block = draw(st.integers(1, 8))
    num_blocks = -(-gen // block)
    prompt_len = draw(st.integers(1, MAX_TOTAL - gen))
    generation = GenerationConfig(
        gen_length=gen,
        block_length=block,
        steps=draw(st.integers(num_blocks, gen + 3)) if gen + 3 >= num_blocks else num_blocks,
        temperature=draw(st.sampled_from((0.0, 0.0, 0.5, 1.5))),
        threshold=draw(st.sampled_from((None, None, 0.3, 0.9))) if thresholds else None,
        seed=draw(st.integers(0, 3)),
    )
    return request_on(model, request_id, prompt_len, generation, seed=draw(st.integers(0, 99)))


sparsities = st.builds(
    SparsityConfig,
    whole_layer=st.sampled_from((None, 0, 1)),
    selection=st.sampled_from(("head", "uniform", "attended", "dense")),
    retention_ratio=st.sampled_from((0.1, 0.5, 0.8, 1.0)),
    pool_kernel=st.sampled_from((1, 3, 5)),
    refresh_delay=st.sampled_from((0, 1)),
)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[TinyModel, EngineConfig, int, list[tuple[int, Request]]]:
    model = draw(st.sampled_from((MHA, GQA, LOUD)))
    sparsity = draw(sparsities)
    first_step = draw(st.sampled_from(("ranked", "first_and_ranked")))
    arrivals = [(draw(st.integers(0, 12)), draw(requests(model, i))) for i in range(draw(st.integers(2, 6)))]
    longest = max(request.total_len for _, request in arrivals)
    largest = max(rows_of(request, sparsity) for _, request in arrivals)
    config = EngineConfig(
        max_num_batched_tokens=longest + draw(st.sampled_from((0, 1, 7, 40, 400))),
        max_num_logits=draw(st.sampled_from((1, 2, 5, 8, 64))),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=MAX_TOTAL,
        scheduler=draw(st.sampled_from(("phase", "phase", "request"))),
        decode=DecodeConfig(first_step=first_step),
        sparsity=sparsity,
    )
    return model, config, largest + draw(st.sampled_from((0, 3, 30, 300))), arrivals


@settings(max_examples=15)
@given(mixes())
def test_company_changes_nothing(mix):
    model, config, kv_rows, arrivals = mix
    outputs = run_together(engine_for(model, config, kv_rows), arrivals)
    for _, request in arrivals:
        expected = alone(model, replace(request, request_id=0), config.sparsity, config.decode)
        assert outputs[request.request_id] == expected, request


@st.composite
def baseline_mixes(draw: st.DrawFn) -> tuple[TinyModel, Sampler, EngineConfig, int, list[tuple[int, Request]]]:
    """Requests of every kind next to each other: greedy, sampled, with a threshold, with a factor, remasked at random
    and, where nothing is cached, guided."""
    model = draw(st.sampled_from((MHA, GQA, LOUD)))
    system, family, options = draw(st.sampled_from(MIXED_METHODS))
    chosen = method(system).sampler(family, options)
    arrivals = []
    for i in range(draw(st.integers(2, 6))):
        request = draw(requests(model, i))
        is_drawn, threshold = request.generation.temperature > 0, request.generation.threshold
        if options.get("alg") == "confidence_threshold":  # which always has one
            threshold = threshold or 0.9
        factor = draw(st.sampled_from((None, 0.5, 1.5))) if threshold is None else None
        ranks = chosen.decode.quota == "timestep" and threshold is None and factor is None
        generation = replace(
            request.generation,
            threshold=threshold,
            factor=factor,
            top_p=draw(st.sampled_from((1.0, 0.9, 0.5))) if is_drawn else 1.0,
            top_k=draw(st.sampled_from((None, 1, 3, 500))) if is_drawn else None,
            alg_temp=draw(st.sampled_from((0.0, 0.1, 1.0))) if ranks else 0.0,
            remasking=draw(st.sampled_from(("low_confidence", "low_confidence", "random"))),
            cfg_scale=0.0 if chosen.rule.caches else draw(st.sampled_from((0.0, 0.0, 0.7, 2.0))),
        )
        arrivals.append((draw(st.integers(0, 12)), replace(request, generation=generation)))
    longest = max(request.total_len for _, request in arrivals)
    largest = max(rows_of(request, chosen.sparsity, chosen.rule.window) for _, request in arrivals)
    config = EngineConfig(
        max_num_batched_tokens=longest + draw(st.sampled_from((0, 1, 7, 40, 400))),
        max_num_logits=draw(st.sampled_from((1, 2, 5, 8, 64))),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=MAX_TOTAL,
        decode=chosen.decode,
        sparsity=chosen.sparsity,
    )
    return model, chosen, config, largest + draw(st.sampled_from((0, 3, 30, 300))), arrivals


MIXED_METHODS = data_beside(__file__, "independence")["methods"]
"""System, family of its decode rule, options."""


@settings(max_examples=25)
@given(baseline_mixes())
def test_company_of_any_kind_changes_nothing(mix):
    model, chosen, config, kv_rows, arrivals = mix
    outputs = run_together(engine_for(model, config, kv_rows, chosen.rule), arrivals)
    for _, request in arrivals:
        assert len(outputs[request.request_id]) == request.generation.gen_length
        assert outputs[request.request_id] == run_alone(model, chosen, request), request


def test_guidance_is_refused_where_rows_are_cached():
    """Its second forward has masked prompts, which must not get into anybody's cache."""
    chosen = method("dllm-serve").sampler("llada", {})
    generation = GenerationConfig(gen_length=12, block_length=6, steps=12, cfg_scale=1.5)
    guided = request_on(MHA, 0, 14, generation)
    config = EngineConfig(max_num_seqs=2, max_model_len=64, sparsity=chosen.sparsity, decode=chosen.decode)
    engine = engine_for(MHA, config, 64, chosen.rule)
    with pytest.raises(UserError, match=r"cfg_scale=1\.5 .*leave it out"):
        engine.submit(guided)
    assert not engine.has_work


def test_a_slot_and_its_rows_keep_nothing_of_their_last_user():
    """Slots and pool rows are reused; a short request after a long one must not read what is left there."""
    sparsity = SparsityConfig()
    generation = GenerationConfig(gen_length=8, block_length=4, steps=8)
    long = request_on(GQA, 0, 30, generation, seed=1)
    short = request_on(GQA, 1, 2, generation, seed=2)
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64, sparsity=sparsity)
    outputs = run_together(engine_for(GQA, config, rows_of(long, sparsity)), [(0, long), (0, short)])
    assert outputs == {0: alone(GQA, long, sparsity), 1: alone(GQA, replace(short, request_id=0), sparsity)}


@pytest.mark.parametrize("selection", ["head", "uniform", "attended"])
@pytest.mark.parametrize("kernel", [3, 5])
def test_caches_built_in_one_step_keep_to_their_own_rows(selection, kernel):
    """Contexts of different lengths are scored as one padded array; what pads the shorter must never be kept."""
    sparsity = SparsityConfig(selection=selection, pool_kernel=kernel, retention_ratio=0.5)
    generation = GenerationConfig(gen_length=10, block_length=5, steps=10)
    batch = [request_on(GQA, i, length, generation) for i, length in enumerate((3, 30, 8, 17, 4, 25, 12, 6))]
    config = EngineConfig(max_num_seqs=8, max_model_len=64, sparsity=sparsity)
    engine = engine_for(GQA, config, sum(rows_of(request, sparsity) for request in batch))
    expected = {request.request_id: alone(GQA, replace(request, request_id=0), sparsity) for request in batch}
    assert run_together(engine, [(0, request) for request in batch]) == expected


@st.composite
def static_mixes(draw: st.DrawFn) -> tuple[TinyModel, bool, SparsityConfig, int, list[Request]]:
    """Members of a batch share a generation setting but for temperature and seed."""
    model = draw(st.sampled_from((MHA, GQA, LOUD)))
    first = draw(requests(model, 0, thresholds=False))
    shared = first.generation
    members = []
    for i in range(draw(st.integers(1, 7))):
        prompt_len = draw(st.integers(1, MAX_TOTAL - shared.gen_length))
        generation = replace(shared, temperature=draw(st.sampled_from((0.0, 0.0, 0.8))), seed=i)
        members.append(request_on(model, i, prompt_len, generation))
    sparsity = SparsityConfig(
        selection=draw(st.sampled_from(("uniform", "head"))),
        retention_ratio=draw(st.sampled_from((0.2, 0.5, 1.0))),
        pool_kernel=draw(st.sampled_from((1, 3))),
        min_kept=draw(st.sampled_from((0, 1))),
    )
    return model, draw(st.booleans()), sparsity, draw(st.integers(1, 4)), members


@settings(max_examples=10)
@given(static_mixes())
def test_a_static_batch_changes_nothing(mix):
    model, cached, sparsity, batch_size, members = mix
    rule: RefreshRule = DelayedCache(delay=1) if cached else NoCache()

    def outputs_of(batch: Sequence[Request], size: int) -> dict[int, Ids]:
        kv_rows = size * max(rows_of(request, sparsity) for request in batch) if cached else 0
        config = EngineConfig(
            max_num_batched_tokens=10**6,
            max_num_seqs=size,
            max_model_len=MAX_TOTAL,
            sparsity=sparsity,
            suppress_mask_token=False,
        )
        executor = padded_executor(network(model), config, kv_rows, batch_size=size)
        engine = Engine(StaticBatchScheduler(config, KvPool(kv_rows), rule, batch_size=size), executor)
        return run_together(engine, [(0, request) for request in batch])

    together = outputs_of(members, batch_size)
    for request in members:
        assert together[request.request_id] == outputs_of([request], 1)[request.request_id], request
        packed = EngineConfig(max_num_seqs=1, max_model_len=MAX_TOTAL, sparsity=sparsity, suppress_mask_token=False)
        kv_rows = rows_of(request, sparsity) if cached else 0
        scheduler = PhaseScheduler(packed, KvPool(kv_rows), rule, exact_steps=True)
        engine = Engine(scheduler, packed_executor(network(model), packed, kv_rows))
        assert together[request.request_id] == run_together(engine, [(0, request)])[request.request_id], request


# ---- what a cache may and may not change ---------------------------------------------------------


def seeded(model: TinyModel, *, seed: int, prompt_len: int = 11, **generation: float) -> Request:
    return request_on(model, 0, prompt_len, GenerationConfig(**generation), seed=seed)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("model", [MHA, GQA, LOUD], ids=lambda model: model.name)
def test_a_block_without_a_reuse_step_never_sees_its_cache(model, delay):
    sparsity = SparsityConfig(retention_ratio=0.1, refresh_delay=delay)
    for seed in range(4):
        request = seeded(model, seed=seed, gen_length=12, block_length=4, steps=3 * (delay + 1))
        assert alone(model, request, sparsity) == alone(model, request, sparsity, cached=False)


@pytest.mark.parametrize("delay", [0, 1])
def test_one_layer_and_every_row_kept_is_no_cache_at_all(delay):
    """Rows outside the block do not change while it is denoised, and in one layer nothing else enters their K and V."""
    for selection in ("dense", "uniform", "head"):
        sparsity = SparsityConfig(selection=selection, retention_ratio=1.0, refresh_delay=delay)
        for seed in range(3):
            request = seeded(ONE_LAYER, seed=seed, gen_length=14, block_length=6, steps=14)
            assert alone(ONE_LAYER, request, sparsity) == alone(ONE_LAYER, request, sparsity, cached=False)


@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_several_layers_or_dropped_rows_do_change_ids(model):
    """The control of the two tests above."""
    dense, sparse = SparsityConfig(selection="dense"), SparsityConfig(retention_ratio=0.1)
    generation = {"gen_length": 14, "block_length": 14, "steps": 14}
    several = [seeded(model, seed=seed, **generation) for seed in range(3)]
    assert sum(alone(model, r, dense) != alone(model, r, dense, cached=False) for r in several) >= 2
    one = [seeded(ONE_LAYER, seed=seed, **generation) for seed in range(3)]
    assert sum(alone(ONE_LAYER, r, sparse) != alone(ONE_LAYER, r, dense) for r in one) >= 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_at_full_retention_every_selection_is_the_same(model, delay):
    for seed in range(3):
        request = seeded(model, seed=seed, gen_length=13, block_length=6, steps=13)
        found = {
            alone(model, request, SparsityConfig(selection=selection, retention_ratio=1.0, refresh_delay=delay))
            for selection in ("head", "uniform", "attended", "dense")
        }
        assert len(found) == 1


def test_below_full_retention_the_selections_differ():
    num_different = 0
    for seed in range(3):
        request = seeded(MHA, seed=seed, prompt_len=20, gen_length=16, block_length=8, steps=16)
        head, shared, dense = (
            alone(MHA, request, SparsityConfig(selection=selection, retention_ratio=0.2, pool_kernel=1))
            for selection in ("head", "uniform", "dense")
        )
        num_different += len({head, shared, dense}) == 3
    assert num_different >= 2


# ---- chunks of logits ---------------------------------------------------------------------------


def test_chunks_of_logits_change_nothing():
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, MHA.width, generator=random)
    project = network(MHA).logits
    whole = reduce_in_chunks(project, hidden, 1000, Reduction(suppress_id=MHA.mask_id), None)
    for size in (1, 2, 3, 7, 8, 36, 37):
        token, confidence = reduce_in_chunks(project, hidden, size, Reduction(suppress_id=MHA.mask_id), None)
        assert torch.equal(token, whole[0])
        torch.testing.assert_close(confidence, whole[1], rtol=1e-5, atol=1e-7)


def test_suppressing_the_mask_leaves_the_confidence_of_others():
    """It stays in the softmax: confidences are those of the model, not of a renormalised one."""
    hidden = torch.randn(64, LOUD.width, generator=torch.Generator().manual_seed(1))
    project = network(LOUD).logits
    plain_token, plain_confidence = reduce_in_chunks(project, hidden, 9, Reduction(), None)
    token, confidence = reduce_in_chunks(project, hidden, 9, Reduction(suppress_id=LOUD.mask_id), None)
    was_mask = plain_token == LOUD.mask_id
    assert 0 < was_mask.sum() < 64
    assert not (token == LOUD.mask_id).any()
    assert torch.equal(token[~was_mask], plain_token[~was_mask])
    torch.testing.assert_close(confidence[~was_mask], plain_confidence[~was_mask])
    second = torch.softmax(project(hidden), dim=1).topk(2).values[:, 1]
    torch.testing.assert_close(confidence[was_mask], second[was_mask])


def test_what_is_committed():
    """The quota of most confident positions, the lower of equals; what reaches a threshold besides; never what is taken."""
    taken = -torch.inf
    confidence = torch.tensor(
        [[0.5, 0.5, 0.9, 0.5, taken], [0.2, 0.7, 0.7, 0.6, taken], [taken, taken, 0.1, taken, taken]]
    )

    def chosen(quotas: list[int], thresholds: list[float] | None = None) -> list[list[int]]:
        limit = None if thresholds is None else torch.tensor(thresholds)
        return [row.nonzero()[:, 0].tolist() for row in choose(confidence, torch.tensor(quotas), limit)]

    assert chosen([1, 1, 1]) == [[2], [1], [2]]
    assert chosen([2, 2, 2]) == [[0, 2], [1, 2], [2]]
    assert chosen([3, 0, 5]) == [[0, 1, 2], [], [2]]
    assert chosen([1, 1, 1], [0.5, 0.65, 0.9]) == [[0, 1, 2, 3], [1, 2], [2]]
    assert chosen([1, 2, 1], [math.inf, 0.9, math.inf]) == [[2], [1, 2], [2]]


# ---- sampling -----------------------------------------------------------------------------------


def test_seeds_decide_sampled_ids():
    outputs = []
    for seed in range(4):
        generation = GenerationConfig(gen_length=12, block_length=6, steps=12, temperature=1.0, seed=seed)
        request = request_on(MHA, 0, 9, generation, seed=3)
        found = alone(MHA, request, SparsityConfig())
        alone.cache_clear()
        assert found == alone(MHA, request, SparsityConfig())
        outputs.append(found)
    assert len(set(outputs)) == 4


def test_a_little_temperature_is_greedy():
    for seed in range(4):
        greedy = seeded(GQA, seed=seed, gen_length=8, block_length=4, steps=8)
        warm = replace(greedy, generation=replace(greedy.generation, temperature=1e-6))
        assert alone(GQA, greedy, SparsityConfig()) == alone(GQA, warm, SparsityConfig())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["seed", "draw", "position"])
def test_samples_follow_the_softmax(varied, temperature):
    """Whatever tells the rows apart: only the seed, only the step, or only the position."""
    num = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.25])
    counter, zero = torch.arange(num), torch.zeros(num, dtype=torch.int64)
    keys = row_keys(*(counter if name == varied else zero for name in ("seed", "draw", "position")))
    token = gumbel_argmax(logits.expand(num, -1), torch.full((num,), temperature), keys)
    counts = torch.bincount(token, minlength=len(logits)).numpy()
    probability = torch.softmax(logits.double() / temperature, dim=0).numpy()
    assert abs(chi_square(counts, probability)) < 4
    # The same statistic tells a neighbouring temperature apart, so it can fail.
    assert chi_square(counts, torch.softmax(logits.double() / (temperature * 1.15), dim=0).numpy()) > 4


def test_uniform_draws():
    rows, width = 400, 500
    keys = row_keys(torch.arange(rows), torch.full((rows,), 3), torch.arange(rows) % 7)
    u = uniform(keys, width)
    assert u.dtype == torch.float64
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    n = rows * width
    assert abs(float(u.mean()) - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(float(u.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    centred = (u - 0.5) * math.sqrt(12)
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(product.mean())) < 4 / math.sqrt(product.numel())
    assert u.unique().numel() == n


def test_keys_are_distinct_over_seeds_draws_and_positions():
    seeds, draws, positions = torch.meshgrid(torch.arange(20), torch.arange(30), torch.arange(40), indexing="ij")
    assert row_keys(seeds.flatten(), draws.flatten(), positions.flatten()).unique().numel() == 20 * 30 * 40


def test_a_row_draws_the_same_whatever_the_width_and_its_neighbours():
    keys = row_keys(torch.arange(5), torch.arange(5), torch.arange(5))
    assert torch.equal(uniform(keys, 90)[:, :30], uniform(keys, 30))
    assert torch.equal(uniform(keys[3:4], 30)[0], uniform(keys, 30)[3])
