"""dLLM-Cache against a plain reading of its rules, ids recorded from published code, and closed forms of its cost."""

import math
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.dllm_cache_cases import dims_of, engine_config, is_decided, run, sample, weights_of
from support.reference_dllm_cache import INTERVALS, dllm_cache
from support.reference_samplers import llada
from support.tables import data_beside
from support.tiny_models import GQA, LOUD, MHA, MQA, ONE_LAYER, network, prompt_of, request_on

from baselines.dllm.dllm_cache.forward import FeatureForward
from baselines.dllm.dllm_cache.method import DLLM_CACHE, FeatureCacheRooflineExecutor, memory_bytes_per_token, step_work
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor, reduce_exponentials
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.roofline import L40S, Roofline
from engines.dllm.config import DecodeConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.memory import REDUCTION_ROWS
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from engines.errors import UserError
from engines.models.config import DreamConfig
from engines.models.decoder import DreamModel
from engines.models.shape import DREAM_7B, LLADA_8B, MIXTRAL_8X7B, ModelShape

DEMO = FeatureCacheConfig()
NO_REUSE = FeatureCacheConfig(prompt_interval=1, gen_interval=1, transfer_ratio=0.0)
GENERATION = GenerationConfig(gen_length=16, block_length=8, steps=16)


# ---- schedule -----------------------------------------------------------------------------------


def test_requests_it_cannot_run_are_refused():
    config = engine_config(1)
    torch_executor = feature_cache_executor(network(MHA), config, DEMO, batch_size=1)
    simulated = FeatureCacheRooflineExecutor(Roofline(LLADA_8B, L40S), config, DEMO)
    for change, message in (({"threshold": 0.9}, "threshold=0.9"), ({"factor": 1.0}, "factor=1.0")):
        generation = replace(GenerationConfig(gen_length=8, block_length=8, steps=8), **change)
        request = Request(request_id=0, prompt_len=1, prompt_ids=(1,), generation=generation)
        for executor in (torch_executor, simulated):
            with pytest.raises(UserError, match=message):
                executor.validate(request)
    for change, message in (
        ({"first_step": "first_and_ranked"}, "first_step='first_and_ranked'"),
        ({"confidence_dtype": "float64"}, "confidence='max_prob' in 'float64'"),
        ({"confidence": "margin"}, "confidence='margin'"),
    ):
        with pytest.raises(UserError, match=message):
            feature_cache_executor(network(MHA), engine_config(1, decode=DecodeConfig(**change)), DEMO, batch_size=1)


# ---- tokens -------------------------------------------------------------------------------------

SHAPES = [(5, 16, 8, 16), (1, 12, 4, 6), (19, 24, 24, 24), (7, 16, 4, 24), (11, 18, 6, 15)]


@pytest.mark.parametrize(("model", "stride"), [(MHA, 4), (GQA, 4), (MQA, 5), (ONE_LAYER, 7)])
def test_ids_are_those_of_the_written_rules(model, stride):
    """Rounding decides where two candidates are closer than float32 resolves; those cases prove nothing."""
    cases = list(product(enumerate(SHAPES), INTERVALS))[::stride]
    undecided, shapes, outputs = 0, set(), set()
    for i, ((n, (p, g, b, steps)), (kp, kg, rho)) in enumerate(cases):
        prompt = prompt_of(model, 40 + n, p)
        expected = dllm_cache(
            weights_of(model),
            dims_of(model),
            prompt,
            gen_length=g,
            block_length=b,
            steps=steps,
            prompt_interval=kp,
            gen_interval=kg,
            transfer_ratio=rho,
        )
        if not is_decided(expected.margins):
            undecided += 1
            continue
        cache = FeatureCacheConfig(prompt_interval=kp, gen_interval=kg, transfer_ratio=rho)
        generation = GenerationConfig(gen_length=g, block_length=b, steps=steps)
        policy = ("parity", "stable")[i % 2]
        found = sample(network(model), [prompt], generation, cache, tie_policy=policy)
        assert found == [expected.token_ids], f"{model.name} {(p, g, b, steps, kp, kg, rho)} {policy}"
        shapes.add(n)
        outputs.add((n, expected.token_ids))
    assert undecided <= len(cases) // 3
    # The settings matter, except where there is only the layer that is never cached.
    assert len(outputs) == len(shapes) if model is ONE_LAYER else len(outputs) >= 1.5 * len(shapes)


