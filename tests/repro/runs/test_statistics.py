from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import data_beside

from engines.errors import UserError
from repro.runs.statistics import (
    Discordance,
    Interval,
    crossed_interval,
    decimals,
    discordance,
    mean_interval,
    paired_ratio,
    points_apart,
    student_t_two_sided,
    wilson_interval,
)

CASES = data_beside(__file__, "cases")


def test_wilson_interval():
    low, high = wilson_interval(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


def test_what_rows_share_is_no_independent_repeat():
    """Of three rows that differ and four columns that do not the interval is that of three means."""
    rows = [1.0, 2.0, 4.0]
    found = crossed_interval([[row] * 4 for row in rows])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half_width == pytest.approx(mean_interval(rows).half_width)


def test_cells_that_share_nothing_are_independent():
    """Where neither effect is larger than what is left."""
    cells = [[1.0, -1.0, 0.5], [-1.0, 0.5, 1.0], [0.5, 1.0, -1.0]]
    found = crossed_interval(cells)
    assert found.half_width == pytest.approx(mean_interval([each for row in cells for each in row]).half_width)


def test_two_effects_add_up():
    """Rows 0 and 2 by columns 0 and 4, with nothing left: mean squares 4 and 16 of one degree each."""
    found = crossed_interval([[0.0, 4.0], [2.0, 6.0]])
    assert found.half_width == pytest.approx(student_t_two_sided(0.95, 1) * np.sqrt((4 + 16) / 4))


@given(n=st.integers(1, 2000), data=st.data())
def test_wilson_interval_holds_the_share_and_mirrors(n, data):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n + 1e-12
    assert k / n - 1e-12 <= high <= 1
    assert wilson_interval(n - k, n) == (pytest.approx(1 - high), pytest.approx(1 - low))


def test_discordance_counts_pairs():
    found = discordance([True, True, False, False, True], [True, False, True, False, False])
    assert (found.n, found.only_first, found.only_second) == (5, 2, 1)
    assert found.p_value == 1.0
    with pytest.raises(ValueError, match="zip"):
        discordance([True], [])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (9, 1), (0, 8), (2, 5)])
def test_mcnemar_is_the_two_sided_coin(first, second):
    """By enumerating every outcome of the discordant problems."""
    found = discordance([True] * first + [False] * second, [False] * first + [True] * second)
    n = first + second
    extreme = sum(min(sum(coins), n - sum(coins)) <= min(first, second) for coins in product((0, 1), repeat=n))
    assert found.p_value == pytest.approx(extreme / 2**n)
    assert discordance([False] * 4, [False] * 4).p_value == 1.0


@pytest.mark.parametrize(
    ("pair", "low", "high"),
    [((0, 0, 10), -16.3, 16.3), ((10, 0, 10), 56.7, 100.0), ((5, 5, 100), -6.4, 6.4), ((0, 30, 100), -38.5, -20.4)],
)
def test_an_interval_of_a_paired_difference(pair, low, high):
    more, fewer, n = pair
    found = points_apart(Discordance(n=n, only_first=more, only_second=fewer))
    assert found.mean == pytest.approx(100 * (more - fewer) / n)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.1), pytest.approx(high, abs=0.1))


# Two-sided 95 % and 99 % points of Student's t, from printed tables.
@pytest.mark.parametrize(("degrees", "at_95", "at_99"), CASES["student t"])
def test_student_t(degrees, at_95, at_99):
    assert student_t_two_sided(0.95, degrees) == pytest.approx(at_95, abs=6e-4)
    assert student_t_two_sided(0.99, degrees) == pytest.approx(at_99, abs=6e-4)


def test_interval():
    # mean 2, s = 1, n = 3: 4.3027 / sqrt(3)
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.half_width == pytest.approx(2.4841, abs=1e-4)
    assert mean_interval([4.0]).half_width is None
    assert mean_interval([]).mean is None
    with pytest.raises(UserError, match=r"confidence=1\.0"):
        mean_interval([1.0, 2.0], confidence=1.0)


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(11)
    covered = 0
    for sample in rng.normal(5.0, 2.0, size=(2000, 4)):
        interval = mean_interval(sample.tolist(), confidence=0.9)
        assert interval.mean is not None
        assert interval.half_width is not None
        covered += abs(interval.mean - 5.0) <= interval.half_width
    # Binomial(2000, 0.9) has a standard deviation of 13.4; four of them.
    assert abs(covered - 1800) < 54


def test_an_interval_of_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, float("inf")])


def test_a_paired_ratio_is_of_logarithms():
    """By hand: logs of 2 and 8 are log 4 -+ log 2, s = log 2 * sqrt(2), t(1) = 12.706; what the seeds share cancels."""
    found = paired_ratio({0: 2.0, 1: 80.0, 2: 7.0}, {1: 10.0, 0: 1.0})
    assert (found.mean, found.n) == (pytest.approx(4.0), 2)
    assert found.bounds == (pytest.approx(4 / 2**12.706, rel=1e-3), pytest.approx(4 * 2**12.706, rel=1e-3))
    other_way = paired_ratio({1: 10.0, 0: 1.0}, {0: 2.0, 1: 80.0})
    assert other_way.mean == pytest.approx(1 / 4)
    assert other_way.low == pytest.approx(1 / found.bounds[1])
    percent = paired_ratio({0: 3.0, 1: 3.3}, {0: 2.0, 1: 2.2}, percent=True)
    assert (percent.mean, percent.low, percent.high) == tuple(pytest.approx(50.0) for _ in range(3))


def test_a_ratio_of_what_is_not_positive_has_no_interval():
    found = paired_ratio({0: 0.0, 1: 4.0}, {0: 2.0, 1: 2.0})
    assert (found.mean, found.half_width, found.low, found.arms) == (1.0, None, None, (0.0, 0.0))
    assert paired_ratio({0: 1.0}, {0: 0.0}).mean is None
    assert paired_ratio({0: 1.0}, {1: 1.0}).mean is None
    alone = paired_ratio({0: 3.0}, {0: 2.0})
    assert (alone.mean, alone.low, alone.n) == (pytest.approx(1.5), None, 1)


def test_a_paired_ratio_covers_as_often_as_it_says():
    """Where the load of a seed moves both alike; unpaired, the same numbers say nothing."""
    rng, covered, unpaired = np.random.default_rng(5), 0, 0
    for load, noise in zip(rng.normal(0, 0.5, (1000, 5)), rng.normal(0, 0.02, (1000, 5)), strict=True):
        theirs = dict(enumerate(np.exp(load)))
        ours = {seed: 1.1 * value * np.exp(noise[seed]) for seed, value in theirs.items()}
        found = paired_ratio(ours, theirs)
        covered += found.low <= 1.1 <= found.high
        unpaired += mean_interval(list(ours.values())).low > mean_interval(list(theirs.values())).high
    assert abs(covered - 950) < 4 * 6.9
    assert unpaired < 10


@pytest.mark.parametrize(
    ("half", "most", "expected"), [(0.066, 2, 2), (0.34, 2, 2), (0.5, 2, 1), (12.8, 1, 0), (4.3, 1, 0), (0.0, 2, 2)]
)
def test_decimals_are_no_finer_than_the_interval(half, most, expected):
    assert decimals(Interval(mean=1.0, half_width=half, n=3, confidence=0.95), most) == expected
