"""Steps of measured kernels: sums and lines by hand, times moved to another card, and the shapes that curves must have."""

import math
import pickle

import pytest
from support.refusals import refuses

from engines.cost.kernels import (
    BLOCK_FOLDER,
    ELEMENTWISE_S,
    ELEMENTWISE_SHARE,
    FRAMEWORKS,
    Kernels,
    _at_batch,
    has_tables,
    load_tables,
    tables_of,
)
from engines.cost.roofline import A100, B200, H20, H100, H200, L40S, RTX4090
from engines.errors import UserError
from engines.models.shape import (
    LLADA2_FLASH,
    LLADA2_MINI,
    LLADA_8B,
    LLAMA_3_1_70B,
    MIXTRAL_8X7B,
    QWEN2_5_7B,
    QWEN3_32B,
    SDAR_8B,
    SHAPES,
    ModelShape,
)

H200_TABLES = load_tables("h200")


def at(kernel: str, key: tuple[int, ...], size: float) -> float:
    sizes, times = H200_TABLES.curve("vllm", kernel, key)
    return times[sizes.index(size)]


def test_the_layers_are_their_products_and_what_elementwise_kernels_move():
    """By hand for LLaDA-8B and 512 rows: four products, two norms, rotation, K/V store and activation."""
    products = [at("gemm", key, 512) for key in ((12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288))]
    values = 2 * 4 * 4096 + 2 * (4096 + 4096) + 4 * 4096 + 3 * 12288
    elementwise = 5 * ELEMENTWISE_S + 512 * values * 2 / (ELEMENTWISE_SHARE * 4800e9)
    assert Kernels(LLADA_8B, H200, "vllm").layers_s(512) == pytest.approx(32 * (sum(products) + elementwise), rel=1e-12)


def test_between_measured_rows_a_step_is_on_the_line_and_beyond_them_in_proportion():
    kernels = Kernels(LLADA_8B, H200, "vllm")
    low, high = kernels.layers_s(257), kernels.layers_s(512)
    assert kernels.layers_s(400) == pytest.approx(low + (high - low) * (400 - 257) / (512 - 257), rel=1e-12)
    assert kernels.layers_s(65536) == pytest.approx(2 * kernels.layers_s(32768), rel=1e-12)
    assert kernels.layers_s(0) == 0.0


def test_another_process_prices_the_same_steps():
    kernels = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 4)
    kernels.layers_s(1024)
    assert pickle.loads(pickle.dumps(kernels)).layers_s(1024) == kernels.layers_s(1024)


def test_the_step_behind_a_full_tile_is_kept():
    kernels = Kernels(LLADA_8B, L40S, "vllm")
    assert kernels.layers_s(1025) > 1.25 * kernels.layers_s(1024)


def test_a_group_exchanges_activations_twice_a_layer():
    """All-reduces of one row less than those of a table's size: the row of d_model values is the size."""
    with_exchange = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 4)
    without = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 1)
    exchanged = 2 * 80 * at("all-reduce", (4,), 1024 * 8192)
    assert with_exchange.layers_s(1024) - without.layers_s(1024) == pytest.approx(exchanged, rel=1e-9)


def test_experts_take_what_is_tabled_for_them():
    kernels = Kernels(MIXTRAL_8X7B, H200, "vllm")
    dense = [at("gemm", key, 1024) for key in ((6144, 4096), (4096, 4096), (8, 4096))]
    values = 2 * 4 * 4096 + 2 * (4096 + 1024) + 4 * 1024
    elementwise = 4 * ELEMENTWISE_S + 1024 * values * 2 / (ELEMENTWISE_SHARE * 4800e9)
    experts = at("experts", (4096, 14336, 2, 8), 1024)
    assert kernels.layers_s(1024) == pytest.approx(32 * (sum(dense) + experts + elementwise), rel=1e-12)


def test_a_mixture_s_layers_are_its_experts_the_one_every_row_gets_and_dense_ones():
    """By hand for LLaDA2-mini and 1,024 rows: 19 layers of experts, one of an MLP, of tables of their own."""
    tables = load_tables("h200", BLOCK_FOLDER)

    def own(kernel: str, key: tuple[int, ...]) -> float:
        sizes, times = tables.curve("vllm", kernel, key)
        return times[sizes.index(1024)]

    attention = [own("gemm", key) for key in ((3072, 2048), (2048, 2048))]
    shared = [own("gemm", key) for key in ((1024, 2048), (2048, 512))]
    routed = own("gemm", (256, 2048)) + own("experts", (2048, 512, 8, 256))
    dense = [own("gemm", key) for key in ((10240, 2048), (2048, 5120))]
    # Two norms, rotation, K/V store, activation, and norms of queries and keys.
    values = 2 * 4 * 2048 + 4 * (2048 + 512) + 4 * 512

    def small(hidden: int) -> float:
        return 6 * ELEMENTWISE_S + 1024 * (values + 3 * hidden) * 2 / (ELEMENTWISE_SHARE * 4800e9)

    found = Kernels(LLADA2_MINI, H200, "vllm").layers_s(1024)
    experts = sum(attention) + sum(shared) + routed + small(512)
    assert found == pytest.approx(19 * experts + sum(attention) + sum(dense) + small(5120), rel=1e-12)


