"""Tables of measured kernels: single times, sums by hand, the shapes of curves, other cards, and what is done to measured times."""

import gzip
import pickle
from dataclasses import replace

import numpy as np
import pytest
from support.refusals import refuses

from engines.cost.extract import SPIKE, fill_gaps, spikes, streamed
from engines.cost.kernels import (
    BLOCK_FOLDER,
    ELEMENTWISE_S,
    ELEMENTWISE_SHARE,
    FOLDER,
    FRAMEWORKS,
    KEYS,
    LISTED_FOLDER,
    Composed,
    Kernels,
    _at_batch,
    cards,
    digest_of,
    encode_tables,
    has_tables,
    load_tables,
    tables_of,
    write_tables,
)
from engines.cost.roofline import A100, B200, H20, H100, H200, L40S, RTX4090, Calibration, Roofline, StepWork
from engines.errors import UserError
from engines.models.shape import (
    LLADA2_FLASH,
    LLADA2_MINI,
    LLADA_8B,
    LLAMA_3_1_70B,
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


def test_another_process_prices_the_same_steps():
    kernels = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 4)
    kernels.layers_s(1024)
    assert pickle.loads(pickle.dumps(kernels)).layers_s(1024) == kernels.layers_s(1024)


def test_a_group_exchanges_activations_twice_a_layer():
    """All-reduces of one row less than those of a table's size: the row of d_model values is the size."""
    with_exchange = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 4)
    without = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "vllm", 1)
    exchanged = 2 * 80 * at("all-reduce", (4,), 1024 * 8192)
    assert with_exchange.layers_s(1024) - without.layers_s(1024) == pytest.approx(exchanged, rel=1e-9)


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


