"""Arrival processes against their closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import data_beside

from engines.errors import UserError
from repro.workloads.draws import ArrivalConfig, arrival_times

REFUSED = data_beside(__file__, "refused")


def kolmogorov_distance(sample: np.ndarray, cdf: np.ndarray) -> float:
    """sup |F_n - F| where ``cdf`` is F at the sorted sample."""
    assert (np.diff(sample) >= 0).all()
    n = len(sample)
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_poisson_gaps_are_exponential(seed):
    rate, n = 0.5, 5000
    times = arrival_times(ArrivalConfig(kind="poisson", rate=rate), n + 1, seed)
    gaps = np.sort(np.diff(times))
    distance = kolmogorov_distance(gaps, 1 - np.exp(-rate * gaps))
    assert distance < 1.63 / math.sqrt(n)  # the 1 % critical value
    assert kolmogorov_distance(gaps, 1 - np.exp(-1.1 * rate * gaps)) > 1.63 / math.sqrt(n)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_variation_of_their_burstiness(burstiness):
    n, rate = 20_000, 4.0
    gaps = np.diff(arrival_times(ArrivalConfig(kind="gamma", rate=rate, burstiness=burstiness), n + 1, 0))
    variation = burstiness**-0.5
    assert gaps.mean() == pytest.approx(1 / rate, rel=4 * variation / math.sqrt(n))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06)


@given(rate=st.floats(0.01, 100), factor=st.floats(0.1, 10), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_rate_only_stretches(rate, factor, seed):
    slow = arrival_times(ArrivalConfig(kind="poisson", rate=rate), 20, seed)
    fast = arrival_times(ArrivalConfig(kind="poisson", rate=rate * factor), 20, seed)
    np.testing.assert_allclose(fast * factor, slow, rtol=1e-9, atol=1.1e-6 * max(1, factor))


def test_trace_without_any_time_in_it_cannot_be_rescaled():
    with pytest.raises(UserError, match="timestamps are all equal"):
        arrival_times(ArrivalConfig(kind="trace", rate=1.0), 2, 0, trace_s=np.array([3.0, 3.0]))


@pytest.mark.parametrize(("options", "message"), REFUSED["arrivals"])
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ArrivalConfig(**options)