@pytest.mark.parametrize(("model", "rho"), [(MHA, 0.0), (MHA, 1.0), (GQA, 0.25), (LOUD, 0.25)])
def test_refreshing_every_step_is_the_plain_sampler(model, rho):
    cache = FeatureCacheConfig(prompt_interval=1, gen_interval=1, transfer_ratio=rho)
    for n, (p, g, b, steps) in enumerate(SHAPES[:2] + SHAPES[4:]):
        generation = GenerationConfig(gen_length=g, block_length=b, steps=steps)
        prompt = prompt_of(model, 60 + n, p)
        config = engine_config(1)
        plain, _ = run(
            padded_executor(network(model), config, 0, batch_size=1), config, [prompt], generation, batch_size=1
        )
        assert sample(network(model), [prompt], generation, cache) == plain
        expected = llada(weights_of(model), dims_of(model), prompt, gen_length=g, block_length=b, steps=steps)
        assert plain == [expected.token_ids]


@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
@pytest.mark.parametrize("policy", ["stable", "parity"])
def test_members_of_a_batch_get_the_ids_they_get_alone(model, policy):
    """Unequal prompts, more requests than slots (a second batch starts its own count), one with noise of its own."""
    prompts = [prompt_of(model, 80 + n, p) for n, p in enumerate((3, 41, 17, 17, 1))]
    temperatures = (0.0, 0.7) if (policy == "stable") == (model is MHA) else (0.7, 0.0)
    caches = replace(DEMO, prompt_interval=5, gen_interval=4), replace(DEMO, transfer_ratio=0.5)
    for cache, temperature in zip(caches, temperatures, strict=True):
        setting = replace(GENERATION, temperature=temperature, seed=3)
        alone = [sample(network(model), [prompt], setting, cache, tie_policy=policy)[0] for prompt in prompts]
        for size in (len(prompts), 3):
            assert sample(network(model), prompts, setting, cache, batch_size=size, tie_policy=policy) == alone


def test_one_masked_call_attends_as_one_call_per_member():
    """Its rounding differs, so where nothing is selected the ids must still agree."""
    for model in (MHA, GQA):
        prompts = [prompt_of(model, 20 + n, p) for n, p in enumerate((3, 41, 17, 1))]
        for cache in (NO_REUSE, FeatureCacheConfig(prompt_interval=3, gen_interval=2, transfer_ratio=0.0)):
            apart = sample(network(model), prompts, GENERATION, cache, masked_attention=False)
            assert sample(network(model), prompts, GENERATION, cache, masked_attention=True) == apart


def test_features_of_padding_never_reach_a_token(monkeypatch):
    """Whatever the padded columns hold; a not-a-number would spread to whatever touches it."""
    prompts = [prompt_of(MHA, n, p) for n, p in enumerate((2, 30))]
    cache = FeatureCacheConfig(prompt_interval=3, gen_interval=2, transfer_ratio=0.25)
    clean = sample(network(MHA), prompts, GENERATION, cache)
    refresh = FeatureForward._refresh

    def poisoned(self, layer, cache, batch, x, columns):
        for i, first in enumerate(batch.padding):
            x[i, :first] = math.nan
        return refresh(self, layer, cache, batch, x, columns)

    monkeypatch.setattr(FeatureForward, "_refresh", poisoned)
    assert sample(network(MHA), prompts, GENERATION, cache) == clean


def test_greedy_token_is_the_argmax_of_exponentials():
    logits = torch.tensor([[1.0, 90.0, 95.0], [1.0, 2.0, 3.0], [-200.0, -199.0, -150.0]])
    token, confidence = reduce_exponentials(logits.clone(), suppress_id=None)
    # Overflow and underflow make ties, which the lowest id wins; its own probability is its confidence.
    assert token.tolist() == [1, 2, 0]
    assert torch.equal(confidence, torch.softmax(logits, dim=1).gather(1, token[:, None])[:, 0])
    close = torch.tensor([[1.0, 5.0, 5.03125]], dtype=torch.bfloat16)
    assert close[0, 2] > close[0, 1]
    token, confidence = reduce_exponentials(close, suppress_id=None)
    assert token.item() == (1 if close.exp()[0, 1] == close.exp()[0, 2] else 2)
    assert confidence.dtype == torch.bfloat16
    token, confidence = reduce_exponentials(logits.clone(), suppress_id=2)
    assert token.tolist() == [1, 1, 0]
    assert torch.equal(confidence, torch.softmax(logits, dim=1).gather(1, token[:, None])[:, 0])


