"""Moore's and Hodgson's set against every subset, On-time's order by hand, and its bound on the longest wait in runs made to break it."""

import math
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill import (
    LINEAR_MODEL,
    STEP_MODEL,
    ahead_of,
    ask,
    given_tokens,
    hostile,
    longest_on_time_s,
    queue_of,
    summarise,
    task,
    turns,
    waiting,
)
from support.refusals import refuses
from support.tables import data_beside

from engines.errors import UserError
from engines.laps.cluster import OpenTurns, PrefillCluster
from engines.laps.latency import StepModel
from engines.laps.ours import OnTime, OnTimeConfig, ReserveConfig, shorter_first
from engines.laps.system import on_time, reserve
from engines.policies.batching import kept_flags, work_by
from engines.policies.views import PrefillQueue


def policy(model: StepModel = LINEAR_MODEL, **config: float | None) -> OnTime:
    """By due time and by arrival, with steps of 50 ms for all but long queues."""
    usual = {"share": 0.25, "haste": 0.0, "aging": 1e6, "min_step": 0.125, "max_step": 0.375, "backlog_share": 0.15}
    patience = {} if config.get("share") == 0 else {"patience": 5.0}
    return OnTime(model, OnTimeConfig(**{**usual, **patience, **config}))


# ---- the set --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(-2, 30)), max_size=8))
def test_no_set_that_is_on_time_is_larger(jobs):
    jobs.sort(key=lambda job: job[1])
    flags = kept_flags([float(work) for work, _ in jobs], [float(limit) for _, limit in jobs])

    def is_on_time(chosen):
        return all(sum(work for work, _ in chosen[: place + 1]) <= limit for place, (_, limit) in enumerate(chosen))

    found = [job for job, is_kept in zip(jobs, flags, strict=True) if is_kept]
    assert is_on_time(found)
    assert not any(is_on_time(chosen) for chosen in combinations(jobs, len(found) + 1))


def test_sums_that_are_rounded_up_end_in_time():
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert kept_flags([0.1] * 3, [0.3] * 3) == [True] * 3


def test_the_last_of_equals_is_given_up():
    assert kept_flags([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]) == [True, True, False]


@given(
    work=st.lists(st.floats(0.01, 0.3), min_size=1, max_size=20),
    budget_s=st.floats(0.02, 0.2),
    overhead_s=st.floats(0, 0.05),
    slack_s=st.floats(0, 3),
)
def test_work_that_ends_by_a_time_is_that_of_the_steps_until_then(work, budget_s, overhead_s, slack_s):
    """Against the steps one by one: full ones, and the last as long as what is left."""
    all_s = sum(work)
    (limit_s,) = work_by([slack_s], budget_s=budget_s, overhead_s=overhead_s, rate=1.0, all_s=all_s)
    end_s = done_s = 0.0
    while done_s < all_s - 1e-9:
        step_s = min(budget_s, all_s - done_s)
        end_s, before_s, done_s = end_s + step_s + overhead_s, done_s, done_s + step_s
        if abs(end_s - slack_s) > 1e-6:
            # Whatever is in this step ends at its end.
            assert ((before_s + done_s) / 2 <= limit_s) == (end_s <= slack_s)


# ---- the order ---


@given(jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6))
def test_shorter_ones_go_first_as_far_as_none_is_late_by_it(jobs):
    """Against every order: of those in which all are within their limits none has a less mean."""
    jobs.sort(key=lambda job: job[1])
    works, limits = zip(*jobs, strict=True)
    order = shorter_first(works, limits)

    def ends(places):
        return [sum(works[place] for place in places[: at + 1]) for at in range(len(places))]

    def is_on_time(places):
        return all(end <= limits[place] for place, end in zip(places, ends(places), strict=True))

    assert sorted(order) == list(range(len(jobs)))
    possible = [places for places in permutations(range(len(jobs))) if is_on_time(places)]
    if possible:
        assert is_on_time(order)
        assert sum(ends(order)) == min(sum(ends(places)) for places in possible)


@pytest.mark.parametrize(("haste", "first"), [(0.0, 0), (0.4, 0), (0.6, 1), (1.0, 1)])
def test_a_shorter_one_goes_first_within_its_part_of_the_time(haste, first):
    """150 ms of work, of which the older has 300 ms left."""
    batching = policy(haste=haste)
    plan = ask(batching, queue_of((100, -0.1), (50, 0.0)), 0.0)
    assert given_tokens(plan)[0][0] == first


@pytest.mark.parametrize(("aging", "first"), [(0.0, 1), (0.05, 1), (0.2, 0)])
def test_those_given_up_go_by_what_is_left_of_them_less_aging(aging, first):
    """900 and 800 ms of work, of which the longer came a second before."""
    plan = ask(policy(aging=aging, share=0.0), queue_of((900, -1.0), (800, 0.0)), 0.0)
    assert given_tokens(plan)[0][0] == first


# ---- a step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "floor_s", "entries", "room", "step"), data_beside(__file__, "on_time_steps"))
def test_a_step_by_hand(config, floor_s, entries, room, step):
    batching = policy(replace(LINEAR_MODEL, floor_s=floor_s), **config)
    assert given_tokens(ask(batching, queue_of(*entries), 0.0, room=room)) == list(map(tuple, step))


@pytest.mark.parametrize(("now", "goes_first"), [(3.0, 2), (5.7, 2), (5.9, 1)])
def test_patience_counts_the_work_that_was_there_before(now, goes_first):
    """Behind 2,000 tokens its 900 would have taken 2.9 s, first come, first served: it is paid after 5.8 s, whatever became of those."""
    batching = policy(share=0.2, patience=2.0)
    ask(batching, queue_of((2000, 0.0), (900, 0.0)), 0.0)
    left = waiting(queue_of(), task(1, 900), task(2, 40, now))
    assert given_tokens(ask(batching, left, now))[0][0] == goes_first


