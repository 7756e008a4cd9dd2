"""Measured steps of one shape are summed up."""

from collections.abc import Sequence
from typing import Any

import pytest

from engines.policies.step import Bucket
from repro.prefill.times import Shape, step_shapes, step_times


class Timed:
    """5 ms, then 1 ms a step more."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def timed(self, parts: Sequence[tuple[int, int]], mode: object = None) -> list[float]:
        self.calls.append((tuple(parts), mode))
        return [1e-3 * len(self.calls)]


def test_step_times_are_summed_up():
    shapes = step_shapes((1, 8), ((4, 16),), (0, 100))
    assert [(s.length, s.batch, s.history) for s in shapes] == [
        (1, 1, 0),
        (8, 1, 0),
        (1, 1, 100),
        (8, 1, 100),
        (16, 4, 0),
    ]
    timed = Timed()
    (row,) = step_times(timed, [Shape(length=16, batch=2, history=9, mode=Bucket(16, 2))], repeats=5)
    # Three runs to warm up, then 4 to 8 ms.
    assert (row["min_s"], row["median_s"]) == pytest.approx((4e-3, 6e-3))
    assert row["mode"] == "bucket 16x2"
    assert timed.calls == [(((9, 16), (9, 16)), Bucket(16, 2))] * 8
