"""The search over plans and rates, against functions whose answers are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.capacity.search import MOST_RATE, Lattice, climb, fewest, largest

LATTICE = Lattice(resolution=0.05)


def test_rates_of_a_lattice_are_a_step_apart():
    for step in range(-100, 100):
        assert LATTICE.rate(step + 1) / LATTICE.rate(step) == pytest.approx(1.05, rel=1e-3)
        assert LATTICE.step(LATTICE.rate(step)) == step


@given(st.integers(-200, 250), st.integers(-150, 200))
def test_a_climb_finds_the_last_step_that_is_served(top, start):
    ends = (-190, 240)
    asked = []

    def serves(step: int) -> bool:
        asked.append(step)
        return step <= top

    expected = None if top < ends[0] else min(top, ends[1])
    assert climb(serves, start, ends) == expected
    assert all(ends[0] <= step <= ends[1] for step in asked)
    distance = 1 + abs((ends[0] if expected is None else expected) - start)
    assert len(asked) <= 4 + 2 * math.log2(distance + 1)
    if expected is not None and ends[0] < expected < ends[1]:
        assert {expected, expected + 1} <= {*asked}


plans = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.01, 1e4), min_size=1, max_size=8)


@given(plans, st.floats(0.02, 50))
def test_the_best_plan_is_found_wherever_the_search_begins(capacities, off):
    """Fifty times too high or too low."""
    start = off * max(capacities.values())

    def serves(plan: str, step: int, is_whole: bool) -> bool:
        return LATTICE.rate(step) <= capacities[plan]

    found = largest([*capacities], lambda plan: 1.01 * capacities[plan], serves, LATTICE, start)
    best = max(capacities.values())
    assert found is not None
    assert LATTICE.rate(found.step) <= capacities[found.plan] < LATTICE.rate(found.step + 1)
    assert LATTICE.rate(found.step) <= best < LATTICE.rate(found.step + 1)
    assert found.is_monotone


def test_a_plan_whose_bound_is_below_the_best_is_not_simulated():
    asked = []

    def serves(plan: str, step: int, is_whole: bool) -> bool:
        asked.append(plan)
        return LATTICE.rate(step) <= 10

    assert largest(["a", "b"], {"a": math.inf, "b": 9.0}.__getitem__, serves, LATTICE, 5.0).plan == "a"
    assert {*asked} == {"a"}


@given(plans, st.floats(0.02, 50))
def test_no_rate_above_a_plans_bound_is_simulated(capacities, off):
    def serves(plan: str, step: int, is_whole: bool) -> bool:
        assert LATTICE.rate(step) <= capacities[plan]
        return True

    found = largest([*capacities], capacities.__getitem__, serves, LATTICE, off * max(capacities.values()))
    if found is not None:
        assert LATTICE.rate(found.step) <= max(capacities.values()) < LATTICE.rate(found.step + 1)


def test_the_lowest_rate_is_asked_for_where_steps_near_the_start_fail():
    asked = []

    def serves(step: int) -> bool:
        asked.append(step)
        return step <= -2

    assert climb(serves, 0, (-100, 100)) == -2
    assert -100 not in asked
    asked.clear()
    assert climb(lambda step: serves(step + 20), 0, (-100, 100)) == -22
    assert asked.count(-100 + 20) == 1


def test_a_plan_that_only_one_seed_favours_loses():
    """The first seed has a ahead; all seeds b."""
    capacities = {("a", False): 20.0, ("b", False): 19.0, ("a", True): 10.0, ("b", True): 15.0}
    found = largest(
        ["a", "b"],
        lambda _: math.inf,
        lambda plan, step, is_whole: LATTICE.rate(step) <= capacities[plan, is_whole],
        LATTICE,
        5.0,
    )
    assert found.plan == "b"
    assert LATTICE.rate(found.step) <= 15 < LATTICE.rate(found.step + 1)


def test_a_hole_below_the_answer_is_said():
    found = largest(["a"], lambda _: math.inf, lambda plan, step, _: 0.9 * 20 < LATTICE.rate(step) <= 20, LATTICE, 19.0)
    assert LATTICE.rate(found.step) <= 20 < LATTICE.rate(found.step + 1)
    assert not found.is_monotone


def test_nothing_serves_and_everything_is_served():
    assert largest(["a"], lambda _: math.inf, lambda *_: False, LATTICE, 5.0) is None
    found = largest(["a"], lambda _: math.inf, lambda *_: True, LATTICE, 5.0)
    assert LATTICE.rate(found.step) == pytest.approx(MOST_RATE, rel=0.05)


@given(st.lists(st.integers(1, 500), min_size=1, unique=True).map(sorted), st.integers(1, 600))
def test_the_fewest_gpus_are_found(sizes, needed):
    asked = []

    def serving(gpus: int) -> str | None:
        asked.append(gpus)
        return "plan" if gpus >= needed else None

    expected = next((gpus for gpus in sizes if gpus >= needed), None)
    found = fewest(sizes, serving)
    assert (None if found is None else found[0]) == expected
    assert len(asked) == len({*asked}) <= 2 + math.log2(len(sizes))
    if expected is not None and expected != sizes[0]:
        assert sizes[sizes.index(expected) - 1] in asked


def test_no_sizes_hold_nothing():
    assert fewest([], lambda _: "plan") is None
