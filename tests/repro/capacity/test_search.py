"""The search over plans and rates, against functions whose answers are known."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.capacity import answers
from repro.capacity.answers import MOST_RATE, Lattice, climb, fewest
from repro.capacity.objectives import Sample, Times, parse_objectives
from repro.capacity.sites import Plan, Ranked
from repro.runs.tuning import Space, best_choices

LATTICE = Lattice(resolution=0.05)


def largest(plans, *given):
    return answers.largest(lambda race: race(plans, None), *given)


def test_rates_of_a_lattice_are_a_step_apart():
    for step in range(-100, 100):
        assert LATTICE.rate(step + 1) / LATTICE.rate(step) == pytest.approx(1.05, rel=1e-3)
        assert LATTICE.step(LATTICE.rate(step)) == step


def test_steps_are_those_between_rates():
    for step in range(-100, 100, 7):
        assert LATTICE.steps(LATTICE.rate(10) / LATTICE.rate(step)) == pytest.approx(10 - step, abs=0.02)
    assert LATTICE.steps(1.0) == 0
    assert [LATTICE.steps(ratio) for ratio in (0.0, math.inf)] == [-math.inf, math.inf]


def exact(margin: float) -> float:
    return margin


def blind(margin: float) -> float:
    """Tells no more than whether a step is served."""
    return 0.0 if margin >= 0 else -1e-3


def sure(margin: float) -> float:
    return math.copysign(math.inf, margin)


def bent(margin: float) -> float:
    """As a latency: flat where little waits, and steep beyond the knee."""
    return min(margin, 3.0) if margin >= 0 else 40 * margin


TOLD = (exact, blind, sure, bent)
ENDS = (-190, 240)


@pytest.mark.parametrize("told", TOLD)
@given(top=st.integers(-200, 250), start=st.integers(-150, 200))
def test_a_climb_finds_the_last_step_that_is_served_whatever_margins_tell(told, top, start):
    asked = []

    def margin(step: int) -> float:
        asked.append(step)
        return told(top + 0.5 - step)

    expected = None if top < ENDS[0] else min(top, ENDS[1])
    assert climb(margin, start, ENDS) == expected
    assert len(asked) == len({*asked})
    assert all(ENDS[0] <= step <= ENDS[1] for step in asked)
    if expected is not None and ENDS[0] < expected < ENDS[1]:
        assert {expected, expected + 1} <= {*asked}
    # At worst strides that double until the step is passed, and two steps to halve what is between.
    assert len(asked) <= (3 if told is exact else 3 + 3 * math.log2(ENDS[1] - ENDS[0]))


@given(st.integers(-180, 230), st.integers(-150, 200), st.data())
def test_a_climb_finds_it_with_margins_at_random(top, start, data):
    def margin(step: int) -> float:
        size = data.draw(st.floats(0, 1e3))
        return size if step <= top else -size - 1e-9

    assert climb(margin, start, ENDS) == top


plans = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.01, 1e4), min_size=1, max_size=8)


def proportional(capacity: float, step: int) -> float:
    return LATTICE.steps(capacity / LATTICE.rate(step))


@pytest.mark.parametrize("told", TOLD)
@given(capacities=plans, off=st.floats(0.02, 50))
def test_the_best_plan_is_found_wherever_the_search_begins(told, capacities, off):
    """Fifty times too high or too low; of equals the first."""
    start = off * max(capacities.values())

    def margin(plan: str, step: int, is_whole: bool) -> float:
        return told(proportional(capacities[plan], step))

    found = largest([*capacities], lambda plan: 1.01 * capacities[plan], margin, LATTICE, start)
    tops = {plan: LATTICE.last(capacity) for plan, capacity in capacities.items()}
    assert found is not None
    assert (found.plan, found.step) == (max(tops, key=lambda plan: tops[plan]), max(tops.values()))
    assert found.is_monotone


@given(plans, st.floats(0.5, 2), st.data())
def test_the_best_of_all_seeds_is_found_whatever_one_says(capacities, off, data):
    """One seed is off by a tenth."""
    first = {plan: capacity * data.draw(st.floats(0.9, 1.1)) for plan, capacity in capacities.items()}

    def margin(plan: str, step: int, is_whole: bool) -> float:
        return proportional(capacities[plan] if is_whole else first[plan], step)

    found = largest([*capacities], lambda _: math.inf, margin, LATTICE, off * max(capacities.values()))
    assert found is not None
    assert found.step == max(LATTICE.last(capacity) for capacity in capacities.values())
    assert LATTICE.last(capacities[found.plan]) == found.step


def test_a_plan_whose_bound_is_below_the_best_is_not_simulated():
    asked = []

    def margin(plan: str, step: int, is_whole: bool) -> float:
        asked.append(plan)
        return proportional(10, step)

    assert largest(["a", "b"], {"a": math.inf, "b": 9.0}.__getitem__, margin, LATTICE, 5.0).plan == "a"
    assert {*asked} == {"a"}


@given(plans, st.floats(0.02, 50))
def test_no_rate_above_a_plans_bound_is_simulated(capacities, off):
    def margin(plan: str, step: int, is_whole: bool) -> float:
        assert LATTICE.rate(step) <= capacities[plan]
        return 0.0

    found = largest([*capacities], capacities.__getitem__, margin, LATTICE, off * max(capacities.values()))
    if found is not None:
        assert LATTICE.rate(found.step) <= max(capacities.values()) < LATTICE.rate(found.step + 1)


def test_the_lowest_rate_is_asked_for_where_steps_near_the_start_fail():
    asked = []

    def margin(step: int) -> float:
        asked.append(step)
        return blind(-2 - step)

    assert climb(margin, 0, (-100, 100)) == -2
    assert -100 not in asked
    asked.clear()
    assert climb(lambda step: margin(step + 20), 0, (-100, 100)) == -22
    assert asked.count(-100 + 20) == 1
    asked.clear()
    assert climb(lambda step: margin(step + 200), 0, (-100, 100)) is None
    assert len(asked) == 5


ONE_SEED_SAYS = {
    "the first seed has a ahead; all seeds b": ((20.0, 19.0), (10.0, 15.0), 5.0, "b", 15),
    "one seed puts a far below": ((2.0, 20.0), (30.0, 20.0), 19.0, "a", 30),
}


@pytest.mark.parametrize("case", ONE_SEED_SAYS)
def test_all_seeds_decide_between_plans(case):
    first, whole, start, best, capacity = ONE_SEED_SAYS[case]

    def margin(plan: str, step: int, is_whole: bool) -> float:
        return proportional((whole if is_whole else first)["ab".index(plan)], step)

    found = largest(["a", "b"], lambda _: math.inf, margin, LATTICE, start)
    assert (found.plan, found.step) == (best, LATTICE.last(capacity))


def test_a_hole_below_the_answer_is_said():
    found = largest(
        ["a"],
        lambda _: math.inf,
        lambda plan, step, _: blind(1 if 0.9 * 20 < LATTICE.rate(step) <= 20 else -1),
        LATTICE,
        19.0,
    )
    assert LATTICE.rate(found.step) <= 20 < LATTICE.rate(found.step + 1)
    assert not found.is_monotone


def test_nothing_serves_and_everything_is_served():
    assert fewest([], lambda _: "plan") is None
    assert largest(["a"], lambda _: math.inf, lambda *_: -math.inf, LATTICE, 5.0) is None
    found = largest(["a"], lambda _: math.inf, lambda *_: math.inf, LATTICE, 5.0)
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
    assert len(asked) == len({*asked}) <= 3 + math.log2(len(sizes)) + math.log2(10)
    if expected is not None and expected != sizes[0]:
        assert sizes[sizes.index(expected) - 1] in asked


@given(st.data())
def test_a_search_finds_the_best_where_choices_do_not_hang_together_and_races_none_twice(data):
    """Of 3 x 4 combinations without a default and 5 x 2 settings with one: each worth its own, and some impossible."""
    sizes, defaults = (3, 4, 5, 2), (False, False, True, True)
    axes = tuple(
        tuple(() if has_default and not n else ((f"k{place}", n),) for n in range(size))
        for place, (size, has_default) in enumerate(zip(sizes, defaults, strict=True))
    )
    worth = {setting: data.draw(st.integers(0, 50)) for axis in axes for setting in axis if setting}
    space = Space(axes)
    bad = (axes[0][2], axes[1][1])
    raced = []

    def value(choices):
        return sum(worth.get(each, 7) for each in choices)

    def race(some, best):
        raced.extend(some)
        return max([*([best] if best else []), *some], key=value)

    def is_possible(choices):
        return choices[:2] != bad

    found = best_choices(space, is_possible, race, lambda: sorted(raced, key=value, reverse=True))
    every = [each for first in space.joint(2) for each in (first, *space.neighbours(first))]
    assert space.num == 120
    assert len(raced) == len({*raced}) < 60
    assert not any(each[:2] == bad for each in raced)
    assert value(found) >= max(value(each) for each in every if is_possible(each))
    assert all(value(each) <= value(found) for each in space.neighbours(found) if is_possible(each))


@pytest.mark.parametrize(
    ("about", "is_behind"),
    [
        ({"ax": 50.0, "bx": 46.0}, True),
        ({"ax": 50.0, "bx": 49.0}, False),
        ({"ax": 50.0, "bx": 50.0}, True),
        ({"ax": 50.0, "bx": 46.0, "az": 49.0, "bz": 48.5}, False),
        ({"ax": 44.0, "bx": 40.0, "ay": 50.0}, False),
        ({"ax": 50.0}, False),
    ],
)
def test_a_choice_that_cost_much_or_nothing_is_not_tried_again(about, is_behind):
    """By what is known of others, is the plan "by" behind the best, "ay", which serves 50 steps?"""
    plans = {name: Plan(name, 8, (), math.inf, None, (1, 8), choices=tuple(name)) for name in (*about, "ay", "by")}
    trials = answers.Trials(site=None, about={plans[name]: step for name, step in {"ay": 50.0, **about}.items()})
    assert trials.is_behind(plans["by"], plans["ay"], LATTICE) is is_behind


def test_what_a_choice_costs_where_most_gpus_prefill_tells_nothing_of_where_most_decode():
    def plan(prefill: int, *others: object, mixed: str | None = None) -> Plan:
        workers = (1, prefill), (1, 8 - prefill)
        return Plan("", 8, (("conditional", mixed),), math.inf, *workers, choices=(prefill, mixed, *others))

    best = plan(6)
    about = {best: 50.0, plan(6, mixed="isl"): 20.0, plan(2): 30.0}
    trials = answers.Trials(site=None, about=about)
    assert trials.is_behind(plan(5, mixed="isl"), best, LATTICE)
    assert not trials.is_behind(plan(2, mixed="isl"), best, LATTICE)
    # Nor does a choice that changes nothing of one deployment, such as how to part sessions among one worker.
    for deployment, is_behind in ((6, True), (7, False)):
        base = plan(6, "sessions", "chunked")
        own = {plan(deployment, how, "one-by-one"): 50.0 for how in ("sessions", "memory")}
        trials = answers.Trials(site=None, about={base: 50.0, **own})
        assert trials.is_behind(plan(6, "memory", "chunked"), base, LATTICE) is is_behind


@pytest.mark.parametrize(("good", "chosen"), [((9, 10), "b"), ((10, 9), "a"), ((9, 9), "a")])
def test_of_equal_plans_the_one_whose_sessions_keep_more_limits_wins(good, chosen):
    def run(plan: Plan, rate: float, seed: int) -> Sample:
        times = {"ttft": Times.of(np.full(10, rate / 10.2))}
        num = good["ab".index(plan.name)]
        counts = {"num_rounds": 10, "num_good": num, "num_sessions": 10, "num_good_sessions": num}
        return Sample(times=times, longest_s=1.0, load=0.0, span_s=9.0, stay_s=1.0, **counts)

    def plan_of(choices):
        return Plan(choices[0], 8, (), math.inf, None, (1, 8), choices=choices)

    space = Space((("a", "b"), ("", "", "")))
    site = Mock(run=run, plan_of=plan_of, num_seeds=1, objectives=parse_objectives("ttft:p95:1000"))
    site.ranked.return_value = Ranked(space, 2, 8.0)
    found = answers.largest_rate(site, 8, LATTICE)
    assert (found.plan.name, found.next_best[0].name) == (chosen, "ba"["ab".index(chosen)])
    assert found.rate == found.next_best[1] == LATTICE.rate(LATTICE.last(10.2))
