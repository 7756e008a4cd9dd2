"""Reserve's order by hand, and its bound on the longest wait in runs made to break it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill import (
    LINEAR_MODEL,
    STEP_MODEL,
    ahead_of,
    ask,
    chat,
    execute,
    given_tokens,
    h200_14b,
    hostile,
    queue_of,
    summarise,
    task,
    waiting,
)

from engines.errors import UserError
from engines.laps.cluster import PrefillCluster
from engines.laps.ours import Reserve, ReserveConfig, longest_wait_s, share_for
from engines.laps.system import laps, reserve
from engines.policies.views import PrefillQueue


def policy(share: float = 0.2, **config: float) -> Reserve:
    return Reserve(LINEAR_MODEL, ReserveConfig(share=share, aging=0.0, **config))


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_what_is_begun_goes_on_where_the_first_in_the_order_does_not_fit(share):
    """It holds the K/V that the other waits for: nothing would ever run."""
    begun = task(0, 300)
    begun.computed = 100
    assert given_tokens(ask(policy(share), waiting(queue_of(), task(1, 50)), 0.0, [begun], room=40)) == [(0, 50)]
    assert given_tokens(ask(policy(share), waiting(queue_of(), task(1, 50)), 0.0, [begun], room=50)) == [(1, 50)]


@given(
    entries=st.lists(st.tuples(st.integers(1, 900), st.floats(-3, 0)), min_size=1, max_size=40),
    share=st.floats(0.05, 1),
    steps=st.integers(1, 6),
)
def test_every_step_is_full_and_no_token_is_lost(entries, share, steps):
    reserve_policy = Reserve(STEP_MODEL, ReserveConfig(share=share))
    queue = queue_of(*sorted(entries, key=lambda entry: entry[1]))
    begun: list = []
    done = 0
    now = 0.0
    for _ in range(steps):
        waiting = [*begun, *queue]
        backlog_s = sum(each.left * (1e-4 + 5e-9 * (each.left + 2 * each.computed)) for each in waiting)
        budget_s = min(max(0.15 * backlog_s, 0.05), 0.15)
        plan = ask(reserve_policy, queue, now, begun)
        spent_s = sum(tokens * (1e-4 + 5e-9 * (tokens + 2 * each.computed)) for each, tokens in plan.shares)
        assert spent_s <= budget_s + 1e-9
        assert spent_s >= min(backlog_s, budget_s) - 3 * 1.2e-4  # rounding to whole tokens
        assert len({each.task_id for each, _ in plan.shares}) == len(plan.shares)
        begun = execute(plan, begun)
        done += sum(tokens for _, tokens in plan.shares)
        now += 0.1
    assert done + sum(each.left for each in begun) + queue.backlog_tokens == sum(tokens for tokens, _ in entries)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**16), share=st.sampled_from([0.1, 0.25, 0.6]), load=st.sampled_from([0.8, 1.1, 1.6]))
def test_no_request_waits_longer_than_the_bound(seed, share, load):
    config = ReserveConfig(share=share)
    run = PrefillCluster(system=reserve(STEP_MODEL, config, graphs="none"), cost=STEP_MODEL).simulate(
        hostile(seed, load)
    )
    requests = run.requests
    for index, finished in enumerate(requests["finished_s"]):
        ttft_s = finished - requests["arrival_s"][index]
        assert ttft_s <= longest_wait_s(config, share, ahead_of(requests, index, STEP_MODEL)[0], STEP_MODEL)


def test_the_share_keeps_the_longest_wait_it_was_chosen_for():
    config = ReserveConfig(longest_wait_s=3.0)
    share = share_for(config, STEP_MODEL)
    assert longest_wait_s(config, share, config.slo_s or 0.0, STEP_MODEL) == pytest.approx(3.0)
    assert Reserve(STEP_MODEL, config).share == share
    assert share_for(ReserveConfig(longest_wait_s=6.0), STEP_MODEL) < share
    assert 0.1 < share_for(ReserveConfig(), STEP_MODEL) < 0.25


def test_reserve_violates_less_than_laps_near_capacity():
    cost, model = h200_14b()
    arrivals = chat(60.0, 20.0, seed=8)
    rates = [
        summarise(PrefillCluster(system=system, cost=cost).simulate(arrivals, until_s=20.0), 2.0).violation_rate
        for system in (laps(model), reserve(model))
    ]
    assert rates[1] < 0.5 * rates[0]


def test_bad_configurations_are_refused():
    with pytest.raises(UserError, match="give one"):
        ReserveConfig(share=0.1, longest_wait_s=2.0)
    with pytest.raises(UserError, match="give at least"):
        Reserve(STEP_MODEL, ReserveConfig(longest_wait_s=0.8))
    with pytest.raises(UserError, match="give an OpenQueue"):
        ask(policy(), waiting(PrefillQueue(), task(0, 5)), 0.0)
