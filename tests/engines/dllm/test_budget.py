"""Memory plans: exact numbers for the paper's two cards, and what must hold for any."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refuses

from engines.dllm import memory
from engines.dllm.config import EngineConfig, GenerationConfig, SparsityConfig
from engines.dllm.memory import concurrency, divide_memory, logit_rows_at_once
from engines.dllm.sequence import cache_rows
from engines.models.shape import DREAM_7B, LLADA_8B

GB = 10**9
CONFIG_4090 = EngineConfig(max_num_batched_tokens=4000, max_num_logits=2048)
PAPER_REQUEST = GenerationConfig(gen_length=256, block_length=32)


def test_decomposed_plan_of_24_gb_by_hand():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed")
    assert plan.weights_bytes == 16_031_162_368
    assert plan.activation_bytes == 4000 * 112 * 1024
    assert plan.logits_bytes == 2 * 2048 * 126_464 * 2
    assert plan.guard_bytes == 1_200_000_000
    assert plan.kv_bytes == 5_274_092_544
    assert plan.kv_rows == 10_059


def test_logits_without_a_softmax_copy():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed")
    fused = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed", logit_copies=1)
    assert plan.logits_bytes == 2 * fused.logits_bytes == 2 * (fused.kv_bytes - plan.kv_bytes)


def test_fewer_batched_tokens_than_max_num_logits_need_no_more_rows():
    config = EngineConfig(max_num_batched_tokens=1000, max_num_logits=2048)
    assert logit_rows_at_once(config, "decomposed") == logit_rows_at_once(config, "monolithic") == 1000


def test_measured_activations_replace_the_formula():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed", activations_measured_bytes=123)
    assert plan.activation_bytes == 123
    assert sum_of_parts(plan) == 24 * GB


def sum_of_parts(plan):
    return plan.weights_bytes + plan.activation_bytes + plan.logits_bytes + plan.guard_bytes + plan.kv_bytes


CONFIGS = st.builds(EngineConfig, max_num_batched_tokens=st.integers(1, 40_000), max_num_logits=st.integers(1, 40_000))


@given(CONFIGS, st.integers(1, 200 * GB), st.sampled_from([LLADA_8B, DREAM_7B]))
def test_parts_are_the_whole_and_decomposition_never_costs_memory(config, memory, shape):
    plans = {mode: divide_memory(shape, memory, config, logit_rows=mode) for mode in ("decomposed", "monolithic")}
    for plan in plans.values():
        assert sum_of_parts(plan) == memory
        assert plan.fits == (plan.kv_bytes >= 0)
        assert (
            0 <= plan.kv_bytes - plan.kv_rows * shape.kv_bytes_per_token < shape.kv_bytes_per_token or plan.kv_rows == 0
        )
    freed = plans["decomposed"].kv_bytes - plans["monolithic"].kv_bytes
    rows = max(0, config.max_num_batched_tokens - config.max_num_logits)
    assert freed == rows * shape.logits_bytes_per_row * 2


def test_a_row_is_had_from_its_last_byte_on(monkeypatch):
    monkeypatch.setattr(memory, "GUARD_FRACTION", 0.0)
    needed = (
        LLADA_8B.weight_bytes
        + 16384 * LLADA_8B.activation_bytes_per_query_token
        + 2 * 2048 * LLADA_8B.logits_bytes_per_row
        + 2064 * LLADA_8B.kv_bytes_per_token
    )
    plans = [divide_memory(LLADA_8B, each, EngineConfig(), logit_rows="decomposed") for each in (needed, needed - 1)]
    assert [plan.kv_rows for plan in plans] == [2064, 2063]


def test_rows_of_the_papers_request():
    """556 tokens, block 32, r = 0.5: 262 of the 524 context rows and the block."""
    assert cache_rows(556, PAPER_REQUEST, SparsityConfig(retention_ratio=0.5)) == 262 + 32


@pytest.mark.parametrize(
    ("total", "generation", "sparsity", "rows"),
    [
        (100, GenerationConfig(gen_length=64), SparsityConfig(selection="dense"), 100),
        (100, GenerationConfig(gen_length=64), SparsityConfig(retention_ratio=1.0), 100),
        (100, GenerationConfig(gen_length=50), SparsityConfig(retention_ratio=0.1), 6 + 32),
        # One block shorter than block_length: 12 of its own, half of the 88 others.
        (100, GenerationConfig(gen_length=12), SparsityConfig(retention_ratio=0.5), 44 + 12),
        (32, GenerationConfig(gen_length=32), SparsityConfig(retention_ratio=0.5), 32),
        (33, GenerationConfig(gen_length=32), SparsityConfig(retention_ratio=0.01), 1 + 32),
    ],
)
def test_cache_rows(total, generation, sparsity, rows):
    assert cache_rows(total, generation, sparsity) == rows


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 64), st.floats(0.01, 1))
def test_no_block_needs_more_rows_than_its_request_holds(prompt, gen, block, retention):
    generation = GenerationConfig(gen_length=gen, block_length=block, steps=gen)
    sparsity = SparsityConfig(retention_ratio=retention)
    needs = []
    for start in range(0, gen, block):
        own = min(block, gen - start)
        needs.append(sparsity.kept_rows(prompt + gen - own) + own)
    assert cache_rows(prompt + gen, generation, sparsity) == max(needs)


def test_total_length_includes_the_generation():
    with refuses("total_len=100"):
        cache_rows(100, PAPER_REQUEST, SparsityConfig())


def test_concurrency_is_capped_by_rows_and_by_slots():
    plan = divide_memory(LLADA_8B, 24 * GB, CONFIG_4090, logit_rows="decomposed")
    assert concurrency(plan, CONFIG_4090, 556, PAPER_REQUEST) == 10_059 // 294 == 34
    assert concurrency(plan, replace(CONFIG_4090, max_num_seqs=8), 556, PAPER_REQUEST) == 8