def test_what_is_begun_goes_on_where_the_first_finds_no_room_and_nobody_passes_it():
    begun, queue = task(9, 300), queue_of((50, -0.1), (10, 0.0))
    begun.computed = 295
    assert given_tokens(ask(policy(), queue, 0.0, [begun], room=40)) == [(9, 5)]
    assert given_tokens(ask(policy(), queue, 0.0, [begun], room=50)) == [(0, 50)]


def test_steps_are_measured_by_the_objective():
    for slo_s in (0.04, 0.4, 4.0):
        batching = OnTime(replace(LINEAR_MODEL, token_s=1e-5), OnTimeConfig(slo_s=slo_s))
        plan = ask(batching, queue_of((20, 0.0), (10**6, -99.0)), 0.0)
        assert sum(share.tokens for share in plan.shares) == pytest.approx(0.1875 * slo_s / 1e-5, abs=1)


# ---- runs -------------------------------------------------------------------------------------------------------


def check_bound(arrivals: OpenTurns, config: OnTimeConfig) -> None:
    run = PrefillCluster(system=on_time(STEP_MODEL, config, graphs="none"), cost=STEP_MODEL).simulate(arrivals)
    for index, finished in enumerate(run.requests["finished_s"]):
        ttft_s = finished - run.requests["arrival_s"][index]
        work_s, num_ahead = ahead_of(run.requests, index, STEP_MODEL)
        assert ttft_s <= longest_on_time_s(config, work_s, num_ahead, STEP_MODEL)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.1, 0.25, 0.6]),
    patience=st.sampled_from([0.0, 1.0, 5.0]),
    load=st.sampled_from([0.8, 1.1, 1.6]),
)
def test_no_request_waits_longer_than_the_bound(seed, share, patience, load):
    check_bound(hostile(seed, load), OnTimeConfig(share=share, patience=patience))


@settings(max_examples=10, deadline=None)
@given(
    backlog=st.lists(st.integers(1, 6000), min_size=1, max_size=30),
    siege=st.integers(60, 300),
    share=st.sampled_from([0.05, 0.3, 0.9]),
)
def test_no_backlog_is_forgotten_under_siege(backlog, siege, share):
    """All of it at once, and then prompts that always can be on time, faster than they are served."""
    later = [(0.001 + 0.9e-4 * siege * index, siege) for index in range(60_000 // siege)]
    check_bound(turns(*((0.0, tokens) for tokens in backlog), *later), OnTimeConfig(share=share))


@pytest.mark.parametrize(("places", "tokens"), [(1, 5), (1, 20), (3, 200)])
def test_places_bound_the_wait_where_steps_have_few(places, tokens):
    config = OnTimeConfig(max_num_seqs=places)
    check_bound(turns(*((0.001 * index, tokens) for index in range(400))), config)


def test_an_idle_instance_forgets_who_waited():
    """The same numbers come again, behind less work than before."""
    batching = policy(share=0.2, patience=2.0)
    ask(batching, queue_of((4000, 0.0), (500, 0.0)), 0.0)
    ask(batching, queue_of(), 0.15)
    again = ask(batching, queue_of((400, 98.0), (100, 100.0)), 100.0)
    assert given_tokens(again)[0][0] == 0


def test_a_pause_after_all_have_left_is_no_long_step():
    """A client goes away with most of its prompt left, and nobody asks for a step until another comes, long after."""
    batching, queue = policy(), waiting(queue_of(), task(1, 100, 99.9), task(2, 200, 99.9))
    ask(batching, queue_of((400, 0.0)), 0.0)
    assert given_tokens(ask(batching, queue, 100.0)) == [(1, 50)]


def test_without_a_share_there_is_no_bound():
    assert longest_on_time_s(OnTimeConfig(share=0.0), 1.0, 1, STEP_MODEL) == math.inf


@pytest.mark.parametrize(("make", "config", "larger"), [(on_time, OnTimeConfig, 0.4), (reserve, ReserveConfig, 0.3)])
def test_a_larger_share_shortens_the_longest_wait_and_costs_violations(make, config, larger):
    arrivals = hostile(3, 1.6)
    found = {}
    for share in (0.02, larger):
        system = make(STEP_MODEL, config(share=share), graphs="none")
        found[share] = summarise(PrefillCluster(system=system, cost=STEP_MODEL).simulate(arrivals))
    assert found[larger].longest_s < found[0.02].longest_s
    assert found[larger].violation_rate > found[0.02].violation_rate


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_model_that_is_wrong_by_a_factor_is_set_right(factor):
    """The same runs, but for the first steps, which are measured."""
    names = ("base_s", "request_s", "floor_s", "token_s", "alpha")
    wrong = replace(STEP_MODEL, **{name: factor * getattr(STEP_MODEL, name) for name in names})
    rates = []
    for model in (STEP_MODEL, wrong):
        cluster = PrefillCluster(system=on_time(model, graphs="none"), cost=STEP_MODEL)
        rates.append(summarise(cluster.simulate(hostile(5, 1.0)), 2.0).violation_rate)
    assert rates[0] > 0
    assert rates[1] == pytest.approx(rates[0], rel=0.15)


def test_bad_configurations_are_refused():
    with pytest.raises(UserError, match="must not be above"):
        OnTimeConfig(min_step=0.5)
    with pytest.raises(UserError, match="share"):
        OnTimeConfig(share=1.5)
    with refuses("patience=1"):
        OnTimeConfig(share=0.0, patience=1.0)
    with pytest.raises(UserError, match="give an OpenQueue"):
        ask(policy(), waiting(PrefillQueue(), task(0, 5)), 0.0)
