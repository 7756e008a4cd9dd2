"""The step cost against its formulas by hand, and the model fitted to it."""

import pytest
from support.prefill import LINEAR_MODEL, h200_14b

from engines.cost.roofline import H200, RTX4090
from engines.errors import UserError
from engines.laps.batching import GRID, LADDER
from engines.laps.cluster import PrefillConstants, PrefillCost
from engines.laps.latency import StepModel
from engines.models.shape import QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B
from engines.policies.views import FALLBACK, Bucket, Chunk, Rung

COST, MODEL = h200_14b()
MS = 1e-3


def gpu_by_hand(rows: int, heads: int, pairs: float, kv_rows: int) -> float:
    flops, bandwidth = 989.5e12, 4.8e12 * 0.8
    params = 48 * (2 * 5120 * 40 * 128 + 2 * 5120 * 8 * 128 + 3 * 5120 * 13824)
    matrix = max(rows * 2 * params / (flops * 0.65), params * 2 / bandwidth)
    head = max(heads * 2 * 5120 * 152064 / (flops * 0.65), 2 * 5120 * 152064 / bandwidth)
    attention = max(4 * 48 * 40 * 128 * pairs / (flops * 0.35), 48 * 2 * 8 * 128 * 2 * kv_rows / bandwidth)
    return matrix + head + attention


def test_a_small_eager_step_lasts_its_launches():
    assert COST.step_s([Chunk(0, 64)], 0, 0) == pytest.approx(48 * 0.35 * MS + 3 * MS + 0.1 * MS)


def test_a_large_eager_step_hides_its_launches():
    chunks = [Chunk(1000, 900), Chunk(0, 100)]
    gpu = gpu_by_hand(1000, 2, 900 * 1450 + 100 * 50, 2000)
    assert COST.step_s(chunks, 0, 0) == pytest.approx(gpu + 3.2 * MS, rel=1e-3)


def test_launches_in_turn_with_the_gpu_add_up():
    cost = PrefillCost(QWEN2_5_14B, H200, PrefillConstants(overlap="add"))
    assert cost.step_s([Chunk(0, 64)], 0, 0) == pytest.approx(COST.gpu_s([Chunk(0, 64)], 0, 0) + 16.8 * MS + 3.1 * MS)


def test_a_graph_computes_its_padding():
    chunks = [Chunk(500, 20), Chunk(100, 30)]
    gpu = gpu_by_hand(32 * 4, 4, 32 * 600 + 4 * 32 * 16, 600 + 128)
    assert COST.step_s(chunks, 0, 0, Bucket(32, 4)) == pytest.approx(gpu + (3 + 0.2 + 0.6 + 0.15) * MS, rel=1e-3)
    rung = gpu_by_hand(64, 2, 20 * 510 + 30 * 115, 650)
    assert COST.step_s(chunks, 0, 0, Rung(64)) == pytest.approx(rung + 3.95 * MS, rel=1e-3)


def test_looking_in_vain_costs_the_look():
    chunks = [Chunk(0, 700)]
    assert COST.step_s(chunks, 0, 0, FALLBACK) - COST.step_s(chunks, 0, 0) == pytest.approx(0.15 * MS)


def test_the_eager_floor_hides_under_compute_beyond_the_knee():
    knees = {shape.name: PrefillCost(shape, H200) for shape in (QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B)}
    for name, knee in (("Qwen2.5-7B", 482), ("Qwen2.5-14B", 408), ("Qwen2.5-32B", 230)):
        cost = knees[name]
        # Below it a step lasts as long as an empty one.
        assert cost.step_s([Chunk(0, round(knee * 0.95))], 0, 0) == cost.step_s([Chunk(0, 1)], 0, 0)
        assert cost.step_s([Chunk(0, round(knee * 1.05))], 0, 0) > cost.step_s([Chunk(0, 1)], 0, 0)


def test_mixing_costs_kappa_of_the_gpus_time():
    mixed, alike = [Chunk(0, 64), Chunk(0, 1000)], [Chunk(0, 500), Chunk(0, 564)]
    cost = PrefillCost(QWEN2_5_14B, H200, PrefillConstants(kappa=0.25))
    assert cost.gpu_s(mixed, 0, 0) == pytest.approx(1.25 * COST.gpu_s(mixed, 0, 0))
    assert cost.gpu_s(alike, 0, 0) == COST.gpu_s(alike, 0, 0)


