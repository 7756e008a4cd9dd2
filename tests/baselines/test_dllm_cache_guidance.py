"""dLLM-Cache under classifier-free guidance: what the prompt adds to the logits is cached between its own forwards."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.dllm_cache_cases import dims_of, is_decided, sample, weights_of
from support.reference_dllm_cache import Features
from support.reference_samplers import Dims, Margins, Sampled, Weights, _even, _masked, _remainder_first, _take, llada
from support.refusals import refuses
from support.tiny_models import GQA, MHA, network, prompt_of

from baselines.dllm.dllm_cache.method import DLLM_CACHE, FeatureCacheRooflineExecutor, memory_bytes_per_token
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.roofline import L40S, Roofline
from engines.dllm.config import EngineConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool
from engines.errors import UserError
from engines.models.shape import LLADA_8B
from repro.families.dllm.system import method


def guided(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    cfg_scale: float,
    cache: FeatureCacheConfig,
) -> Sampled:
    """Two branches, each with features and a count of its own; the difference of their logits is kept between the
    forwards of the one without the prompt, which runs in the first five steps and every ``cfg_interval``."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    p, x, margins = len(prompt), _masked(prompt, gen_length, dims), Margins()
    seeing, blind = (
        Features(
            weights=weights,
            dims=dims,
            prompt_len=p,
            prompt_interval=cache.prompt_interval,
            ties="stable",
            gen_interval=cache.gen_interval,
            transfer_ratio=cache.transfer_ratio,
            margins=margins,
        )
        for _ in range(2)
    )
    residual, t = torch.zeros(1), 0
    for b in range(num_blocks):
        s, e = p + b * block_length, p + (b + 1) * block_length
        quota = _remainder_first(int((x[s:e] == dims.mask_id).sum()), per_block)
        for i in range(per_block):
            t += 1
            logits = seeing.logits(x)
            if t <= 5 or (t - 1) % cache.cfg_interval == 0:
                without = x.clone()
                without[:p] = dims.mask_id
                residual = logits - blind.logits(without)
            logits = (logits - residual) + (cfg_scale + 1) * residual
            token = torch.exp(logits).argmax(dim=1)
            confidence = torch.softmax(logits, dim=1).gather(1, token[:, None])[:, 0]
            level = {row: float(confidence[row]) for row in range(s, e) if int(x[row]) == dims.mask_id}
            _take(x, token, logits, level, quota[i], margins)
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=t, margins=margins)


def setting(kp: int, kg: int, ratio: float, kc: int) -> FeatureCacheConfig:
    return FeatureCacheConfig(prompt_interval=kp, gen_interval=kg, transfer_ratio=ratio, cfg_interval=kc)


INTERVALS = [(100, 7, 0.25, 1), (100, 7, 0.25, 4), (3, 2, 0.5, 3), (5, 100, 0.3, 6), (4, 6, 0, 100)]
SETTINGS = [setting(*each) for each in INTERVALS]
SHAPES = [(5, 16, 8, 16), (19, 24, 24, 24), (7, 16, 4, 24)]


@pytest.mark.parametrize("model", [MHA, GQA], ids=lambda model: model.name)
def test_ids_are_those_of_the_written_rules(model):
    compared, outputs = 0, set()
    cases = list(itertools.product(enumerate(SETTINGS), enumerate(SHAPES)))
    # Every shape with the first three settings, and with the last three.
    for (m, cache), (n, (p, g, b, steps)) in cases[6:] if model is MHA else cases[:9]:
        scale = (0.7, 2.0)[(m + n + (model is GQA)) % 2]
        prompt, shape = prompt_of(model, 40 + n, p), {"gen_length": g, "block_length": b, "steps": steps}
        expected = guided(weights_of(model), dims_of(model), prompt, cfg_scale=scale, cache=cache, **shape)
        if not is_decided(expected.margins):
            continue
        found = sample(network(model), [prompt], GenerationConfig(cfg_scale=scale, **shape), cache, tie_policy="stable")
        assert found == [expected.token_ids], (cache, shape, scale)
        compared += 1
        outputs.add((n, scale, expected.token_ids))
    assert compared >= 4
    assert len(outputs) >= compared / 2


