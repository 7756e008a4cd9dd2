"""Blocks that prompts share, against a list of all that were used and in the memory of workers; and caches of prefill workers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Scripted, links, serve, session_lists, simulation

from engines.cluster.hardware import EngineTimes
from engines.cluster.prefix import PrefixCache, possible_reuse, prompt_of, reuse_of
from engines.cluster.sessions import Prefix, PrefixNames, Round, Session
from engines.policies.batching import ONE_BY_ONE, Chunked, PrefillFirst
from engines.policies.routing import KvCost
from engines.policies.views import Load

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30)


def named(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    names = PrefixNames()
    return [names.of(each) for each in prompts]


@settings(max_examples=150)
@given(PROMPTS, st.integers(1, 12))
def test_a_cache_has_what_was_used_last_and_nothing_of_other_prefixes(prompts, capacity):
    used: list[tuple[int, ...]] = []  # the beginnings themselves, the least recently used first
    found = 0
    for each in prompts:
        begun = [tuple(each[: end + 1]) for end in range(len(each))]
        found += next((place for place, beginning in enumerate(begun) if beginning not in used), len(begun))
        used = ([other for other in used if other not in begun] + begun[::-1])[-capacity:]
    sent = [(names, 16 * len(names)) for names in named(prompts)]
    assert reuse_of(sent, 16, capacity).found == found
    total = sum(map(len, prompts))
    endless = reuse_of(sent, 16)
    assert endless.found == total - len({tuple(each[: end + 1]) for each in prompts for end in range(len(each))})
    assert reuse_of(sent, 16, total) == endless
    assert endless.found_tokens == 16 * endless.found


@settings(max_examples=100)
@given(PROMPTS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=60))
def test_a_block_in_use_stays_and_each_is_counted_once(prompts, moves):
    cache, waiting, in_use, kept = PrefixCache(), named(prompts), [], set()
    for move, number in moves:
        if move == 0 and waiting:
            in_use.append(waiting.pop())
            num_idle, num_new = cache.take(in_use[-1])
            assert num_new == len(set(in_use[-1]) - kept)
            assert num_idle <= len(in_use[-1]) - num_new
            kept |= set(in_use[-1])
        elif move == 1 and in_use:
            cache.give(in_use.pop(number % len(in_use)))
        else:
            before = cache.num_idle
            num = cache.evict(number)
            assert num == min(number, before)
            kept = {name for name in kept if name in cache}
        busy = {name for names in in_use for name in names}
        assert (cache.num_used, cache.num_idle) == (len(busy), len(kept - busy))
        assert all(cache.num_cached(names) == cache.num_in_use(names) == len(names) for names in in_use)


def test_blocks_of_an_engine_are_parts_of_a_file_s_or_several_of_them():
    """An exact repeat of 1,100 tokens in a file's blocks of 512 spares 1,088 in blocks of 64, and one of 1,088 all but its last block."""
    prefix = Prefix(512, ((0, 1, 2),))
    prompt = prompt_of(prefix, 0, 1100, 64)
    assert (list(prompt.names), prompt.most_found) == (list(range(17)), 17)
    assert prompt_of(prefix, 0, 1088, 64).most_found == 16
    assert prompt_of(Prefix(16, (tuple(range(9)),)), 0, 140, 64).names == [3, 7]