def test_decodes_ride_along_in_eager_steps_only():
    assert COST.step_s([Chunk(0, 600)], 32, 32000) > COST.step_s([Chunk(0, 600)], 0, 0)
    base, slope, _ = COST.decode_line(32)
    assert 6.9 * MS < base + slope * 32000 < 30 * MS
    with pytest.raises(UserError, match="captured for prefills alone"):
        COST.step_s([Chunk(0, 60)], 1, 100, Rung(64))


def test_a_shape_too_small_is_refused():
    with pytest.raises(UserError, match="does not hold"):
        COST.step_s([Chunk(0, 65)], 0, 0, Bucket(64, 1))
    with pytest.raises(UserError, match="does not hold"):
        COST.step_s([Chunk(0, 65)], 0, 0, Rung(64))
    with pytest.raises(UserError, match="unknown"):
        COST.step_s([Chunk(0, 65)], 0, 0, "graph")


def test_a_model_that_no_card_holds_is_refused():
    with pytest.raises(UserError, match="use a smaller model"):
        PrefillCost(QWEN2_5_14B, RTX4090)


def test_the_fitted_model_predicts_the_steps_it_has_not_seen():
    steps = [
        ([Chunk(700, 90)], None),
        ([Chunk(0, 333), Chunk(2000, 40)], None),
        ([Chunk(300, 200)] * 20, None),
        ([Chunk(100, 50)] * 3, FALLBACK),
        ([Chunk(800, 60)] * 30, Bucket(64, 32)),
        ([Chunk(800, 100), Chunk(0, 300)], Rung(448)),
    ]
    for chunks, mode in steps:
        assert MODEL.step_s(chunks, 0, 0, mode) == pytest.approx(COST.step_s(chunks, 0, 0, mode), rel=0.03), (
            chunks,
            mode,
        )
    assert MODEL.mean_error < 0.01
    assert MODEL.knee_tokens == pytest.approx(400, rel=0.02)
    assert set(MODEL.shapes) == {*GRID, *LADDER}


def test_the_model_s_formula_by_hand():
    """T = base + request B + max(floor, token N + alpha sum L (L + 2H) + history sum H), and over a graph what histories add."""
    model = StepModel(
        base_s=1.0,
        request_s=0.5,
        floor_s=20.0,
        token_s=2.0,
        alpha=0.25,
        history_s=0.125,
        shapes={Bucket(8, 2): 7.0, Rung(8): 9.0},
    )
    chunks = [Chunk(3, 2), Chunk(0, 4)]
    work = 2.0 * 6 + 0.25 * (2 * (2 + 6) + 4 * 4) + 0.125 * 3
    assert model.step_s(chunks, 0, 0) == 1.0 + 0.5 * 2 + work == 22.375
    assert model.step_s([Chunk(3, 2)], 0, 0) == 1.0 + 0.5 + 20.0
    assert model.step_s(chunks, 0, 0, Bucket(8, 2)) == 7.0 + 0.5 * 2 + 2 * 0.25 * 6 + 0.125 * 3
    assert model.step_s(chunks, 0, 0, Rung(8)) == 9.0 + 0.5 * 2 + 2 * 0.25 * 6 + 0.125 * 3 + 0.25 * (4 + 16)
    assert model.work_s(3, 2) == 0.5 + 2.0 * 2 + 0.25 * 2 * 8 + 0.125 * 3
    assert model.prefill_s(3, 2) == 21.5
    assert model.knee_tokens == 10.0


def test_a_model_without_graphs_has_no_look_to_pay_for():
    chunks = [Chunk(10, 30), Chunk(0, 5)]
    assert LINEAR_MODEL.step_s(chunks, 0, 0, FALLBACK) == LINEAR_MODEL.step_s(chunks, 0, 0) == pytest.approx(0.035)


def test_a_step_of_work_that_hides_the_floor_is_the_sum_of_its_requests():
    chunks = [Chunk(300, 400), Chunk(0, 700)]
    work_s = sum(MODEL.work_s(*chunk) for chunk in chunks)
    assert MODEL.step_s(chunks, 0, 0) == pytest.approx(MODEL.base_s + work_s)
