"""Prefill workers with a prefix cache of their own, whatever comes; single runs are in timelines.yaml."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Scripted, serve, session_lists, simulation


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