@st.composite
def sharing(draw: st.DrawFn) -> list[Session]:
    """Sessions that begin alike for some blocks of 4 tokens, and go on with what was answered."""
    names, sessions, now = PrefixNames(), [], 0.0
    for index in range(draw(st.integers(1, 10))):
        now += draw(st.sampled_from((0.0, 0.01, 0.4)))
        rounds = tuple(
            Round(draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.sampled_from((0.0, 0.3))))
            for _ in range(draw(st.integers(1, 3)))
        )
        ids = draw(st.lists(st.integers(0, 1), min_size=0, max_size=12))
        ends, tokens = [], 0
        for prefill, decode, _ in rounds:
            ends.append(-(-(tokens + prefill) // 4))
            tokens += prefill + decode
        blocks = names.of([*ids, *[10 + index] * ends[-1]][: ends[-1]])
        sessions.append(Session(index, now, rounds, Prefix(4, tuple(blocks[:end] for end in ends))))
    return sessions


BATCHINGS = (Chunked(max_num_batched_tokens=9, max_num_seqs=3), PrefillFirst(max_num_batched_tokens=30), ONE_BY_ONE)


@settings(max_examples=150)
@given(
    sharing(),
    st.integers(0, 60),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from((4, 8, 16)),
    st.sampled_from(BATCHINGS),
    st.booleans(),
)
def test_with_little_memory_nothing_is_lost(sessions, spare, homes, prefills, size, batching, keeps_answers):
    capacity = max(each.context_tokens for each in sessions) + 1 + spare
    parts = {"own_cache": capacity, "kv_links": links(1e-5), "prefill_batching": batching, "router": KvCost()}
    built = simulation(
        homes=homes,
        prefills=prefills,
        kv_capacity=capacity,
        block_size=size,
        batching=batching,
        binder=KvCost(),
        engine=EngineTimes(keeps_answers=keeps_answers),
        **(parts if prefills else {}),
    )
    run = serve(built, *sessions)
    assert run.sessions["status"] == ["ok"] * len(sessions)
    for worker in (*built._homes, *built._prefills):
        assert worker.kv.held == worker.kv.cache.num_used == worker.queue.backlog_tokens == 0
        assert worker.kv.idle == worker.kv.cache.num_idle * size
        assert worker.kv.peak <= capacity
        assert worker.kv.evicted >= 0
    assert all(home.kv_tokens == home.coming_tokens == 0 for home in built._homes)
    assert sum(run.workers["prefilled_tokens"]) == sum(run.tasks["computed_tokens"])
    assert not built._prompts


@settings(max_examples=60)
@given(sharing(), st.booleans())
def test_with_room_for_all_one_worker_spares_what_is_possible(sessions, is_apart):
    built = simulation(block_size=4, prefills=int(is_apart), own_cache=10**9)
    alone = [Session(each.session_id, 100.0 * each.session_id, each.rounds, each.prefix) for each in sessions]
    run = serve(built, *alone)
    asked = sum(run.tasks["history"]) + sum(run.tasks["tokens"])
    spared = 1 - sum(run.tasks["computed_tokens"]) / asked
    possible = possible_reuse(alone, 4)
    # A prefill worker has no answers but those that it computed again.
    assert spared <= possible + 1e-12 if is_apart else abs(spared - possible) < 1e-12


@pytest.mark.parametrize(("keeps_answers", "computed"), [(False, 16), (True, 64)])
def test_answers_that_an_engine_keeps_let_older_prompts_go(keeps_answers, computed):
    """Of ten blocks the second request's answer fills four, and the third request needs six."""
    asked = ((64, 1, (0, 1, 2, 3)), (16, 64, (4,)), (80, 16, (5, 6, 7, 8, 9)), (64, 1, (0, 1, 2, 3)))
    sessions = [
        Session(number, 100.0 * number, (Round(prompt, answer),), Prefix(16, (names,)))
        for number, (prompt, answer, names) in enumerate(asked)
    ]
    built = simulation(kv_capacity=160, block_size=16, engine=EngineTimes(keeps_answers=keeps_answers))
    assert serve(built, *sessions).tasks["computed_tokens"] == [64, 16, 80, computed]


def test_two_that_begin_alike_fit_where_one_more_does_not():
    """What the second shares is neither room that it needs, nor work that its queue counts."""
    sessions = [
        Session(number, 0.01 * number, (Round(80, 20),), Prefix(16, ((0, 1, 2, 3, last),)))
        for number, last in enumerate((4, 5))
    ]
    built = simulation(kv_capacity=150, block_size=16)
    backlogs: list[int] = []
    built.loop.at(0.02, lambda: backlogs.append(built._homes[0].queue.backlog_tokens))
    run = serve(built, *sessions)
    assert backlogs == [16]
    assert run.tasks["computed_tokens"] == [80, 16]
    assert run.rounds["first_token_s"][1] < run.rounds["finished_s"][0]


@pytest.mark.parametrize(("batching", "computed"), [(ONE_BY_ONE, 80), (Chunked(max_num_batched_tokens=32), 32)])
def test_a_worker_s_load_counts_once_what_a_prompt_shares(batching, computed):
    """A session holds 80 tokens and one more, the whole blocks of which that are begun another would share but the last."""
    built = simulation(kv_capacity=150, block_size=16, batching=batching)
    loads: list[Load] = []
    built.loop.at(0.001, lambda: loads.append(built._homes[0].load_with(0, 80)))
    serve(built, Session(0, 0.0, (Round(80, 20),), Prefix(16, ((0, 1, 2, 3, 4),))))
    shared = min(computed, 64)
    assert loads == [(80 + 80 - shared, 81 + 80 - shared)]


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