def test_every_card_has_every_table_of_every_framework_and_all_are_below_a_megabyte():
    assert cards() == ["a100", "b200", "h100", "h200", "l40s"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10**6
    for card in cards():
        tables = load_tables(card)
        every = {(framework, kernel) for framework in FRAMEWORKS for kernel in KEYS if "fp8" not in kernel}
        assert set(load_tables(card, LISTED_FOLDER).curves) == (set(tables.curves) if card == "a100" else every)
        assert set(tables.curves) == {each for each in every if not each[1].endswith("-64")}


def test_a_table_says_where_it_is_from():
    about = load_tables("h200").about
    assert (about["package"], about["version"], about["system"]) == ("aiconfigurator-core", "0.12.0", "h200_sxm")
    assert about["licence"].startswith("Apache-2.0")
    assert all(len(digest) == 64 for digest in about["files"].values())
    assert about["rules"]["vllm"]["products"] == 483 * 74


@pytest.mark.parametrize(
    ("kernel", "key", "size", "milliseconds"),
    [
        # As they stand in the package: h200_sxm/gemm/vllm/0.24.0, m = 512, and so on.
        ("gemm", (12288, 4096), 512, 0.063819),
        ("gemm", (4096, 4096), 2048, 0.084362),
        ("gemm", (4096, 12288), 1, 0.029684),
        ("prompt", (32, 32, 1), 1024, 0.045211),
        ("prompt", (32, 32, 8), 512, 0.121285),
    ],
)
def test_a_listed_time_is_the_measured_one(kernel, key, size, milliseconds):
    sizes, times = load_tables("h200").curve("vllm", kernel, key)
    assert 1e3 * times[sizes.index(size)] == pytest.approx(milliseconds, rel=5e-4)


def test_what_is_written_is_read_again(tmp_path):
    curves = {("vllm", "gemm"): {(8, 4): ((1.0, 2.0, 1048577.0), (1e-6, 2e-6, 3.456e-3)), (4, 4): ((2.0,), (5e-6,))}}
    content = encode_tables({"card": "mine"}, curves)
    write_tables(tmp_path / "mine.csv.gz", content)
    found = load_tables("mine", tmp_path)
    assert found.about == {"card": "mine"}
    assert found.digest == digest_of(content) == digest_of(gzip.decompress((tmp_path / "mine.csv.gz").read_bytes()))
    sizes, times = found.curve("vllm", "gemm", (8, 4))
    assert sizes == (1.0, 2.0, 1048577.0)
    assert times == pytest.approx((1e-6, 2e-6, 3.456e-3))
    assert found.curve("vllm", "gemm", (4, 4)) == ((2.0,), (pytest.approx(5e-6),))


def test_what_is_missing_is_refused_by_name(tmp_path):
    with refuses("card='h20'"):
        load_tables("h20")
    tables = load_tables("h200")
    with pytest.raises(UserError, match="no gemm of outputs=7, inputs=9 in its table of h200: extract it with"):
        tables.curve("vllm", "gemm", (7, 9))
    write_tables(tmp_path / "mine.csv.gz", encode_tables({}, {("vllm", "gemm"): {(8, 4): ((1.0,), (1e-6,))}}))
    with refuses("kernels='sglang'"):
        load_tables("mine", tmp_path).curve("sglang", "gemm", (8, 4))
    with pytest.raises(UserError, match="no experts table of mine: use one of cost=roofline"):
        load_tables("mine", tmp_path).of("vllm", "experts")


REFRESH = StepWork(
    query_rows=512, attention_pairs=512 * 512, logit_rows=32, kv_read_rows=512, kv_written_rows=256, num_sequences=1
)


def test_parts_of_a_packed_step_by_hand():
    """Logits in chunks stream the head again; sequences are charged their mean attention; a layer more of rows is a 32nd."""
    kernels = Kernels(LLADA_8B, L40S, "vllm")
    work = REFRESH._replace(logit_rows=64, logit_chunks=2, attention_pairs=4 * 512 * 512, num_sequences=4)
    work = work._replace(extra_linear_flops=512 * (LLADA_8B.linear_flops_per_token // 32))
    expected = (
        kernels.layers_s(512) + kernels.layers_s(1024) / 64,
        4 * kernels.prompt_s(512 * 512, 4),
        2 * kernels.head_s(32),
    )
    assert Composed(kernels).parts(work) == pytest.approx(expected, rel=1e-9)


def test_an_empty_step_takes_nothing_and_bounds_are_the_rooflines():
    calibration = replace(Calibration.datasheet(L40S), matmul_efficiency=0.3, step_overhead_s=5e-3)
    cost = Composed(Kernels(LLADA_8B, L40S, "vllm"), calibration)
    assert cost.step_time(StepWork(0, 0, 0, 0, 0, 0)).total_s == 0.0
    assert cost.lower_bound_s(REFRESH) == Roofline(LLADA_8B, L40S, calibration).lower_bound_s(REFRESH)


@pytest.mark.parametrize("rows", [1, 64, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("gpu", [L40S, H200], ids=lambda gpu: gpu.name)
def test_no_step_is_faster_than_the_card_allows(gpu, rows):
    cost = Composed(Kernels(LLADA_8B, gpu, "trtllm"), Calibration.datasheet(gpu))
    work = REFRESH._replace(query_rows=rows, attention_pairs=rows * rows, kv_read_rows=rows, kv_written_rows=0)
    assert cost.step_time(work).total_s > cost.lower_bound_s(work)


ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 256.0, 257.0, 512.0])


def test_a_planted_spike_is_found_and_put_on_the_line_between_its_neighbours():
    times = np.array([[1.0, 1.0, 20.0, 1.2, 1.2, 2.0, 3.0, 3.1]])
    gone = spikes(times)
    assert gone.tolist() == [[False, False, True, False, False, False, False, False]]
    assert fill_gaps(ROWS, times, gone)[0, 2] == pytest.approx(1.0 + 0.2 * (4 - 2) / (8 - 2))


@pytest.mark.parametrize(
    "times",
    [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0],  # the tile behind a full one
        [1.0, 1.0, 1.0, 1.4, 1.6, 1.0, 1.7, 1.8],  # a full tile
        [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0],  # ends have one neighbour
        [1.0, 1.0, SPIKE, 1.0, 1.0, 1.0, 1.0, 1.0],  # noise
    ],
    ids=["tile step", "full tile", "ends", "noise"],
)
def test_what_a_card_may_do_stays(times):
    assert not spikes(np.array([times])).any()


def test_a_product_out_of_the_cache_is_raised_to_what_large_products_stream_at():
    """Ten bytes a second by the datasheet, of which the large product reaches eight; the small one seems to move forty."""
    rows, weights = np.array([1.0, 8.0, 64.0]), np.array([100.0, 8000.0])
    num_bytes = weights[:, None] + np.zeros(3)
    times = np.array([[100 / 40, 100 / 40, 100.0], [1000.0, 1000.0, 1000.0]])
    found = streamed(times, num_bytes, rows, weights, bandwidth=10.0, cache=1000.0)
    assert found.bandwidth == pytest.approx(8.0)
    assert found.times.tolist() == [[12.5, 12.5, 100.0], [1000.0, 1000.0, 1000.0]]
    assert found.impossible.tolist() == [[True, True, False], [False, False, False]]
    assert found.raised.tolist() == [[True, True, False], [False, False, False]]
    # Nor is memory ever taken to be faster than its datasheet.
    one_s, moved = np.array([[1.0, 1.0]]), np.array([[100.0, 100.0]])
    fast = streamed(one_s, moved, np.array([1.0, 2.0]), np.array([100.0]), bandwidth=10.0, cache=1.0)
    assert fast.bandwidth == 10.0
    assert fast.times.tolist() == [[10.0, 10.0]]
