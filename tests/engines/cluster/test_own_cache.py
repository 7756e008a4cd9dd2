"""Prefill workers with a prefix cache of their own, by hand: a token is prefilled in 1 ms, and K/V of it moves in 0.1 ms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Scripted, links, serve, session, session_lists, simulation

LINKS = links(1e-4)


def test_answers_are_prefilled_again_and_no_history_is_read():
    """The cache has the prompt of 100; the 5 tokens of the answer were decoded elsewhere."""
    run = serve(simulation(prefills=1, kv_links=LINKS, own_cache=1000), session(5, 1.0, (100, 5, 0.5), (50, 3)))
    assert run.tasks["computed_tokens"] == [100, 5 + 50]
    assert run.transfers["content"] == ["increment", "increment"]
    assert run.transfers["tokens"] == [100, 50]
    assert run.rounds["first_token_s"] == pytest.approx([1.11, 1.65 + 0.055 + 0.005])


def test_k_v_is_held_until_the_home_has_it():
    """It takes 10 s to move 100 tokens: a prefill that does not fit beside them waits so long."""
    run = serve(
        simulation(prefills=1, kv_links=links(0.1), own_cache=150), session(0, 0.0, (100, 1)), session(1, 0.0, (60, 1))
    )
    assert run.tasks["started_s"] == pytest.approx([0.0, 0.1 + 10.0])


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
