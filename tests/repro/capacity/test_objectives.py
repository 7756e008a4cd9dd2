"""Objectives of a capacity: how they are read, and what pooled percentiles say of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refuses

from engines.cluster.record import GapLog
from engines.errors import UserError
from repro.capacity.objectives import LOAD, Objective, Sample, Times, is_lost, parse_objectives, tightest, verdict_of
from repro.capacity.sites import rounds_within


def test_what_is_read():
    found = parse_objectives("ttft:p95:2000 itl:p99.5:50 ttft:p100:9000")
    assert " ".join(map(str, found)) == "ttft:p95:2000 itl:p99.5:50 ttft:p100:9000"
    assert [tightest(found, *metrics) for metrics in (("ttft", "e2el"), ("itl",), ("e2el",))] == [2.0, 0.05, None]
    assert [each.fewest for each in found] == [20, 200, 1]


def test_itl_has_a_name_by_request_and_one_by_gap():
    found = parse_objectives("itl-request:p95:50 itl-gap:p95:80")
    assert [str(each) for each in found] == ["tpot:p95:50", "itl:p95:80"]
    with refuses("tpot at p95 is given twice"):
        parse_objectives("tpot:p95:50 itl-request:p95:60")


def test_a_metric_that_a_system_lacks_is_refused():
    with refuses("slo=''"):
        parse_objectives("")
    with pytest.raises(UserError, match="itl has no value here"):
        parse_objectives("ttft:p95:10 itl:p95:10", ("ttft",))


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 5)), min_size=1, max_size=30), st.floats(0.5, 100))
def test_percentiles_of_counted_times_are_numpys(pairs, percentile):
    values, counts = (np.array(each) for each in zip(*pairs, strict=True))
    expected = np.percentile(np.repeat(values, counts), percentile)
    assert Times(values.astype(float), counts).percentile(percentile) == pytest.approx(expected, rel=1e-9, abs=1e-9)


GAPS = st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 30)), max_size=6)
STAYS = st.lists(st.tuples(*[st.integers(0, 6)] * 3, st.sampled_from([1.0, 2.0, 3.0])), max_size=8)


@given(GAPS, STAYS)
def test_gaps_that_rounds_share_count_for_each_of_them(gaps, stays):
    places = [(row % 4, *sorted((a % (len(gaps) + 1), b % (len(gaps) + 1))), first) for row, a, b, first in stays]
    row, start, end = np.array([each[:3] for each in places], dtype=np.int64).reshape(-1, 3).T
    gap_s, tokens = np.array(gaps, dtype=np.float64).reshape(-1, 2).T
    first_gap_s = np.array([each[3] for each in places], dtype=np.float64)
    log = GapLog(
        log_gap_s=gap_s, log_tokens=tokens.astype(int), stay_row=row, start=start, end=end, first_gap_s=first_gap_s
    )
    rounds: list[list[float]] = [[], [], [], []]
    for place, begin, stop, first in places:
        rounds[place] += [first, *(each for value, num in gaps[begin:stop] for each in [value] * num)]
    assert sorted(np.repeat(*log.spread())) == sorted(each for own in rounds for each in own)
    assert log.num_gaps(4).tolist() == [len(each) for each in rounds]
    assert rounds_within(log, 4, 2.5).tolist() == [not each or np.percentile(each, 95) <= 2.5 for each in rounds]
    assert log.of_rounds(np.array([True, False, True, True])).num_gaps(4, 2.5).tolist() == [
        0 if place == 1 else sum(value <= 2.5 for value in each) for place, each in enumerate(rounds)
    ]


def test_what_never_came_took_for_ever():
    times = Times.of(np.array([1.0, np.nan, 2.0]))
    assert times.percentile(50) == 2.0
    assert times.percentile(100) == math.inf
    assert times.num_beyond(1.5) == 2
    assert Times.joined([times, times]).num == 6
    assert Times.of(np.array([])).percentile(50) is None


def sample(seconds: list[float], load: float = 0.5) -> Sample:
    times = Times.of(np.array(seconds, dtype=np.float64))
    good = sum(each <= 1.0 for each in seconds)
    return Sample(
        times={"ttft": times},
        num_rounds=len(seconds),
        num_good=good,
        num_sessions=len(seconds),
        num_good_sessions=good,
        longest_s=max(seconds),
        load=load,
        span_s=6.0,
        stay_s=2.0,
    )


HALF = (Objective(metric="ttft", percentile=50, limit_s=1.0),)


def test_seeds_are_judged_together():
    slow, quick = sample([0.5, 2.0, 2.0]), replace(sample([0.1, 0.1, 0.8]), num_sessions=2, num_good_sessions=2)
    both = verdict_of([slow, quick], HALF)
    assert both.values == {"ttft:p50:1000": pytest.approx(0.65)}
    assert both.serves
    assert not verdict_of([slow], HALF).serves
    assert both.attainment == pytest.approx(4 / 6)
    assert both.session_attainment == pytest.approx(3 / 5)
    assert both.longest_s == 2.0
    assert both.stays == 3.0
    assert both.binds == "ttft:p50:1000"


def test_a_load_above_one_is_not_served_whatever_the_latencies():
    verdict = verdict_of([sample([0.1]), sample([0.1], load=1.01)], HALF)
    assert not verdict.serves
    assert verdict.binds == LOAD
    assert is_lost([sample([0.1], load=1.01)], HALF, 3)


@given(
    st.lists(st.lists(st.floats(0, 2), min_size=20, max_size=20), min_size=2, max_size=3), st.sampled_from([50, 75, 90])
)
def test_what_is_lost_early_is_lost_in_the_end(seeds, percentile):
    objectives = (Objective(metric="ttft", percentile=percentile, limit_s=1.0),)
    samples = [sample(each) for each in seeds]
    for num in range(1, len(samples)):
        if is_lost(samples[:num], objectives, len(samples)):
            assert not verdict_of(samples, objectives).serves
            assert not verdict_of(samples[:num], objectives).serves


def test_a_hopeless_first_seed_is_given_up():
    assert is_lost([sample([5.0] * 20)], HALF, 1)
    assert not is_lost([sample([5.0] * 20)], HALF, 3)
