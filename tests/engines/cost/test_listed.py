"""Kernel times of any model follow from those that are listed: held against the extracted ones, and at the ends of the tables."""

from dataclasses import replace

import pytest
from support.refusals import refuses

from engines.cost.kernels import FRAMEWORKS, Kernels, MatrixProduct, cards, experts_of
from engines.cost.listed import between
from engines.cost.roofline import A100, B200, H20, H100, H200, L40S, gpu
from engines.models.shape import (
    LLADA_8B,
    LLAMA_3_1_70B,
    MIXTRAL_8X7B,
    QWEN2_5_7B,
    QWEN3_32B,
    ModelShape,
    ReadShape,
    model_shape,
)


def read(shape: ModelShape, **changes: int) -> ReadShape:
    return ReadShape(**shape.dimensions | changes)


@pytest.mark.parametrize("card", cards())
def test_a_model_takes_as_long_by_what_is_listed_as_by_its_own_table(card):
    """But for the last digit that the tables keep."""
    for framework in FRAMEWORKS:
        for shape, degree in ((QWEN2_5_7B, 1), (QWEN3_32B, 2), (LLAMA_3_1_70B, 4), (MIXTRAL_8X7B, 2)):
            own, found = (Kernels(each.on_rank(degree), gpu(card), framework, degree) for each in (shape, read(shape)))
            for rows in (1, 100, 8192):
                assert found.layers_s(rows) == pytest.approx(own.layers_s(rows), rel=2e-3)
                assert found.head_s(rows) == pytest.approx(own.head_s(rows), rel=2e-3)
                assert found.prompt_s(5e5, rows) == pytest.approx(own.prompt_s(5e5, rows), rel=2e-3)
                assert found.decode_line(rows).at(2048 * rows) == pytest.approx(
                    own.decode_line(rows).at(2048 * rows), rel=2e-3
                )
            assert found.estimated_share(512, 32) == pytest.approx(own.estimated_share(512, 32), abs=2e-3)


