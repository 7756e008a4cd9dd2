"""Fits recover planted coefficients, and boundaries are the roots the paper says."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cost.roofline import H200, Gpu
from engines.laps.latency import FloorForm, PaperForm, fit_floor_form, fit_paper_form, fit_paper_totals
from engines.models.shape import QWEN2_5_7B, QWEN2_5_14B, QWEN2_5_32B, ModelShape

GRID = list(product((8, 32, 64, 128, 200, 256, 384, 512, 1024, 2048), (0, 256, 2048, 8192)))
TOKENS = [float(tokens) for tokens, _ in GRID]
HISTORY = [float(history) for _, history in GRID]
forms = st.builds(
    PaperForm,
    alpha=st.floats(1e-10, 1e-7),
    beta=st.floats(1e-7, 1e-4),
    gamma_w=st.floats(1e-9, 1e-4),
    gamma_r=st.floats(1e-9, 1e-5),
)


def comp_s(form: PaperForm, tokens: float, history: float) -> float:
    return form.alpha * tokens * (tokens + 2 * history) + form.beta * tokens


def mem_s(form: PaperForm, tokens: float, history: float) -> float:
    return form.gamma_w * tokens + form.gamma_r * history


def roofline_form(
    shape: ModelShape,
    gpu: Gpu,
    *,
    matmul_efficiency: float = 1.0,
    attention_efficiency: float = 1.0,
    bandwidth_efficiency: float = 1.0,
) -> PaperForm:
    """The coefficients that a GPU's peaks imply; gamma_r / (2 alpha) is then AI* times kv heads over heads."""
    kv_s = shape.kv_bytes_per_token / (gpu.bandwidth * bandwidth_efficiency)
    return PaperForm(
        # A causal prompt attends to L (H + L / 2) pairs: alpha is half the time of one.
        alpha=shape.attention_flops_per_pair / 2 / (gpu.peak_flops * attention_efficiency),
        beta=shape.linear_flops_per_token / (gpu.peak_flops * matmul_efficiency),
        gamma_w=kv_s,
        gamma_r=kv_s,
    )


@given(planted=forms)
def test_the_paper_form_is_recovered_from_separate_times(planted):
    comp = [comp_s(planted, tokens, history) for tokens, history in GRID]
    memory = [mem_s(planted, tokens, history) for tokens, history in GRID]
    found = fit_paper_form(TOKENS, HISTORY, comp, memory)
    for name in ("alpha", "beta", "gamma_w", "gamma_r", "boundary_limit"):
        assert getattr(found, name) == pytest.approx(getattr(planted, name), rel=1e-5)


@given(planted=forms)
def test_from_totals_beta_and_gamma_w_are_one_coefficient(planted):
    total = [comp_s(planted, *point) + mem_s(planted, *point) for point in GRID]
    found = fit_paper_totals(TOKENS, HISTORY, total)
    assert found.beta == pytest.approx(planted.beta + planted.gamma_w, rel=1e-4)
    assert found.gamma_w == 0
    assert found.boundary() == 0


@given(form=forms, history=st.floats(0, 1e6))
def test_the_boundary_is_where_compute_overtakes_memory(form, history):
    boundary = form.boundary(history)
    if history == 0:
        assert boundary == pytest.approx(max(0.0, (form.gamma_w - form.beta) / form.alpha), rel=1e-6, abs=1e-9)
    if boundary > 1e-6:
        assert comp_s(form, boundary, history) == pytest.approx(mem_s(form, boundary, history), rel=1e-6)


@settings(max_examples=20)
@given(
    base=st.floats(0, 5e-3),
    beta=st.floats(1e-5, 1e-4),
    knee=st.sampled_from([96.0, 150.0, 220.0, 300.0, 460.0]),
    alpha=st.floats(1e-10, 1e-8),
    gamma_r=st.floats(0, 1e-6),
)
def test_the_floor_form_is_recovered_from_totals(base, beta, knee, alpha, gamma_r):
    planted = FloorForm(base_s=base, c=beta * knee, beta=beta, alpha=alpha, gamma_r=gamma_r, mean_error=0)
    found = fit_floor_form(TOKENS, HISTORY, [planted.time_s(*point) for point in GRID])
    assert found.boundary == pytest.approx(knee, rel=1e-3)
    assert found.beta == pytest.approx(beta, rel=1e-3)
    assert found.mean_error < 1e-6


def test_without_a_base_the_overhead_is_part_of_the_floor():
    planted = FloorForm(base_s=0.0, c=0.01, beta=4e-5, alpha=1e-9, gamma_r=2e-8, mean_error=0)
    found = fit_floor_form(TOKENS, HISTORY, [planted.time_s(*point) for point in GRID], has_base=False)
    assert found.base_s == 0
    assert found.boundary == pytest.approx(250)


def test_a_floor_that_the_form_lacks_ends_up_in_gamma_r():
    """How the printed form can yield a boundary between 150 and 512: as an artefact, with a bad fit."""
    planted = FloorForm(base_s=0.0, c=0.007, beta=4.1e-5, alpha=1.4e-9, gamma_r=5e-8, mean_error=0)
    total = [planted.time_s(*point) for point in GRID]
    found = fit_paper_totals(TOKENS, HISTORY, total)
    assert found.gamma_r > 5 * planted.gamma_r
    fitted = [comp_s(found, *point) + mem_s(found, *point) for point in GRID]
    assert np.mean(np.abs(np.array(fitted) / total - 1)) > 0.1


def test_the_roofline_gives_no_prefill_boundary_and_41_tokens_of_re_prefill():
    for shape, limit in ((QWEN2_5_7B, 29.4), (QWEN2_5_14B, 41.2), (QWEN2_5_32B, 41.2)):
        form = roofline_form(shape, H200)
        assert form.boundary() == 0
        assert form.boundary_limit == pytest.approx(limit, abs=0.1)
        assert form.boundary(2048) < 4


def test_with_the_weights_read_the_boundary_falls_with_history():
    form = roofline_form(QWEN2_5_14B, H200)
    weights_s = QWEN2_5_14B.streamed_weight_bytes_layers() / H200.bandwidth
    floor = FloorForm(base_s=0, c=weights_s, beta=form.beta, alpha=form.alpha, gamma_r=form.gamma_r, mean_error=0)
    assert floor.boundary == pytest.approx(H200.peak_flops / H200.bandwidth, rel=1e-3)
    found = [floor.boundary_over(history) for history in (0, 512, 2048, 8192, 32768)]
    assert found == pytest.approx([206, 203, 194, 167, 115], abs=1)


def test_without_arithmetic_nothing_overtakes_a_floor():
    idle = FloorForm(base_s=0, c=1e-3, beta=0, alpha=0, gamma_r=0, mean_error=0)
    assert idle.boundary_over(512) == math.inf
    assert FloorForm(base_s=0, c=0, beta=0, alpha=0, gamma_r=0, mean_error=0).boundary_over(512) == 0
