"""The cost of a worker's step: against the roofline of one GPU, by hand, and of each degree from kernels."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clusters import TimedCost, hardware, session
from support.refusals import refuses

from baselines.ar.vllm import vllm
from engines.cluster.hardware import (
    CONSTANTS,
    PHYSICAL,
    TRIAL_R2,
    Deployment,
    EngineTimes,
    FreshCost,
    Hardware,
    WorkerCost,
    cost_constants,
)
from engines.cluster.sessions import OpenLoop
from engines.cost.roofline import H20, H200, Calibration, Gpu, Roofline, StepWork
from engines.models.shape import LLAMA_3_1_70B, MIXTRAL_8X7B, QWEN2_5_7B, QWEN3_32B, ModelShape
from engines.policies.batching import Chunked
from engines.policies.views import Chunk

BARE = replace(PHYSICAL, step_overhead_s=0.0)
SHAPES = (QWEN2_5_7B, QWEN3_32B, LLAMA_3_1_70B, MIXTRAL_8X7B)


def roofline(shape: ModelShape, gpu: Gpu) -> Roofline:
    return Roofline(
        shape,
        gpu,
        Calibration(
            gpu=gpu.name,
            matmul_efficiency=BARE.matmul_efficiency,
            attention_efficiency=BARE.attention_efficiency,
            bandwidth_efficiency=BARE.bandwidth_efficiency,
            step_overhead_s=0.0,
            fitted_on=(),
            note="the same shares",
        ),
    )


@given(
    shape=st.sampled_from(SHAPES),
    gpu=st.sampled_from((H20, H200)),
    history=st.integers(0, 20_000),
    tokens=st.integers(1, 8192),
)
def test_prefill_is_the_roofline_of_one_gpu(shape, gpu, history, tokens):
    work = StepWork(
        query_rows=tokens,
        attention_pairs=tokens * history + tokens * (tokens + 1) // 2,
        logit_rows=1,
        kv_read_rows=history + tokens,
        kv_written_rows=tokens,
        num_sequences=1,
    )
    expected = roofline(shape, gpu).step_time(work).total_s
    assert TimedCost(shape, gpu, 1, BARE).prefill_s(history, tokens) == pytest.approx(expected, rel=1e-9)


@given(
    shape=st.sampled_from(SHAPES),
    gpu=st.sampled_from((H20, H200)),
    batch=st.integers(1, 700),
    context=st.integers(1, 10_000),
)
def test_decode_is_the_roofline_of_one_gpu(shape, gpu, batch, context):
    work = StepWork(
        query_rows=batch,
        attention_pairs=batch * context,
        logit_rows=batch,
        kv_read_rows=batch * context,
        kv_written_rows=batch,
        num_sequences=batch,
    )
    expected = roofline(shape, gpu).step_time(work).total_s
    cost = TimedCost(shape, gpu, 1, BARE)
    assert cost.decode_s(batch, batch * context) == pytest.approx(expected, rel=1e-9)
    assert cost.step_s([], batch, batch * context) == pytest.approx(expected, rel=1e-9)


@given(
    shape=st.sampled_from(SHAPES),
    constants=st.sampled_from(CONSTANTS),
    degree=st.sampled_from((1, 2, 4)),
    kernels=st.sampled_from((None, "sglang")),
    batch=st.integers(1, 600),
    context=st.integers(1, 10**6),
)
def test_decode_line_is_the_step_without_prefills(shape, constants, degree, kernels, batch, context):
    cost = TimedCost(shape, H20, degree, constants, kernels=kernels)
    assert cost.decode_s(batch, context) == pytest.approx(cost.step_s([], batch, context), rel=1e-12)


def test_decode_step_of_llama_by_hand():
    """TP 4, 35 % of bandwidth: the weights take 25 ms, 8,000 tokens of K/V 0.5 ms, launches less."""
    assert cost_constants("Trial-R2") is TRIAL_R2
    cost = TimedCost(LLAMA_3_1_70B, H20, 4, TRIAL_R2)
    bandwidth = 4e12 * 0.35 * 4
    weights = (LLAMA_3_1_70B.streamed_weight_bytes_layers() + LLAMA_3_1_70B.streamed_weight_bytes_head) / bandwidth
    kv = (8000 + 8) * 327_680 / bandwidth
    logits = 8 * 2 * LLAMA_3_1_70B.logits_bytes_per_row / bandwidth
    reduces = 2 * 80 * (12e-6 + 8 * 8192 * 2 * 2 * (3 / 4) / (450e9 * 0.7))
    assert cost.decode_s(8, 8000) == pytest.approx(weights + kv + logits + 2e-3 + reduces, rel=1e-9)
    assert cost.decode_s(8, 8000) == pytest.approx(29.2e-3, rel=0.02)


def test_launches_are_a_floor_overheads_come_on_top_and_tensor_parallelism_loses():
    costly = replace(BARE, layer_launch_s=1e-3, prefill_overhead_s=7e-3, remote_prefill_overhead_s=5e-3)
    for is_remote, expected_s in ((False, 28e-3 + 7e-3), (True, 28e-3 + 12e-3)):
        assert TimedCost(QWEN2_5_7B, H200, 1, costly, is_remote=is_remote).prefill_s(0, 16) == pytest.approx(expected_s)
    assert TimedCost(QWEN2_5_7B, H200, 1, costly).decode_s(1, 100) == pytest.approx(28e-3)
    free = replace(BARE, all_reduce_latency_s=0.0)
    for degree, slower in ((1, 1.0), (2, 1.2), (8, 1.6)):  # 1 + loss log2 n, but for what moves
        lossy = TimedCost(LLAMA_3_1_70B, H20, degree, replace(free, tensor_parallel_loss=0.2)).decode_s(1, 1)
        assert lossy == pytest.approx(slower * TimedCost(LLAMA_3_1_70B, H20, degree, free).decode_s(1, 1), rel=0.01)


@pytest.mark.parametrize(
    ("shape", "degrees"), [(QWEN3_32B, (1, 2, 4, 8)), (LLAMA_3_1_70B, (2, 4, 8)), (MIXTRAL_8X7B, (2, 4, 8))]
)
def test_degrees_that_fit_an_h20(shape, degrees):
    assert hardware(shape).degrees() == degrees


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: hardware(LLAMA_3_1_70B).degrees(min_kv_tokens=10**8), "does not fit 8 x h20"),
        (
            lambda: replace(hardware(LLAMA_3_1_70B), kv_tokens=100).degrees(min_kv_tokens=101),
            "kv_tokens=100 is less than the 101 tokens",
        ),
        (lambda: TimedCost(LLAMA_3_1_70B, H20, 3, PHYSICAL), "degree=3"),
        (lambda: TimedCost(QWEN2_5_7B, H200, 1, BARE).step_s([], 1, 1, "graph"), "mode='graph'"),
        (lambda: cost_constants("nope"), "constants='nope'"),
    ],
)
def test_what_cannot_be_is_refused(do, says):
    with refuses(says):
        do()


def test_transfer_takes_the_ports_of_the_smaller_group():
    links = hardware(LLAMA_3_1_70B).links
    size = 1000 * 327_680
    assert links.transfer_s(1000, links.intra, 4, 8) == pytest.approx(1e-3 + size / (450e9 * 0.7 * 4))
    assert links.transfer_s(1000, links.inter, 8, 2) == pytest.approx(1e-3 + size / (25e9 * 0.8 * 2))
    assert links.transfer_s(0, links.inter, 8, 2) == 0


COST = WorkerCost(LLAMA_3_1_70B, H200, 4, PHYSICAL, kernels="sglang")


def test_hardware_makes_the_cost_of_each_degree_once_and_the_links_stay():
    plain = Hardware(shape=LLAMA_3_1_70B, gpu=H200, constants=PHYSICAL)
    hardware = replace(plain, kernels="sglang")
    assert hardware.cost(4) is hardware.cost(4)
    assert hardware.cost(4).step_s([Chunk(0, 512)], 0, 0) == COST.step_s([Chunk(0, 512)], 0, 0)
    assert hardware.cost(8).step_s([Chunk(0, 512)], 0, 0) < hardware.cost(4).step_s([Chunk(0, 512)], 0, 0)
    assert hardware.links == plain.links
    assert hardware.kv_capacity(4) == plain.kv_capacity(4)
    assert hardware != plain  # a cache of profiles must tell them apart


CHUNKS, DECODING = (Chunk(0, 300), Chunk(16, 200)), 5


def engine_cost(shape: ModelShape = LLAMA_3_1_70B, **times: float) -> WorkerCost:
    return WorkerCost(shape, H20, 1, replace(BARE, engine=EngineTimes(**times)))


def test_an_engine_hides_its_host_behind_longer_kernels():
    bare = engine_cost()
    step_s, line = bare.step_s(CHUNKS, DECODING, 4000), bare.decode_line(DECODING)
    shorter, longer = engine_cost(host_s=0.9 * step_s), engine_cost(host_s=1.5 * step_s)
    assert shorter.step_s(CHUNKS, DECODING, 4000) == step_s
    assert longer.step_s(CHUNKS, DECODING, 4000) == pytest.approx(1.5 * step_s)
    assert longer.decode_line(DECODING).floor_s >= 1.5 * step_s > line.floor_s
    each = engine_cost(sequence_s=1e-3)
    assert each.step_s(CHUNKS, DECODING, 4000) == pytest.approx(step_s + 7e-3)
    assert each.decode_line(DECODING).base_s == pytest.approx(line.base_s + 5e-3)


def test_products_alone_of_mixtures_alone_take_a_share():
    for shape in (LLAMA_3_1_70B, MIXTRAL_8X7B):
        whole, part = engine_cost(shape), engine_cost(shape, experts_share=0.5)
        spared_s = whole.step_s(CHUNKS, DECODING, 4000) - part.step_s(CHUNKS, DECODING, 4000)
        linear_s, _, _ = whole.price.parts(StepWork(prompts=CHUNKS, decoding=DECODING, context=4000))
        assert spared_s == pytest.approx(linear_s / 2 if shape is MIXTRAL_8X7B else 0.0)


def test_draws_from_a_part_of_the_vocabulary_sort_logits():
    bare, drawn = engine_cost(), engine_cost(draw_s=3e-3, logit_s=1e-9)
    step_s, line = bare.step_s(CHUNKS, DECODING, 4000), bare.decode_line(DECODING)
    logits_s = 1e-9 * LLAMA_3_1_70B.vocab_rows
    assert drawn.step_s(CHUNKS, DECODING, 4000) == pytest.approx(step_s + 3e-3 + 7 * logits_s)
    assert drawn.decode_line(DECODING).base_s == pytest.approx(line.base_s + 3e-3 + 5 * logits_s)


def test_a_fresh_server_compiles_each_kernel_of_experts_once():
    cost, compiled = TimedCost(MIXTRAL_8X7B, H20, 4, BARE), 0
    fresh = FreshCost(cost, MIXTRAL_8X7B, 10.0, max_num_seqs=128, max_num_batched_tokens=2048)
    for rows, is_new in (
        (256, False),  # from a graph
        (257, True),
        (264, False),  # as graphs of 8, 16, ... 256 rows
        (260, True),
        (571, True),
        (573, False),
        (576, True),
        (580, True),
        (640, False),
        (780, True),  # the next size, of four rows
        (2048, False),  # as the step before it answers
        (2044, True),
    ):
        chunks = (Chunk(0, rows - 3),)
        waited_s = fresh.step_s(chunks, 3, 900) - cost.step_s(chunks, 3, 900)
        assert waited_s == pytest.approx(10.0 if is_new else 0.0), rows
        compiled += is_new
    assert compiled == 7


@pytest.mark.parametrize(("precision", "compiles"), [("bf16", True), ("fp8-block", False)])
def test_experts_in_bfloat16_alone_are_compiled(precision, compiles):
    constants = replace(PHYSICAL, engine=EngineTimes(compile_s=1.0))
    fresh = replace(hardware(constants=constants), shape=replace(MIXTRAL_8X7B, precision=precision))
    assert isinstance(fresh.run_cost(4, Chunked()), FreshCost) == compiles


@pytest.mark.parametrize("at_s", [0.02, 0.3])
def test_an_engine_that_plans_ahead_lets_a_request_wait_for_the_step_after(at_s):
    def first_s(*, max_run_steps: int = sys.maxsize, **times: bool) -> list[float]:
        constants = replace(PHYSICAL, engine=EngineTimes(**times))
        cluster = vllm(hardware(constants=constants), Deployment.colocated(4, 1))
        sessions = [session(0, 0.0, (3000, 400)), session(1, at_s, (500, 20)), session(2, 60.0, (500, 20))]
        run = cluster.simulate(OpenLoop(sessions=sessions), max_run_steps=max_run_steps)
        assert run.rounds["finished_s"][0] > at_s
        return run.rounds["first_token_s"]

    at_once, ahead = first_s(), first_s(schedules_ahead=True)
    cost = hardware(constants=PHYSICAL).cost(4)
    step_s = cost.decode_line(1).floor_s
    # Neither the first nor one that comes to an idle engine waits.
    assert ahead[0] == at_once[0]
    assert ahead[2] - 60.0 == pytest.approx(at_once[2] - 60.0)
    assert ahead[1] - at_once[1] == pytest.approx(step_s, rel=0.1)
    assert first_s(schedules_ahead=True, max_run_steps=1) == pytest.approx(ahead)


def test_a_client_is_away_from_the_workers_by_what_its_engine_says():
    def times(**times: float) -> tuple[list[float], list[float]]:
        constants = replace(PHYSICAL, engine=EngineTimes(**times))
        cluster = vllm(hardware(constants=constants), Deployment.colocated(4, 1))
        run = cluster.simulate(OpenLoop(sessions=[session(0, 0.0, (500, 20, 1.0), (300, 10))]))
        return run.rounds["first_token_s"], run.rounds["finished_s"]

    first_s, end_s = times()
    away_first_s, away_end_s = times(request_s=0.25, response_s=0.5)
    assert away_first_s == pytest.approx([first_s[0] + 0.75, first_s[1] + 1.5])
    assert away_end_s == pytest.approx([end_s[0] + 0.75, end_s[1] + 1.5])


def test_tokens_that_are_asked_for_are_of_workers_that_hold_the_weights():
    room = 4 * 96e9 * 0.85 - LLAMA_3_1_70B.weight_bytes
    assert hardware(LLAMA_3_1_70B).kv_capacity(4) == int(room / 327_680)
    asked = replace(hardware(), kv_tokens=123)
    held = {degree: hardware().kv_capacity(degree) for degree in (1, 2, 4, 8)}
    assert {degree: asked.kv_capacity(degree) for degree in held} == {
        degree: tokens if tokens < 1 else 123 for degree, tokens in held.items()
    }
    assert min(held.values()) < 1 < max(held.values())