def test_a_suppressed_mask_id_is_never_committed():
    prompts = [prompt_of(LOUD, n, 9) for n in range(6)]
    free = sample(network(LOUD), prompts, GENERATION, DEMO)
    assert any(LOUD.mask_id in ids for ids in free)
    kept_out = sample(network(LOUD), prompts, GENERATION, DEMO, suppress_mask_token=True)
    assert not any(LOUD.mask_id in ids for ids in kept_out)


@lru_cache
def dream() -> DreamModel:
    generator = torch.Generator().manual_seed(5)
    model = DreamModel(DreamConfig(**data_beside(__file__, "dream")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 2 / math.sqrt(parameter.shape[-1]), generator=generator)
    return model.requires_grad_(False).eval()


def test_dream_is_taken_apart_rightly():
    """Biases, rotation, names and the shift: without reuse it is the plain sampler on the same model."""
    config = engine_config(1)
    prompts = [prompt_of(MHA, n, p) for n, p in enumerate((4, 11, 1))]
    for prompt in prompts:
        plain, _ = run(padded_executor(dream(), config, 0, batch_size=1), config, [prompt], GENERATION, batch_size=1)
        assert sample(dream(), [prompt], GENERATION, NO_REUSE) == plain
    for decode in (
        DecodeConfig(),
        DecodeConfig(quota="timestep", confidence="neg_entropy"),
        DecodeConfig(quota="origin"),
    ):
        alone = [sample(dream(), [prompt], GENERATION, DEMO, decode=decode)[0] for prompt in prompts]
        size = 1 if decode.quota == "origin" else len(prompts)  # chance keeps no batch in step
        assert sample(dream(), prompts, GENERATION, DEMO, decode=decode, batch_size=size) == alone
    alone = [sample(dream(), [prompt], GENERATION, DEMO)[0] for prompt in prompts]
    assert alone != [sample(dream(), [prompt], GENERATION, NO_REUSE)[0] for prompt in prompts]


# ---- cost ---------------------------------------------------------------------------------------


def flops_of(shape: ModelShape, cache: FeatureCacheConfig, t: int, prompt: int, gen: int, members: int) -> int:
    """FLOPs of step ``t``."""
    work = step_work(cache.step(t, prompt, gen), members, shape)
    return sum(flops for flops, _ in Roofline(shape, L40S).loads(work))


@pytest.mark.parametrize(
    ("cache", "steps"),
    [(DEMO, 256), (DEMO, 40), (FeatureCacheConfig(prompt_interval=3, gen_interval=2, transfer_ratio=0.5), 31)],
)
def test_flops_of_a_generation(cache, steps):
    """Closed form for LLaDA-8B: how often each part runs, times what one run of it takes."""
    d, ff, layers, rows_of_head = 4096, 12288, 32, 126464
    p, g, members = 300, 256, 3
    prompts, responses = -(-steps // cache.prompt_interval), -(-steps // cache.gen_interval)
    selected = int(g * cache.transfer_ratio)
    rows = prompts * p + responses * g + (steps - responses) * selected
    unselected = (steps - responses) * (g - selected)
    per_row, pair = 2 * (4 * d * d + 3 * d * ff), 4 * d
    first_layer = steps * (p + g) * (per_row + pair * (p + g))
    later_layers = (layers - 1) * (rows * (per_row + pair * (p + g)) + unselected * 2 * d * d)
    head = steps * g * 2 * d * rows_of_head
    total = sum(flops_of(LLADA_8B, cache, t, p, g, members) for t in range(1, steps + 1))
    assert total == members * (first_layer + later_layers + head)


def test_nothing_is_recomputed_past_the_first_layer_without_a_transfer_ratio():
    # A share that rounds down to no row still projects values.
    work, few = (
        step_work(replace(DEMO, transfer_ratio=ratio).step(2, 100, 156), 1, LLADA_8B) for ratio in (0.0, 0.001)
    )
    assert (work.query_rows, work.attention_pairs, work.kv_read_rows, few.query_rows) == (0, 0, 0, 0)
    assert work.extra_linear_flops * 32 == LLADA_8B.linear_flops_per_token * 256
    assert work.extra_weight_bytes == LLADA_8B.streamed_weight_bytes_layers() // 32
    assert few.extra_weight_bytes - work.extra_weight_bytes == 31 * 4096 * 4096 * 2
    assert few.extra_linear_flops - work.extra_linear_flops == 31 * 156 * 2 * 4096 * 4096


@given(
    t=st.integers(1, 300),
    prompt=st.integers(1, 900),
    gen=st.integers(1, 300),
    members=st.integers(1, 40),
    ratio=st.floats(0, 1),
    shape=st.sampled_from([LLADA_8B, DREAM_7B, MIXTRAL_8X7B]),
)
def test_reuse_never_costs_more_arithmetic_than_a_full_refresh(t, prompt, gen, members, ratio, shape):
    cache = replace(DEMO, transfer_ratio=ratio)
    full, found = (flops_of(shape, cache, each, prompt, gen, members) for each in (1, t))
    assert 0 < found <= full
    assert (found == full) == (cache.step(t, prompt, gen).query_rows == prompt + gen)


def test_simulation_counts_the_rows_that_are_computed():
    prompts = [prompt_of(MHA, n, p) for n, p in enumerate((3, 41, 17, 5, 6))]
    shape = ModelShape.from_config(MHA.config, name="tiny", dtype_bytes=4)
    for cache in (DEMO, FeatureCacheConfig(prompt_interval=3, gen_interval=2, transfer_ratio=0.5)):
        config = engine_config(3)
        real = run(
            feature_cache_executor(network(MHA), config, cache, batch_size=3), config, prompts, GENERATION, batch_size=3
        )[1]
        charged = run(
            FeatureCacheRooflineExecutor(Roofline(shape, L40S), config, cache),
            config,
            prompts,
            GENERATION,
            batch_size=3,
        )[1]
        counts = [
            [(r.outcome.query_rows, r.outcome.logit_rows, r.outcome.committed_tokens, r.done.finished) for r in records]
            for records in (real, charged)
        ]
        assert counts[0] == counts[1]
        assert [count[0] for count in counts[0]][:2] == [3 * 57, 3 * cache.step(2, 41, 16).query_rows]
        assert len(real) == 32
        assert all(r.duration_s > 0 for r in charged)


# ---- memory -------------------------------------------------------------------------------------


def test_the_caches_take_what_the_plan_says():
    executor = feature_cache_executor(network(GQA), engine_config(2), DEMO, batch_size=2)
    engine = Engine(StaticBatchScheduler(executor.config, KvPool(0), NoCache(), batch_size=2), executor)
    for i, p in enumerate((5, 9)):
        engine.submit(request_on(GQA, i, p, GENERATION))
    engine.step()
    tensors = [t for c in executor.forward.batch.caches for t in (c.k, c.v, c.attention, c.mlp)]
    shape = ModelShape.from_config(GQA.config, name="tiny", dtype_bytes=4)
    assert sum(t.nbytes for t in tensors) == 2 * 25 * memory_bytes_per_token(shape)
    engine.run()
    assert executor.forward.batch is None


def test_a_static_batch_takes():
    """Every row has its features, the response rows logits; upstream copies these all at once."""
    plan = partial(
        DLLM_CACHE.footprint,
        LLADA_8B,
        DLLM_CACHE.sampler("llada", {}),
        GenerationConfig(gen_length=256),
        memory_bytes=L40S.memory_bytes,
        longest=512,
    )
    footprint, upstream = plan(), plan(is_upstream=True)
    rows = 512 * (2**20 + LLADA_8B.activation_bytes_per_query_token)
    assert footprint.per_request_bytes == rows + 256 * 126464 * 2
    assert upstream.per_request_bytes == rows + 256 * 2 * 126464 * 2
    assert footprint.fixed_bytes - upstream.fixed_bytes == REDUCTION_ROWS * 126464 * 2
    assert footprint.peak_bytes(3) == footprint.fixed_bytes + 3 * footprint.per_request_bytes