def test_without_reuse_it_is_the_guided_sampler():
    compared = 0
    for n, (p, g, b, steps) in enumerate(SHAPES):
        prompt, shape = prompt_of(MHA, 70 + n, p), {"gen_length": g, "block_length": b, "steps": steps}
        expected = llada(weights_of(MHA), dims_of(MHA), prompt, cfg_scale=1.5, draw=None, **shape)
        found = sample(network(MHA), [prompt], GenerationConfig(cfg_scale=1.5, **shape), setting(1, 1, 0, 1))
        if is_decided(expected.margins):
            assert found == [expected.token_ids]
            compared += 1
    assert compared >= 2


def test_a_batch_guides_only_those_who_asked():
    """Unequal prompts and scales, and a second batch behind the first, without guidance and with another start."""
    shape = GenerationConfig(gen_length=16, block_length=8, steps=16)
    cache = setting(5, 4, 0.25, 3)
    asked = [replace(shape, cfg_scale=scale) for scale in (0.0, 1.5, 0.5, 0.0, 0.0, 2.0)]
    prompts = [prompt_of(GQA, 80 + n, p) for n, p in enumerate((3, 41, 17, 17, 8, 8))]
    config = EngineConfig(
        max_num_batched_tokens=10**6, max_num_seqs=3, max_model_len=256, tie_policy="parity", suppress_mask_token=False
    )

    executor = feature_cache_executor(network(GQA), config, cache, batch_size=3)
    engine = Engine(StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=3), executor)
    for i, (prompt, generation) in enumerate(zip(prompts, asked, strict=True)):
        engine.submit(Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation))
    engine.run()
    together = [engine.take_output(i) for i in range(len(prompts))]
    alone = [sample(network(GQA), [p], g, cache)[0] for p, g in zip(prompts, asked, strict=True)]
    assert together == alone
    plain = [sample(network(GQA), [p], shape, cache)[0] for p in prompts]
    assert [a != b for a, b in zip(alone, plain, strict=True)] == [g.cfg_scale > 0 for g in asked]


def test_it_is_not_simulated():
    simulated = FeatureCacheRooflineExecutor(Roofline(LLADA_8B, L40S), EngineConfig(), FeatureCacheConfig())
    request = Request(request_id=0, prompt_len=1, generation=GenerationConfig(cfg_scale=1.5))
    with pytest.raises(UserError, match=r"cfg_scale=1\.5 cannot be simulated"):
        simulated.validate(request)


def test_an_interval_needs_guidance():
    assert method("dllm-cache").sampler("llada", {"cfg_scale": 1.0, "cfg_interval": 4}).features == FeatureCacheConfig(
        cfg_interval=4
    )
    for options in ({"cfg_interval": 4}, {"cfg_interval": 4, "cfg_scale": 0.0}):
        with refuses("cfg_interval=4"):
            method("dllm-cache").sampler("llada", options)
    with pytest.raises(UserError, match=r"cfg_scale=1\.0 has no effect with system='dllm-cache' on a dream model"):
        method("dllm-cache").sampler("dream", {"cfg_scale": 1.0})


def test_its_memory_is_planned():
    shape, sampler = GenerationConfig(gen_length=256), DLLM_CACHE.sampler("llada", {})
    plain, with_guidance = (
        DLLM_CACHE.footprint(LLADA_8B, sampler, generation, memory_bytes=10**11, longest=1024).per_request_bytes
        for generation in (shape, replace(shape, cfg_scale=1.0))
    )
    assert with_guidance - plain == 1024 * memory_bytes_per_token(LLADA_8B) + 256 * LLADA_8B.logits_bytes_per_row
