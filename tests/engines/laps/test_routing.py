"""Routers on instances made up: what counts as load, and whom they take of equal ones."""

import itertools
from dataclasses import dataclass

import pytest
from support.prefill import task

from engines.laps.system import (
    InstanceRouter,
    InstancesInTurn,
    LeastRequests,
    LeastTokens,
    LeastTokensInPool,
    LengthClass,
)


@dataclass(frozen=True)
class Instance:
    worker_id: int
    num_requests: int = 0
    backlog_tokens: int = 0
    pool: LengthClass | None = None
    cached: int = 0

    def cached_tokens(self, task: object) -> int:
        return self.cached


ASKED = task(0, 100, history=50)


def picks(router: InstanceRouter, *instances: Instance) -> set[int]:
    """Whatever the order they are listed in."""
    return {router.pick(ASKED, order, 0.0) for order in itertools.permutations(instances)}


def test_instances_in_turn():
    router, instances = InstancesInTurn(), [Instance(7), Instance(3), Instance(5)]
    assert [router.pick(ASKED, instances, 0.0) for _ in range(7)] == [7, 3, 5, 7, 3, 5, 7]


def test_fewest_requests_and_of_equal_ones_the_lowest_id():
    assert picks(LeastRequests(), Instance(1, 3, 0), Instance(2, 2, 900), Instance(3, 4, 0)) == {2}
    assert picks(LeastRequests(), Instance(9, 2), Instance(4, 2), Instance(6, 2), Instance(1, 3)) == {4}


def test_least_tokens_and_of_equal_ones_the_lowest_id():
    assert picks(LeastTokens(), Instance(1, 0, 300), Instance(2, 9, 299), Instance(3, 0, 400)) == {2}
    assert picks(LeastTokens(), Instance(9, 1, 200), Instance(4, 9, 200), Instance(6, 2, 200)) == {4}


@pytest.mark.parametrize(("cached", "expected"), [(19, 1), (20, 1), (21, 2), (50, 2)])
def test_a_history_that_is_there_is_worth_its_tokens(cached, expected):
    for router in (LeastTokens(), LeastTokensInPool(boundary=1000)):
        instances = Instance(1, 0, 100, "short"), Instance(2, 0, 120, "short", cached)
        assert picks(router, *instances) == {expected}


def test_a_request_goes_to_the_pool_of_its_class():
    short, long = Instance(1, 0, 500, "short"), Instance(2, 0, 0, "long")
    # 150 tokens where nothing of its history is: short below the boundary, long at it.
    assert picks(LeastTokensInPool(boundary=151), short, long) == {1}
    assert picks(LeastTokensInPool(boundary=150), short, long) == {2}
    assert picks(LeastTokensInPool(boundary=10), short, long, Instance(0, 0, 0, "long"), Instance(3, 0, 0, "long")) == {
        0
    }


def test_a_history_that_is_there_makes_a_request_short_for_that_instance_alone():
    near, other, long = Instance(1, 0, 900, "short", cached=50), Instance(2, 0, 0, "short"), Instance(3, 0, 0, "long")
    assert picks(LeastTokensInPool(boundary=101), near, other, long) == {1}
    assert picks(LeastTokensInPool(boundary=100), near, other, long) == {3}
