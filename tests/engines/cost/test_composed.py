"""The composed cost of a dLLM step: its parts by hand from the kernels, and the trial's table of products."""

import pytest

from engines.cost.kernels import ELEMENTWISE_SHARE, Composed, Kernels, load_tables
from engines.cost.roofline import H200, L40S, Calibration, Roofline, StepWork
from engines.models.shape import LLADA_8B, QWEN3_32B

CALIBRATION = Calibration(
    gpu="l40s",
    matmul_efficiency=0.3,
    attention_efficiency=0.3,
    bandwidth_efficiency=0.8,
    step_overhead_s=5e-3,
    fitted_on=(),
    note="made up",
)
KERNELS = Kernels(LLADA_8B, L40S, "vllm")
COST = Composed(KERNELS, CALIBRATION)
REFRESH = StepWork(
    query_rows=512, attention_pairs=512 * 512, logit_rows=32, kv_read_rows=512, kv_written_rows=256, num_sequences=1
)


def test_a_refresh_is_its_layers_a_causal_prompt_of_as_many_pairs_and_its_head():
    cost = COST.step_time(REFRESH)
    assert cost.linear_s == KERNELS.layers_s(512)
    assert cost.attention_s == KERNELS.prompt_s(512 * 512)
    assert cost.logits_s == KERNELS.head_s(32)
    assert cost.overhead_s == 5e-3
    assert cost.total_s == pytest.approx(cost.linear_s + cost.attention_s + cost.logits_s + 5e-3, rel=1e-12)


def test_shares_of_peak_do_not_count_and_the_overhead_does():
    other = Composed(KERNELS, Calibration.datasheet(L40S))
    assert other.step_time(REFRESH).total_s == pytest.approx(COST.step_time(REFRESH).total_s - 5e-3, rel=1e-12)


def test_a_step_of_several_sequences_is_charged_their_mean_attention():
    work = REFRESH._replace(query_rows=1024, attention_pairs=4 * 512 * 512, num_sequences=4)
    assert COST.step_time(work).attention_s == pytest.approx(4 * KERNELS.prompt_s(512 * 512, 4), rel=1e-12)


def test_reading_much_for_few_queries_takes_its_traffic():
    work = REFRESH._replace(query_rows=1, attention_pairs=4096, kv_read_rows=4096, kv_written_rows=0)
    traffic_s = 4096 * LLADA_8B.kv_bytes_per_token / (ELEMENTWISE_SHARE * 864e9)
    assert COST.step_time(work).attention_s == pytest.approx(traffic_s, rel=1e-12)


def test_logits_in_chunks_stream_the_head_again_and_copies_are_traffic():
    chunked = COST.step_time(REFRESH._replace(logit_rows=64, logit_chunks=2))
    assert chunked.logits_s == pytest.approx(2 * KERNELS.head_s(32), rel=1e-12)
    copied = COST.step_time(REFRESH._replace(copied_logit_bytes=LLADA_8B.vocab_rows * 8 * 32))
    copied_s = LLADA_8B.vocab_rows * 8 * 32 / (ELEMENTWISE_SHARE * 864e9)
    assert copied.logits_s == pytest.approx(KERNELS.head_s(32) + copied_s, rel=1e-12)


def test_rows_of_one_layer_more_run_at_the_rate_of_as_many_rows():
    layer_flops = LLADA_8B.linear_flops_per_token // 32
    more = COST.step_time(REFRESH._replace(extra_linear_flops=512 * layer_flops))
    assert more.linear_s == pytest.approx(KERNELS.layers_s(512) + KERNELS.layers_s(1024) / 64, rel=1e-9)


@pytest.mark.parametrize("decoding", [8, 256])
def test_decoding_takes_its_floor_where_the_context_is_short(decoding):
    cost = Composed(Kernels(QWEN3_32B, H200, "vllm"))
    line = cost.decode_line(decoding)
    assert line.base_s < line.floor_s
    assert cost.parts(StepWork(decoding=decoding))[1] == line.floor_s
    _, long_s, _ = cost.parts(StepWork(decoding=decoding, context=10**6))
    assert long_s == line.base_s + line.slope_s * 10**6 > line.floor_s


def test_an_empty_step_takes_nothing_and_bounds_are_the_rooflines():
    empty = StepWork(0, 0, 0, 0, 0, 0)
    assert COST.step_time(empty).total_s == 0.0
    roofline = Roofline(LLADA_8B, L40S, CALIBRATION)
    assert COST.lower_bound_s(REFRESH) == roofline.lower_bound_s(REFRESH)


@pytest.mark.parametrize("rows", [1, 64, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("gpu", [L40S, H200], ids=lambda gpu: gpu.name)
def test_no_step_is_faster_than_the_card_allows(gpu, rows):
    cost = Composed(Kernels(LLADA_8B, gpu, "trtllm"), Calibration.datasheet(gpu))
    work = REFRESH._replace(query_rows=rows, attention_pairs=rows * rows, kv_read_rows=rows, kv_written_rows=0)
    assert cost.step_time(work).total_s > cost.lower_bound_s(work)


@pytest.mark.parametrize(
    ("card", "rows", "trial_ms"),
    [
        # Layer products of LLaDA-8B by an earlier count, in which gate and up were two products of half the width.
        *[
            ("h200", *each)
            for each in ((1, 4.10), (64, 4.21), (256, 5.47), (512, 8.92), (1024, 17.6), (2048, 34.3), (4096, 71.8))
        ],
        *[
            ("l40s", *each)
            for each in ((1, 19.2), (64, 23.7), (256, 25.6), (512, 36.9), (1024, 56.2), (2048, 110.7), (4096, 261.4))
        ],
    ],
)
def test_listed_products_add_up_to_an_earlier_count(card, rows, trial_ms):
    def ms(key: tuple[int, int]) -> float:
        sizes, times = load_tables(card).curve("vllm", "gemm", key)
        return 1e3 * times[sizes.index(rows)]

    total = 32 * (3 * ms((12288, 4096)) + ms((4096, 4096)) + ms((4096, 12288)))
    assert total == pytest.approx(trial_ms, rel=0.02)