def test_tables_of_block_diffusion_are_none_that_other_models_rest_on():
    assert tables_of("h200", SDAR_8B).digest != tables_of("h200").digest == tables_of("h200", LLADA_8B).digest
    assert has_tables("h20", LLADA2_MINI)
    assert not has_tables("l40s", LLADA2_MINI)
    with pytest.raises(UserError, match="no gemm of outputs=5120, inputs=4096"):
        Kernels(LLADA2_FLASH, H200, "vllm")


def test_a_prompt_takes_the_time_of_a_causal_one_with_as_many_pairs():
    kernels = Kernels(LLADA_8B, H200, "vllm")
    assert kernels.prompt_s(1024 * 1025 / 2) == pytest.approx(32 * at("prompt", (32, 32, 1), 1024), rel=1e-12)
    # One of eight, of which each is charged an eighth.
    assert kernels.prompt_s(512 * 513 / 2, 8) == pytest.approx(32 * at("prompt", (32, 32, 8), 512) / 8, rel=1e-12)
    # A power law between measured lengths.
    low, high = at("prompt", (32, 32, 1), 512), at("prompt", (32, 32, 1), 1024)
    pairs, power = 200_000.0, math.log(high / low) / math.log((1024 * 1025) / (512 * 513))
    assert kernels.prompt_s(pairs) == pytest.approx(32 * low * (pairs / (512 * 513 / 2)) ** power, rel=1e-12)
    longest = 16384 * 16385 / 2
    assert kernels.prompt_s(3 * longest) == pytest.approx(3 * kernels.prompt_s(longest), rel=1e-12)


@pytest.mark.parametrize(("batch", "seconds"), [(2, 3.0), (4, 3.0), (8, 6.0), (16, 12.0), (32, 24.0)])
def test_between_measured_batches_is_a_power_law_below_them_the_first_and_beyond_in_proportion(batch, seconds):
    rows = {4: ((100.0,), (3.0,)), 16: ((100.0,), (12.0,))}
    assert _at_batch(rows, batch) == {100.0: pytest.approx(seconds)}


def test_decodes_are_on_a_line_near_the_measured_times():
    kernels = Kernels(QWEN3_32B.on_rank(4), H200, "sglang", 4)
    sizes, times = H200_TABLES.curve("sglang", "decode", (16, 2, 32))
    measured = {size: 64 * time for size, time in zip(sizes, times, strict=True)}
    line = kernels.decode_line(32)
    for context in (512, 1024, 2048, 4096, 8192):
        assert line.at(32 * context) == pytest.approx(measured[context], rel=0.15), context
    assert line.at(0) == pytest.approx(min(measured.values()), rel=1e-12)


@pytest.mark.parametrize("card", [L40S, A100, H100, H200, B200, RTX4090, H20], ids=lambda card: card.name)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_model_has_its_kernels_and_more_work_takes_longer(card, framework):
    for shape in SHAPES:
        for degree in (1, 2, 4, 8):
            if shape.n_heads % degree or shape.n_kv_heads % degree:
                continue
            rank = shape.on_rank(degree)
            kernels = Kernels(rank, card, framework, degree)
            layers = [kernels.layers_s(rows) for rows in (1, 256, 4096, 16384)]
            assert layers == sorted(layers)
            # No forward is faster than its weights can be read.
            assert layers[0] > rank.streamed_weight_bytes_layers(1) / card.bandwidth
            prompts = [kernels.prompt_s(length * (length + 1) / 2) for length in (64, 1024, 8192)]
            assert prompts == sorted(prompts)
            assert kernels.head_s(64) > rank.streamed_weight_bytes_head / card.bandwidth


def test_a_card_without_tables_has_those_of_its_generation_by_both_datasheets():
    """A matrix product of many rows is bound by arithmetic on both cards, one of few by memory; the rest is by bandwidth."""
    own, moved = Kernels(LLADA_8B, L40S, "vllm"), Kernels(LLADA_8B, RTX4090, "vllm")
    assert moved.is_transferred
    assert not own.is_transferred
    assert moved.head_s(1) / own.head_s(1) == pytest.approx(864 / 1008, rel=1e-2)
    few, many = moved.layers_s(1) / own.layers_s(1), moved.layers_s(16384) / own.layers_s(16384)
    assert few == pytest.approx(864 / 1008, rel=0.03)
    assert many == pytest.approx(362.05 / 165.2, rel=0.1)  # elementwise kernels are bound by memory still


def test_what_has_no_kernels_is_refused_by_name():
    with refuses("kernels='dynamo'"):
        Kernels(LLADA_8B, H200, "dynamo")
    other = ModelShape(
        name="other",
        d_model=4096,
        n_layers=2,
        n_heads=32,
        n_kv_heads=32,
        head_dim=128,
        mlp_hidden=12288,
        vocab_rows=777,
    )
    with pytest.raises(UserError, match="no gemm of outputs=777, inputs=4096 in its table of h200"):
        Kernels(other, H200, "vllm")
    with pytest.raises(
        UserError, match="has no decode of 32 heads and 32 K/V heads in its table of h200: use cost=roofline"
    ):
        Kernels(LLADA_8B, H200, "vllm").decode_line(8)
    assert Kernels(QWEN2_5_7B, H200, "vllm").decode_line(8).slope_s > 0
