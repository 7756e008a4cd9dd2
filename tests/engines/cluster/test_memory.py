"""K/V memory of a worker, and its means over the last seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cluster.worker import TokenRun, TokenWindow, Window, WorkerKv


def parked(pool: WorkerKv, **tokens: int) -> None:
    for name, count in tokens.items():
        pool.hold(count)
        pool.park(ord(name), count)


def test_least_recently_used_goes_first_and_from_its_tail():
    pool = WorkerKv(100)
    parked(pool, a=40, b=30, c=20)
    assert pool.make_room(10, now=0)
    assert pool.evicted == 0  # so much is free
    assert pool.make_room(30, now=0)
    assert [pool.cached(ord(name)) for name in "abc"] == [20, 30, 20]
    assert pool.evicted == 20
    assert pool.make_room(60, now=0)
    assert [pool.cached(ord(name)) for name in "abc"] == [0, 20, 20]


def test_resuming_makes_a_session_the_most_recent():
    pool = WorkerKv(100)
    parked(pool, a=40, b=40)
    assert pool.resume(ord("a")) == 40
    pool.park(ord("a"), 40)
    pool.make_room(50, now=0)
    assert [pool.cached(ord(name)) for name in "ab"] == [40, 10]


def test_held_tokens_are_never_evicted():
    pool = WorkerKv(100)
    pool.hold(70)
    parked(pool, a=20)
    assert not pool.make_room(31, now=0, force=True)
    assert (pool.held, pool.idle, pool.free) == (70, 0, 30)


def test_time_to_live_protects_until_it_is_over_or_forced():
    pool = WorkerKv(100)
    pool.hold(60)
    pool.park(1, 60, keep_until_s=10.0)
    parked(pool, b=30)
    assert (pool.evictable(now=9.9), pool.evictable(now=10.0)) == (30, 90)
    assert not pool.make_room(70, now=5)
    assert pool.cached(1) == 60
    assert pool.make_room(70, now=5, force=True)
    assert pool.cached(1) == 30


@given(
    st.lists(
        st.tuples(st.sampled_from(("start", "park", "resume", "room")), st.integers(0, 5), st.integers(1, 60)),
        max_size=60,
    )
)
def test_counts_always_add_up(steps):
    """Against a plain dictionary of what each session holds or has cached."""
    pool = WorkerKv(100)
    held: dict[int, int] = {}
    now = 0.0
    for action, session, tokens in steps:
        now += 1.0
        if action == "start" and session not in held and pool.free >= tokens:
            pool.release(pool.resume(session))
            pool.hold(tokens)
            held[session] = tokens
        elif action == "park" and session in held:
            pool.park(session, held.pop(session), keep_until_s=now + tokens % 3)
        elif action == "resume" and session not in held:
            cached = pool.cached(session)
            assert pool.resume(session) == cached
            held[session] = cached
        elif action == "room":
            pool.make_room(tokens, now, force=session == 0)
        assert pool.held == sum(held.values())
        assert pool.idle == sum(pool.cached(each) for each in range(6))
        assert pool.held + pool.idle <= 100
        assert 0 <= pool.evictable(now) <= pool.idle


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.001, 5)), max_size=60), st.floats(0.1, 5))
def test_mean_of_the_last_seconds(entries, length_s):
    window = Window(length_s)
    now, kept = 0.0, []
    for gap, value in entries:
        now += gap
        window.add(now, value)
        kept.append((now, value))
        inside = [each for time, each in kept if time > now - length_s]
        assert window.mean(now) == pytest.approx(sum(inside) / len(inside))
    assert window.mean(now + 2 * length_s) == 0.0


def test_values_leave_after_ten_seconds():
    window = Window()
    window.add(1.0, 4.0)
    window.add(2.0, 8.0)
    assert [window.mean(now) for now in (10.9, 11.0, 12.0)] == [6.0, 8.0, 0.0]


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0.001, 0.05), st.integers(1, 40), st.integers(1, 5), st.floats(0.001, 1)),
        max_size=25,
    ),
    st.floats(0.05, 3),
    st.booleans(),
)
def test_runs_count_token_by_token(runs, length_s, last_is_running):
    window = TokenWindow(length_s)
    now = 0.0
    tokens: list[tuple[float, float]] = []
    current: list[TokenRun] = []
    for index, (pause, period, steps, size, gap) in enumerate(runs):
        run = TokenRun(now + pause, period, steps, size, gap)
        tokens.extend((run.start_s + (step + 1) * period, gap) for step in range(steps) for _ in range(size))
        now = run.start_s + steps * period
        if last_is_running and index == len(runs) - 1:
            current.append(run)
        else:
            window.extend([run])
    # A token on the edge may fall on either side by rounding: stand clear of it.
    edges = [time for time, _ in tokens]
    if any(abs(time - (now - length_s)) < 1e-9 for time in edges):
        return
    inside = [gap for time, gap in tokens if time > now - length_s]
    assert window.mean(now, current) == pytest.approx(sum(inside) / len(inside) if inside else 0.0)
