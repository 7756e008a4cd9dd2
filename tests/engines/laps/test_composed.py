"""The composed cost of a prefill step: what a mode computes, and what mixing short and long prompts costs by itself."""

import pytest

from engines.cost.kernels import Kernels
from engines.cost.roofline import H200
from engines.errors import UserError
from engines.laps.cluster import PrefillConstants, PrefillCost
from engines.models.shape import QWEN2_5_14B
from engines.policies.views import Bucket, Chunk, Fallback, Rung

KERNELS = Kernels(QWEN2_5_14B, H200, "sglang")
CONSTANTS = PrefillConstants()
COST = PrefillCost(QWEN2_5_14B, H200, CONSTANTS, "sglang")


def prompts_s(*lengths: int, batch: int | None = None) -> float:
    return sum(KERNELS.prompt_s(length * (length + 1) / 2, batch or len(lengths)) for length in lengths)


def test_a_step_is_layers_attention_and_head_and_launches_hide_under_it():
    gpu_s = KERNELS.layers_s(2100) + prompts_s(2000, 100) + KERNELS.head_s(2)
    assert COST.gpu_s([Chunk(0, 2000), Chunk(0, 100)], 0, 0) == pytest.approx(gpu_s, rel=1e-12)
    fixed_s = CONSTANTS.step_overhead_s + 2 * CONSTANTS.request_overhead_s
    assert COST.step_s([Chunk(0, 2000), Chunk(0, 100)], 0, 0) == pytest.approx(gpu_s + fixed_s, rel=1e-12)
    launched_s = 48 * CONSTANTS.layer_launch_s
    assert COST.step_s([Chunk(0, 8)], 0, 0) == pytest.approx(launched_s + fixed_s - CONSTANTS.request_overhead_s)


def test_a_captured_shape_computes_its_padding():
    bucket = KERNELS.layers_s(4 * 64) + prompts_s(64, 64, 64, 64) + KERNELS.head_s(4)
    assert COST.gpu_s([Chunk(0, 50), Chunk(0, 20)], 0, 0, Bucket(64, 4)) == pytest.approx(bucket, rel=1e-12)
    rung = KERNELS.layers_s(128) + prompts_s(50, 20) + KERNELS.head_s(2)
    assert COST.gpu_s([Chunk(0, 50), Chunk(0, 20)], 0, 0, Rung(128)) == pytest.approx(rung, rel=1e-12)
    lone = COST.gpu_s([Chunk(0, 50)], 0, 0)
    assert COST.gpu_s([Chunk(0, 50)], 0, 0, Fallback()) == lone
    with pytest.raises(UserError, match="does not hold"):
        COST.gpu_s([Chunk(0, 65)], 0, 0, Bucket(64, 4))


def test_decodes_ride_along_and_have_a_line_of_their_own():
    with_decodes = COST.gpu_s([Chunk(0, 500)], 16, 16 * 1000)
    expected = KERNELS.layers_s(516) + prompts_s(500) + KERNELS.decode_line(16).at(16000) + KERNELS.head_s(17)
    assert with_decodes == pytest.approx(expected, rel=1e-12)
    base_s, slope_s, floor_s = COST.decode_line(16)
    alone = KERNELS.layers_s(16) + KERNELS.head_s(16) + CONSTANTS.step_overhead_s + CONSTANTS.graph_launch_s
    assert max(base_s + slope_s * 16000, floor_s) == pytest.approx(alone + KERNELS.decode_line(16).at(16000), rel=1e-12)
