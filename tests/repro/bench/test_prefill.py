"""Measured steps of one shape are summed up; a planted mixing penalty is found, and none is found where there is none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.refusals import refuses

from repro.bench.prefill import interval, mixes, penalties, step_shapes, step_times

FLOOR_S, TOKEN_S = 5e-3, 1e-4


class Planted:
    """T = (floor + token N) (1 + kappa where short and long mix), with noise."""

    def __init__(self, kappa: float, noise: float, boundary: int = 64) -> None:
        self.kappa, self.noise, self.boundary = kappa, noise, boundary
        self.random = np.random.default_rng(0)

    def timed(self, parts: Sequence[tuple[int, int]]) -> list[float]:
        tokens = [tokens for _, tokens in parts]
        is_mixed = min(tokens) < self.boundary <= max(tokens)
        exact = (FLOOR_S + TOKEN_S * sum(tokens)) * (1 + self.kappa * is_mixed)
        return [exact * (1 + self.noise * abs(self.random.normal()))]


def test_mixes_are_every_combination():
    found = mixes((256, 512), (8, 32), (4,))
    longs_and_shorts = [(256, 8, 4), (256, 32, 4), (512, 8, 4), (512, 32, 4)]
    assert [(mix.long, mix.short, mix.shorts) for mix in found] == longs_and_shorts
    assert found[0].parts == [(0, 256), (0, 8), (0, 8), (0, 8), (0, 8)]


@pytest.mark.parametrize("kappa", [-0.1, 0.0, 0.2])
def test_a_planted_penalty_is_recovered(kappa):
    """By hand: long 256, 8 x 32: parts 30.6 and 30.6 ms, floor 5.1 ms, mixed 56.2 ms (1 + kappa)."""
    (row,) = penalties(Planted(kappa, 0.0), mixes((256,), (32,), (8,)), rounds=4)
    assert row["kappa_sum"] == pytest.approx(56.2 * (1 + kappa) / 61.2 - 1)
    assert row["kappa_work"] == pytest.approx(56.2 * (1 + kappa) / 56.1 - 1)
    assert row["noise"] == 0
    assert row["kappa_sum_low"] == pytest.approx(row["kappa_sum"]) == pytest.approx(row["kappa_sum_high"])


def test_intervals_hold_the_truth_under_noise():
    inside = 0
    for kappa in np.linspace(-0.1, 0.3, 9):
        (row,) = penalties(Planted(kappa, 0.05), mixes((256,), (32,), (8,)), rounds=30)
        inside += row["kappa_work_low"] <= 56.2 * (1 + kappa) / 56.1 - 1 <= row["kappa_work_high"]
        assert row["kappa_work_low"] < row["kappa_work"] < row["kappa_work_high"]
        assert 0 < row["noise"] < 0.1
    assert inside >= 7


def test_an_interval_needs_two_rounds():
    with refuses("rounds=1"):
        next(penalties(Planted(0.0, 0.0), mixes((256,), (32,), (8,)), rounds=1))
    middle, low, high = interval(np.arange(11.0), np.random.default_rng(0))
    assert low < middle == 5.0 < high


class Timed:
    """5 ms, then 1 ms a step more."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def timed(self, parts: Sequence[tuple[int, int]]) -> list[float]:
        self.calls.append(tuple(parts))
        return [1e-3 * len(self.calls)]


def test_step_times_are_summed_up():
    shapes = step_shapes((1, 8), ((4, 16),), (0, 100))
    assert shapes == ((1, 1, 0), (1, 8, 0), (1, 1, 100), (1, 8, 100), (4, 16, 0))
    timed = Timed()
    (row,) = step_times(timed, [(2, 16, 9)], repeats=5)
    # Three runs to warm up, then 4 to 8 ms.
    assert (row["min_s"], row["median_s"]) == pytest.approx((4e-3, 6e-3))
    assert timed.calls == [((9, 16), (9, 16))] * 8