@pytest.mark.parametrize("card", [A100, H100, H200], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_decode_of_many_kv_heads_is_no_faster_than_its_kv_can_be_read(card, framework):
    kernels = Kernels(read(LLADA_8B), card, framework)
    for sequences in (1, 16, 128):
        context = 4096 * sequences
        read_s = context * LLADA_8B.kv_bytes_per_token / card.bandwidth
        assert kernels.decode_line(sequences).at(context) > 0.9 * read_s  # a line is fitted to the times


def test_a_decode_with_more_kv_heads_than_are_listed_is_one_of_more_sequences():
    multi, eight = Kernels(read(LLADA_8B), H100, "vllm"), Kernels(read(LLADA_8B, n_heads=8, n_kv_heads=8), H100, "vllm")
    for sequences in (1, 32):
        context = 1000 * sequences
        expected = eight.decode_line(4 * sequences).at(4 * context)
        assert multi.decode_line(sequences).at(context) == pytest.approx(expected, rel=1e-9)
    assert multi.extrapolations(0, 1000) == ["decodes of 32 K/V heads on a card, as of several sequences with fewer"]
    assert not eight.extrapolations(1e6, 1000)
    beyond = "prompts with more pairs than one of 16,384 tokens", "decodes over more than 8,192 tokens"
    assert tuple(eight.extrapolations(2e8, 9000)) == beyond


def test_what_is_not_listed_is_refused_by_name():
    with refuses("head_dim=96"):
        Kernels(read(LLADA_8B, head_dim=96), H100, "vllm").check(("prompt",))
    with refuses("among=7"):
        Kernels(read(MIXTRAL_8X7B, num_experts=7), H100, "vllm")


def test_heads_are_found_between_those_that_are_listed_and_not_beyond():
    listed = {(heads, 4, 1): ((1.0,), (float(heads),)) for heads in (8, 16)}
    assert between(12, 4, listed) == {1: ((1.0,), (12.0,))}
    assert between(4, 4, listed) == between(20, 4, listed) == {}


def test_heads_of_64_have_tables_of_their_own():
    wide, narrow = (Kernels(read(QWEN3_32B, head_dim=dim), H100, "vllm") for dim in (128, 64))
    assert 0.3 < narrow.prompt_s(2e6) / wide.prompt_s(2e6) < 0.8


@pytest.mark.parametrize(
    ("shape", "degree", "least", "most"),
    [
        (LLADA_8B, 1, 0.42, 0.52),
        (QWEN2_5_7B, 1, 0.92, 0.95),
        (LLAMA_3_1_70B, 4, 0.50, 0.58),
        (MIXTRAL_8X7B, 1, 0.0, 0.02),
    ],
)
def test_the_estimated_share_of_known_models(shape, degree, least, most):
    for rows in (64, 512, 4096):
        assert least <= Kernels(shape.on_rank(degree), H200, "vllm", degree).estimated_share(rows, 32) < most


@pytest.mark.parametrize("card", [H200, B200, L40S, H20], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp8_is_no_slower_than_bfloat16_and_gains_in_long_prompts(card, framework):
    """The products of a prompt, and weights of half the size."""
    narrow = replace(QWEN3_32B, precision="fp8")
    plain, fp8 = (Kernels(shape, card, framework) for shape in (read(QWEN3_32B), narrow))
    for rows in (1, 64, 4096):
        assert 0.4 * plain.layers_s(rows) < fp8.layers_s(rows) <= plain.layers_s(rows)
    assert fp8.layers_s(4096) < 0.9 * plain.layers_s(4096)
    assert fp8.layers_s(1) > narrow.streamed_weight_bytes_layers(1) / card.bandwidth
    assert fp8.head_s(64) == plain.head_s(64)


def test_what_the_tables_have_slower_in_fp8_is_capped_and_said():
    """12,288 x 4,096 at 128 rows takes three times as long in blocks as in bfloat16."""
    kernels = Kernels(ReadShape(**LLADA_8B.dimensions | {"precision": "fp8-block"}), H200, "vllm")
    listed = [kernels.tables.curve("vllm", kernel, (12288, 4096)) for kernel in ("gemm", "gemm-fp8-block")]
    assert [round(1e6 * times[sizes.index(128)]) for sizes, times in listed] == [29, 92]
    assert kernels._product_curve(12288, 4096, "fp8-block").at(128) == pytest.approx(29e-6, rel=0.02)
    assert kernels.extrapolations(0, 0) == ["fp8-block where the tables have it slower than bf16, as that"]
    with refuses("precision='fp8' has no kernel times on a100"):
        Kernels(replace(QWEN3_32B, precision="fp8"), A100, "vllm")


def test_routers_of_a_model_in_fp8_stay_in_bfloat16():
    kernels = Kernels(replace(MIXTRAL_8X7B, precision="fp8"), H200, "vllm")
    products = MatrixProduct(8, 4096), MatrixProduct(6144, 4096)
    assert [kernels._precision_of(product) for product in products] == ["bf16", "fp8"]


def test_of_dynamic_scales_attention_stays_in_bfloat16_and_experts_are_as_fast_as_in_blocks():
    tensor, block, dynamic = (
        Kernels(replace(model_shape("Llama-4-Scout"), precision=each).on_rank(2), H100, "vllm", 2)
        for each in ("fp8", "fp8-block", "fp8-dynamic")
    )
    attention, shared = MatrixProduct(3584, 5120), MatrixProduct(8192, 5120)
    assert [dynamic._precision_of(product) for product in (attention, shared)] == ["bf16", "fp8"]
    experts = experts_of(dynamic.shape)
    assert experts is not None
    assert dynamic._experts_curve(*experts).times == block._experts_curve(*experts).times
    # The shared expert's products gain 14 us of a layer at a scale a tensor.
    gained_s = block.layers_s(16) - dynamic.layers_s(16)
    assert 48 * 10e-6 < gained_s < 48 * 20e-6
    assert dynamic.layers_s(16) < tensor.layers_s(16)
