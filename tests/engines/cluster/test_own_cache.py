"""Prefill workers with a prefix cache of their own, by hand: a token is prefilled in 1 ms, and K/V of it moves in 0.1 ms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Scripted, TokenEstimator, links, serve, session, session_lists, simulation

LINKS = links(1e-4)


def test_answers_are_prefilled_again_and_no_history_is_read():
    """The cache has the prompt of 100; the 5 tokens of the answer were decoded elsewhere."""
    run = serve(simulation(prefills=1, kv_links=LINKS, own_cache=1000), session(5, 1.0, (100, 5, 0.5), (50, 3)))
    assert run.tasks["computed_tokens"] == [100, 5 + 50]
    assert run.transfers["content"] == ["increment", "increment"]
    assert run.transfers["tokens"] == [100, 50]
    assert run.rounds["first_token_s"] == pytest.approx([1.11, 1.65 + 0.055 + 0.005])


def test_another_worker_prefills_the_whole_history():
    places = Scripted(places=(100, 101, 100))
    run = serve(
        simulation(prefills=2, kv_links=LINKS, own_cache=1000, router=places),
        session(5, 0.0, (100, 5), (50, 3), (20, 1)),
    )
    # The third finds the first's 100 tokens where it was: all since are missing.
    assert run.tasks["computed_tokens"] == [100, 105 + 50, 5 + 50 + 3 + 20]
    assert run.transfers["tokens"] == [100, 50, 20]


def test_what_was_evicted_is_prefilled_again():
    """Session 1 takes 150 of 200 tokens while session 0, of 100, is in its environment: 50 of these are left."""
    run = serve(
        simulation(prefills=1, own_cache=200), session(0, 0.0, (100, 1, 1.0), (10, 1)), session(1, 0.2, (150, 1))
    )
    assert run.tasks["computed_tokens"] == [100, 150, 50 + 1 + 10]
    # Session 0's 50 tokens, and then 61 of session 1's.
    assert run.workers["kv_evicted"][1] == 50 + 61
    assert run.workers["kv_peak"][1] == 200


def test_the_session_used_least_recently_is_evicted_first():
    """Session 0 comes back before session 2 needs room: session 1 loses."""
    run = serve(
        simulation(prefills=1, own_cache=301),
        session(0, 0.0, (100, 1, 0.5), (1, 1, 1.0), (1, 1)),
        session(1, 0.2, (100, 1, 1.5), (1, 1)),
        session(2, 1.0, (150, 1)),
    )
    kept = {
        (owner, index): tokens
        for owner, index, tokens in zip(
            run.tasks["session_id"], run.tasks["round"], run.tasks["computed_tokens"], strict=True
        )
    }
    assert kept[0, 2] == 1 + 1
    # 102 + 100 + 150 are 51 more than fit, and then come 2.
    assert kept[1, 1] == 53 + 1 + 1


def test_k_v_is_held_until_the_home_has_it():
    """It takes 10 s to move 100 tokens: a prefill that does not fit beside them waits so long."""
    run = serve(
        simulation(prefills=1, kv_links=links(0.1), own_cache=150), session(0, 0.0, (100, 1)), session(1, 0.0, (60, 1))
    )
    assert run.tasks["started_s"] == pytest.approx([0.0, 0.1 + 10.0])


def test_a_home_that_lost_its_prefix_gets_all_of_it():
    """Its 200 tokens of K/V hold the other session meanwhile."""
    run = serve(
        simulation(prefills=1, kv_links=LINKS, own_cache=1000, kv_capacity=200),
        session(0, 0.0, (100, 1, 1.0), (10, 1)),
        session(1, 0.2, (150, 1, 9.0), (1, 1)),
    )
    assert run.transfers["tokens"][:2] == [100, 150]
    # 50 - 2 of 101 were left: the home holds one token more than came, the answer.
    assert run.transfers["tokens"][2] == 111 - 49
    assert run.tasks["computed_tokens"][2] == 1 + 10


def test_an_estimate_counts_what_is_not_cached():
    run = serve(simulation(prefills=1, own_cache=1000, estimator=TokenEstimator()), session(5, 0.0, (100, 5), (50, 3)))
    assert run.tasks["estimate_s"] == pytest.approx([0.1, 0.055])


@settings(max_examples=60)
@given(session_lists(), st.lists(st.sampled_from((100, 101)), min_size=1, max_size=40))
def test_with_room_for_all_each_prefill_computes_what_came_since_its_worker_had_the_session(sessions, places):
    run = serve(simulation(prefills=2, own_cache=10**9, router=Scripted(places=tuple(places))), *sessions)
    columns = ("session_id", "worker_id", "history", "tokens", "computed_tokens")
    seen: dict[tuple[int, int], int] = {}
    for owner, worker, history, tokens, computed in zip(*(run.tasks[name] for name in columns), strict=True):
        end = history + tokens
        assert computed == end - seen.get((owner, worker), 0)
        seen[owner, worker] = end


@settings(max_examples=30)
@given(session_lists())
def test_with_affinity_a_session_costs_its_prompts_and_all_answers_but_the_last(sessions):
    run = serve(simulation(prefills=1, own_cache=10**9), *sessions)
    extra = sum(entry.decode_tokens for each in sessions for entry in each.rounds[:-1])
    assert sum(run.tasks["computed_tokens"]) == sum(each.prefill_tokens for each in sessions) + extra
