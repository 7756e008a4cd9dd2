from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import hardware, profiled

from engines.ampd.performance import (
    BATCHES,
    HISTORIES,
    TOKENS,
    SimulatedProfile,
    fit_piecewise,
    profile,
    profile_hardware,
)
from engines.cluster.hardware import CONSTANTS, PHYSICAL
from engines.errors import UserError
from engines.models.shape import LLAMA_3_1_70B, MIXTRAL_8X7B, QWEN3_32B
from engines.policies.views import Chunk


@settings(max_examples=20)
@given(st.integers(2, 16), st.floats(0.1, 5), st.floats(0.0, 0.02), st.floats(0.05, 2))
def test_knee_of_two_lines_is_found(place, start, flat, steep):
    x = np.arange(1.0, 21.0)
    knee = x[place]
    y = np.where(x <= knee, start + flat * x, start + flat * knee + 2 * start + steep * (x - knee))
    fit = fit_piecewise(x, np.stack([np.ones_like(x), x], axis=1), y)
    assert fit.knees == (knee,)
    assert fit.max_error < 1e-9
    assert fit.at(knee) == pytest.approx((start, flat), abs=1e-9)
    assert fit.at(knee + 1)[1] == pytest.approx(steep)


def test_pieces_are_added_only_as_needed():
    x = np.arange(1.0, 41.0)
    features = np.stack([np.ones_like(x), x], axis=1)
    assert fit_piecewise(x, features, 3 + 0.5 * x).knees == ()
    stairs = np.where(x <= 10, 1.0, np.where(x <= 25, 5.0, 20.0))
    assert fit_piecewise(x, features, stairs).knees == (10.0, 25.0)
    coarse = fit_piecewise(x, features, stairs, max_pieces=2)
    assert len(coarse.knees) == 1
    assert coarse.mean_error > 0.05


@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9))
def test_knees_are_the_best_of_all_places(y):
    """Three pieces over nine points, against every pair of knees."""
    x, times = np.arange(9.0), np.array(y)
    features = np.stack([np.ones_like(x), x], axis=1) / times[:, None]

    def loss(first: int, end: int) -> float:
        rows = features[first:end]
        return float(((rows @ np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0] - 1) ** 2).sum())

    least = loss(0, 3) + loss(3, 6) + loss(6, 9)  # a piece of two features needs three points
    fit = fit_piecewise(x, features * times[:, None], times, max_pieces=3, tolerance=0.0)
    total = sum((np.dot(fit.at(each), (1.0, each)) / time - 1) ** 2 for each, time in zip(x.tolist(), y, strict=True))
    assert total <= least + 1e-9


def test_too_few_measurements_are_refused():
    x = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="too few"):
        fit_piecewise(x, np.stack([np.ones(2), x], axis=1), x)
    with pytest.raises(UserError, match="not positive"):
        fit_piecewise(x, x[:, None], np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("shape", "constants"),
    [(QWEN3_32B, PHYSICAL), (LLAMA_3_1_70B, PHYSICAL), *((MIXTRAL_8X7B, each) for each in CONSTANTS)],
)
def test_error_of_the_fit_is_small_and_reported(shape, constants):
    """1 % on average and 12 % at most, where a long history moves a knee that only l_incr places."""
    platform = hardware(shape, constants)
    degrees = platform.degrees()[::2]
    model = profile_hardware(platform, num_gpus=8, degrees=degrees)
    for degree in degrees:
        fit = model.prefill[degree]
        times = {(h, t): platform.cost(degree).step_s([Chunk(h, t)], 0, 0) for h in HISTORIES for t in TOKENS}
        errors = [abs(model.prefill_s(h, t, degree) / true - 1) for (h, t), true in times.items()]
        assert max(errors) == pytest.approx(fit.max_error, abs=1e-12)
        assert np.mean(errors) == pytest.approx(fit.mean_error, abs=1e-12)
        assert fit.mean_error <= 0.01
    assert model.max_error < 0.12


@settings(max_examples=80)
@given(st.integers(0, 16_000), st.integers(1, 8000), st.sampled_from((2, 4, 8)))
def test_fit_holds_between_the_points_of_its_grid(history, tokens, degree):
    true = PLATFORM.cost(degree).step_s([Chunk(history, tokens)], 0, 0)
    assert MODEL.prefill_s(history, tokens, degree) == pytest.approx(true, rel=0.08)


def test_decode_and_transfer_are_profiled_too():
    for batch in BATCHES:
        true = PLATFORM.cost(4).step_s([], batch, batch * MODEL.decode_context)
        assert MODEL.decode_s(batch, 4) == pytest.approx(true, rel=0.05)
    links = PLATFORM.links
    assert MODEL.transfer_s(777, 2, 8) == pytest.approx(links.transfer_s(777, links.intra, 2, 8), rel=1e-6)
    assert MODEL.transfer_s(0, 2, 8) == 0.0


def test_larger_clusters_are_profiled_across_servers():
    links = PLATFORM.links
    model = profile_hardware(PLATFORM, num_gpus=16, degrees=(4,))
    assert model.transfer_s(5000, 4, 4) == pytest.approx(links.transfer_s(5000, links.inter, 4, 4), rel=1e-6)


def test_real_worker_is_profiled_by_the_same_code():
    """Whatever answers with times: here, one that counts how often it is asked."""
    simulated = SimulatedProfile(hardware=PLATFORM, link=PLATFORM.links.intra)
    asked = []

    class Timed:
        def prefill_s(self, history: int, tokens: int, degree: int) -> float:
            asked.append((history, tokens))
            return simulated.prefill_s(history, tokens, degree)

        decode_s = staticmethod(simulated.decode_s)
        transfer_s = staticmethod(simulated.transfer_s)

    assert profile(Timed(), (4,)) == profile(simulated, (4,))
    assert len(asked) == len(HISTORIES) * len(TOKENS)


PLATFORM = hardware()
MODEL = profiled(num_gpus=8)


def test_a_profile_covers_one_token_to_8192_two_sizes_an_octave():
    assert (TOKENS[0], TOKENS[-1], len(TOKENS)) == (1, 8192, 26)
    assert {2**power for power in range(14)} <= set(TOKENS)
    assert all(1.3 < after / before < 1.55 for before, after in pairwise(TOKENS[2:]))
    assert {0, *(2**power for power in range(8, 15))} == set(HISTORIES)
