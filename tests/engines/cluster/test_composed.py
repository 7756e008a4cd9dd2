"""The composed cost of a worker's step: by hand from the kernels of a rank, and the questions that a roofline answers."""

from dataclasses import replace

import pytest

from engines.cluster.hardware import PHYSICAL, CostConstants, Hardware, WorkerCost
from engines.cost.kernels import Kernels
from engines.cost.roofline import H200
from engines.errors import UserError
from engines.models.shape import LLAMA_3_1_70B
from engines.policies.views import Chunk

KERNELS = Kernels(LLAMA_3_1_70B.on_rank(4), H200, "sglang", 4)


def composed(constants: CostConstants, *, is_remote: bool = False) -> WorkerCost:
    return WorkerCost(LLAMA_3_1_70B, H200, 4, constants, kernels="sglang", is_remote=is_remote)


COST = composed(PHYSICAL)


def test_a_step_is_layers_attention_head_and_its_overhead():
    chunks = [Chunk(1000, 200), Chunk(0, 300)]
    attention_s = KERNELS.prompt_s(200 * 1000 + 200 * 201 / 2, 2) + KERNELS.prompt_s(300 * 301 / 2, 2)
    attention_s += KERNELS.decode_line(5).at(7000)
    expected_s = KERNELS.layers_s(505) + attention_s + KERNELS.head_s(7) + PHYSICAL.step_overhead_s
    assert COST.step_s(chunks, 5, 7000) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("decoding", [1, 7, 64, 300])
@pytest.mark.parametrize("context", [10, 1000, 9000])
def test_the_line_of_a_decode_is_the_step(decoding, context):
    base_s, slope_s, floor_s = COST.decode_line(decoding)
    line_s = max(base_s + slope_s * decoding * context, floor_s)
    assert line_s == pytest.approx(COST.step_s([], decoding, decoding * context), rel=1e-9)


def test_overheads_of_constants_count_and_their_shares_do_not():
    constants = replace(PHYSICAL, layer_launch_s=1e-3, prefill_overhead_s=0.01, remote_prefill_overhead_s=0.02)
    lone = [Chunk(0, 16)]
    assert composed(constants).step_s(lone, 0, 0) == pytest.approx(80e-3 + 2e-3 + 0.01)
    assert composed(constants, is_remote=True).step_s(lone, 0, 0) == pytest.approx(80e-3 + 2e-3 + 0.03)
    slow = composed(replace(PHYSICAL, matmul_efficiency=0.1, bandwidth_efficiency=0.1))
    assert slow.step_s(lone, 0, 0) == COST.step_s(lone, 0, 0)
    assert composed(constants).decode_line(1).floor_s == pytest.approx(80e-3 + 2e-3)


def test_hardware_makes_the_cost_of_each_degree_once_and_the_links_stay():
    plain = Hardware(shape=LLAMA_3_1_70B, gpu=H200, constants=PHYSICAL)
    hardware = replace(plain, kernels="sglang")
    assert hardware.cost(4) is hardware.cost(4)
    assert hardware.cost(4).step_s([Chunk(0, 512)], 0, 0) == COST.step_s([Chunk(0, 512)], 0, 0)
    assert hardware.cost(8).step_s([Chunk(0, 512)], 0, 0) < hardware.cost(4).step_s([Chunk(0, 512)], 0, 0)
    assert hardware.links == plain.links
    assert hardware.kv_capacity(4) == plain.kv_capacity(4)
    assert hardware != plain  # a cache of profiles must tell them apart


def test_a_mode_is_refused():
    with pytest.raises(UserError, match="this cost model knows one way to run a step"):
        COST.step_s([Chunk(0, 8)], 0, 0, "graph")
