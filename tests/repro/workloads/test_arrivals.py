"""Arrival processes against their closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import UserError
from repro.workloads.draws import ArrivalConfig, arrival_times

RANDOM = [
    ArrivalConfig(kind="poisson", rate=2.0),
    ArrivalConfig(kind="gamma", rate=2.0, burstiness=0.4),
    ArrivalConfig(kind="gamma", rate=2.0, burstiness=3.0),
]


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


@pytest.mark.parametrize("config", RANDOM)
def test_first_arrivals_do_not_depend_on_how_many_there_are(config):
    np.testing.assert_array_equal(arrival_times(config, 300, 5)[:40], arrival_times(config, 40, 5))


@pytest.mark.parametrize("config", RANDOM)
def test_seed_decides(config):
    np.testing.assert_array_equal(arrival_times(config, 50, 5), arrival_times(config, 50, 5))
    assert (arrival_times(config, 50, 5)[1:] != arrival_times(config, 50, 6)[1:]).all()


@given(rate=st.floats(0.01, 100), factor=st.floats(0.1, 10), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_rate_only_stretches(rate, factor, seed):
    slow = arrival_times(ArrivalConfig(kind="poisson", rate=rate), 20, seed)
    fast = arrival_times(ArrivalConfig(kind="poisson", rate=rate * factor), 20, seed)
    np.testing.assert_allclose(fast * factor, slow, rtol=1e-9, atol=1.1e-6 * max(1, factor))


@pytest.mark.parametrize("num", [1, 2, 7])
@pytest.mark.parametrize("config", [*RANDOM, ArrivalConfig(kind="constant", rate=1.0), ArrivalConfig(kind="burst")])
def test_starts_at_zero_and_never_goes_back(config, num):
    times = arrival_times(config, num, 0)
    assert len(times) == num
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()


def test_constant_and_burst():
    assert arrival_times(ArrivalConfig(kind="constant", rate=4.0), 5, 0).tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert arrival_times(ArrivalConfig(kind="burst"), 3, 0).tolist() == [0, 0, 0]


def test_trace_is_replayed_from_its_first_timestamp():
    trace = np.array([10.0, 11.0, 11.5, 16.0])
    config = ArrivalConfig(kind="trace")
    assert arrival_times(config, 3, 0, trace_s=trace).tolist() == [0, 1.0, 1.5]


def test_trace_repeats_with_its_mean_gap_between_rounds():
    trace = np.array([10.0, 11.0, 11.5, 16.0])  # span 6 s, mean gap 2 s
    times = arrival_times(ArrivalConfig(kind="trace"), 6, 0, trace_s=trace)
    assert times.tolist() == [0, 1.0, 1.5, 6.0, 8.0, 9.0]


def test_trace_is_rescaled_by_the_rate_of_the_whole_trace():
    trace = np.array([10.0, 11.0, 11.5, 16.0])  # 0.5 requests/s
    config = ArrivalConfig(kind="trace", rate=2.0)
    assert arrival_times(config, 4, 0, trace_s=trace).tolist() == [0, 0.25, 0.375, 1.5]
    assert arrival_times(config, 2, 0, trace_s=trace).tolist() == [0, 0.25]


def test_trace_without_any_time_in_it_cannot_be_rescaled():
    with pytest.raises(UserError, match="timestamps are all equal"):
        arrival_times(ArrivalConfig(kind="trace", rate=1.0), 2, 0, trace_s=np.array([3.0, 3.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "uniform", "rate": 1.0}, "kind='uniform' is unknown: use one of poisson, gamma"),
        ({"kind": "poisson"}, "rate=None: arrivals='poisson' need a rate"),
        ({"kind": "poisson", "rate": 0.0}, "rate=0.0 must be at least 1e-06"),
        ({"kind": "poisson", "rate": math.inf}, "rate=inf must be a finite number"),
        ({"kind": "poisson", "rate": math.nan}, "rate=nan must be"),
        ({"kind": "poisson", "rate": 1.0, "burstiness": 0.5}, "burstiness=0.5 has no effect when arrivals='poisson'"),
        ({"kind": "gamma", "rate": 1.0, "burstiness": 0.0}, "burstiness=0.0 must be at least 1e-06"),
        ({"kind": "burst", "rate": 1.0}, "request_rate=1.0 has no effect when arrivals='burst'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ArrivalConfig(**options)
