"""Sampling above temperature 0: top_p, top_k and alg_temp draw what closed forms say, in any company."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine_runs import chi_square, run_alone, run_together
from support.tiny_models import GQA, MHA, network, request_on
from torch import Tensor

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduction, Sampling, choose
from engines.dllm.engine import Engine
from engines.dllm.plan import Executor, Request
from engines.dllm.scheduling import KvPool
from engines.runtime.noise import row_keys
from repro.families.dllm.system import method

LOGITS = (0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.25, 1.0)


def sampling(rows: int, **fields: float) -> Sampling:
    """The same settings in every row, with keys of their own; a setting left out is not asked for."""
    asked: dict[str, Tensor] = {
        name: torch.full((rows,), fields[name], dtype=torch.float64) for name in ("top_p", "alg_temp") if name in fields
    }
    if "top_p" in fields or "top_k" in fields:
        asked.setdefault("top_p", torch.ones(rows, dtype=torch.float64))
        asked["top_k"] = torch.full((rows,), int(fields.get("top_k", 10**6)))
    counter, zero = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    return Sampling(
        temperature=torch.full((rows,), fields.get("temperature", 1.0), dtype=torch.float64),
        keys=row_keys(counter, zero, zero),
        random_remasking=torch.zeros(rows, dtype=torch.bool),
        **asked,
    )


def nucleus(logits: list[float], temperature: float, top_p: float, top_k: int) -> set[int]:
    """One token after the other, most probable first and the lower id of equals, until their sum exceeds top_p."""
    weights = [math.exp((z - max(logits)) / temperature) for z in logits]
    kept: list[int] = []
    for token in sorted(range(len(logits)), key=lambda token: (-logits[token], token)):
        if kept and math.fsum(weights[i] for i in kept) / math.fsum(weights) > top_p:
            break
        kept.append(token)
    return set(kept[:top_k])


def test_the_sum_of_a_nucleus_has_to_exceed_top_p():
    pair = sampling(1, top_p=0.5).allowed_tokens(torch.zeros(1, 2), None)  # an exact sum
    assert pair is not None
    assert pair.all()


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.sampled_from((0.3, 1.0, 2.5)),
    st.sampled_from((1e-6, 0.123, 0.317, 0.657, 0.903, 0.991, 1.0)),
    st.integers(1, 14),
)
def test_the_kept_tokens_are_the_shortest_prefix(halves, temperature, top_p, top_k):
    logits = [half / 2 for half in halves]
    kept = sampling(1, temperature=temperature, top_p=top_p, top_k=top_k).allowed_tokens(torch.tensor([logits]), None)
    assert kept is not None
    assert set(kept[0].nonzero()[:, 0].tolist()) == nucleus(logits, temperature, top_p, top_k)


def test_a_suppressed_token_takes_no_place_in_the_nucleus():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for temperature in (1.0, 1e-310):
        kept = sampling(1, temperature=temperature, top_p=0.5, top_k=2).allowed_tokens(logits, 0)
        assert kept is not None
        assert kept.tolist() == [[False, True, False, False]]
    assert logits[0, 0] == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{"top_p": 0.85}, {"top_k": 3}, {"top_p": 0.9, "top_k": 4}], ids=str)
@pytest.mark.parametrize("confidence_of", ["model", "sampler"])
def test_tokens_are_drawn_from_what_is_kept(cut, temperature, confidence_of):
    num = 20_000
    asked = sampling(num, temperature=temperature, **cut)
    token, confidence = Reduction(confidence_of=confidence_of)(torch.tensor([LOGITS]).repeat(num, 1), asked)
    kept = sorted(nucleus(list(LOGITS), temperature, cut.get("top_p", 1.0), int(cut.get("top_k", 8))))
    assert 1 < len(kept) < len(LOGITS)
    counts = torch.bincount(token, minlength=len(LOGITS)).numpy()
    assert counts[kept].sum() == num

    scaled = torch.tensor(LOGITS, dtype=torch.float64)[kept] / temperature
    exact = torch.softmax(scaled, dim=0).numpy()
    assert abs(chi_square(counts[kept], exact)) < 4
    # The same statistic tells a neighbouring temperature apart, so it can fail.
    assert chi_square(counts[kept], torch.softmax(scaled / 1.2, dim=0).numpy()) > 4

    whole = torch.softmax(torch.tensor(LOGITS, dtype=torch.float64), dim=0)
    expected = dict(zip(kept, exact, strict=True)) if confidence_of == "sampler" else dict(enumerate(whole.tolist()))
    torch.testing.assert_close(
        confidence.double(), torch.tensor([expected[i] for i in token.tolist()]).double(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("confidence", ["margin", "neg_entropy"])
def test_dreams_other_confidences_are_of_the_distribution_drawn_from(confidence):
    asked = sampling(1, temperature=0.5, top_k=3)
    _, found = Reduction(confidence=confidence, confidence_of="sampler")(torch.tensor([LOGITS]), asked)
    p = torch.softmax(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64) / 0.5, dim=0)
    expected = p[0] - p[1] if confidence == "margin" else (p * p.log()).sum()
    torch.testing.assert_close(found.double()[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [None, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_overflows_nothing(dtype, top_p):
    logits = torch.tensor([[-60.0, 50.0, 49.0, 0.0]], dtype=dtype)
    asked = sampling(1, temperature=1e-310, **({} if top_p is None else {"top_p": top_p}))
    for confidence in ("max_prob", "margin", "neg_entropy"):
        token, found = Reduction(confidence=confidence, confidence_of="sampler")(logits.clone(), asked)
        assert token.tolist() == [1]
        assert found.dtype == torch.float32
        assert abs(float(found[0]) - (confidence != "neg_entropy")) < 1e-6


@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
@pytest.mark.parametrize("suppress", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_row_is_the_same_bits_next_to_sampled_ones(confidence, suppress, dtype):
    logits = (4 * torch.randn(40, 96, generator=torch.Generator().manual_seed(2))).to(dtype)
    hot = torch.arange(40) % 3 == 0
    asked = sampling(40, top_p=0.8, top_k=5, alg_temp=0.5)
    assert asked.alg_temp is not None
    mixed = replace(
        asked, temperature=torch.where(hot, 0.7, 0.0).double(), alg_temp=torch.where(hot, asked.alg_temp, 0)
    )
    for confidence_of in ("model", "sampler"):
        reduction = Reduction(confidence=confidence, confidence_of=confidence_of, suppress_id=suppress)
        alone, together = reduction(logits.clone(), None), reduction(logits.clone(), mixed)
        assert all(torch.equal(a[~hot], b[~hot]) for a, b in zip(alone, together, strict=True))
        assert not torch.equal(alone[1][hot], together[1][hot])


# ---- which positions are committed ---------------------------------------------------------------


@pytest.mark.parametrize("alg_temp", [0.2, 1.0])
@pytest.mark.parametrize("count", [1, 2])
def test_positions_are_draws_without_replacement(alg_temp, count):
    """Draws from softmax(confidence / alg_temp), one after the other."""
    num, confidence = 20_000, [0.9, 0.35, 0.6, 0.5]
    asked = sampling(num * 4, alg_temp=alg_temp)
    ranked = asked.remasked(torch.tensor(confidence).repeat(num))
    chosen = choose(ranked.view(num, 4), torch.full((num,), count))
    p = torch.softmax(torch.tensor(confidence, dtype=torch.float64) / alg_temp, dim=0).tolist()
    sets = list(combinations(range(4), count))
    if count == 1:
        exact = np.array(p)
    else:
        exact = np.array([p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in sets])
    assert abs(exact.sum() - 1) < 1e-12
    codes = (chosen.long() * torch.tensor([1, 2, 4, 8])).sum(dim=1)
    counts = np.array([int((codes == sum(2**i for i in members)).sum()) for members in sets])
    assert counts.sum() == num
    assert abs(chi_square(counts, exact)) < 4
    assert chi_square(counts, np.full(len(sets), 1 / len(sets))) > 4


def test_positions_tokens_and_random_confidences_are_drawn_apart():
    """One key serves all three; what one stream drew says nothing of the others."""
    num = 20_000
    asked = sampling(num, alg_temp=1.0)
    flat = torch.zeros(num, 2)
    token, noise = Reduction()(flat.clone(), asked)
    _, drawn = Reduction()(
        flat.clone(), replace(asked, alg_temp=None, random_remasking=torch.ones(num, dtype=torch.bool))
    )
    for a, b in ((token.double(), noise.double()), (token.double(), drawn.double()), (noise.double(), drawn.double())):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 4 / math.sqrt(num)


# ---- whole generations ---------------------------------------------------------------------------

Ids = tuple[int, ...]


def padded(config: EngineConfig, batch_size: int) -> Executor:
    return padded_executor(network(GQA), config, 0, batch_size=batch_size)


def feature_cache(config: EngineConfig, batch_size: int) -> Executor:
    return feature_cache_executor(network(GQA), config, FeatureCacheConfig(gen_interval=3), batch_size=batch_size)


@pytest.mark.parametrize("build", [padded, feature_cache])
def test_members_of_a_static_batch_sample_what_they_would_alone(build):
    chosen = method("llada").sampler("llada", {})
    shape = GenerationConfig(gen_length=12, block_length=6, steps=12)
    asked = [
        shape,
        replace(shape, temperature=1.0, top_p=0.6, seed=3),
        replace(shape, temperature=0.5, top_k=2, seed=1),
        replace(shape, temperature=2.0, seed=2),
    ]
    members = [request_on(GQA, i, 5 + 7 * i, generation) for i, generation in enumerate(asked)]

    def outputs_of(batch: list[Request]) -> dict[int, Ids]:
        config = EngineConfig(
            max_num_batched_tokens=10**6,
            max_num_seqs=len(batch),
            max_model_len=64,
            decode=chosen.decode,
            suppress_mask_token=False,
        )
        scheduler = StaticBatchScheduler(config, KvPool(0), chosen.rule, batch_size=len(batch))
        return run_together(Engine(scheduler, build(config, len(batch))), [(0, member) for member in batch])

    together = outputs_of(members)
    assert len(set(together.values())) == len(members)
    for member in members:
        assert outputs_of([member])[member.request_id] == together[member.request_id], member


def on(system: str, family: str, options: dict[str, object], seed: int = 0, **generation: object) -> Ids:
    asked = GenerationConfig(gen_length=12, block_length=6, steps=12, seed=seed, **generation)
    return run_alone(MHA, method(system).sampler(family, options), request_on(MHA, 0, 9, asked, seed=seed))


@pytest.mark.parametrize("system", ["llada", "dllm-serve"])
def test_a_nucleus_of_one_token_is_greedy_at_any_temperature(system):
    for seed in range(4):
        greedy = on(system, "llada", {}, seed=seed)
        assert on(system, "llada", {}, seed=seed, temperature=3.0, top_k=1) == greedy
        assert on(system, "llada", {}, seed=seed, temperature=3.0, top_p=1e-9) == greedy
        assert on(system, "llada", {}, seed=seed, temperature=3.0) != greedy


def test_alg_temp_changes_the_order_and_a_tiny_one_does_not():
    dream = ("dream", "dream", {"alg": "entropy"})
    for seed in range(4):
        ranked = on(*dream, seed=seed)
        assert on(*dream, seed=seed, alg_temp=1e-9) == ranked
        assert on(*dream, seed=seed, alg_temp=5.0) != ranked


def test_a_nucleus_of_every_token_is_no_nucleus():
    plain = on("llada", "llada", {}, temperature=1.0)
    assert on("llada", "llada", {}, temperature=1.0, top_p=1.0, top_k=MHA.vocab) == plain
    assert on("llada", "llada", {}, temperature=1.0, top_k=2**31 - 1) == plain
    assert on("llada", "llada", {}, temperature=1.0, top_p=0.3) != plain


# ---- confidence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("scale", [1, 8, 40])
def test_confidence_is_the_softmax_in_the_logits_dtype(dtype, suppress, scale):
    """To the bit, however large the logits: exp(logit - logsumexp) rounds as the largest logit does, which swaps and
    levels confidences that published code tells apart."""
    logits = (torch.randn(64, 97, generator=torch.Generator().manual_seed(scale)) * scale).to(dtype)
    suppress_id = int(logits[0].argmax()) if suppress else None
    token, confidence = Reduction(suppress_id=suppress_id)(logits.clone(), None)
    allowed = logits.clone()
    if suppress_id is not None:
        allowed[:, suppress_id] = -torch.inf
    assert torch.equal(token, allowed.argmax(dim=-1))
    wanted = torch.softmax(logits, dim=-1)[torch.arange(64), token]
    assert torch.equal(confidence, wanted.float())
    _, wide = Reduction(suppress_id=suppress_id, dtype="float64")(logits.clone(), None)
    assert torch.equal(wide, torch.softmax(logits.double(), dim=-1)[torch.arange(64), token])


def test_close_confidences_of_large_logits_are_told_apart():
    _, narrow = Reduction()(torch.tensor([[20.0, 17.5], [20.0, 16.5]], dtype=torch.bfloat16), None)
    assert narrow.tolist() == [0.92578125, 0.96875]
    _, single = Reduction()(torch.tensor([[48.0, 35.0], [48.0, 34.0]]), None)
    assert single[0] < single[1] < 1
