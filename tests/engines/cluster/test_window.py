import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cluster.memory import TokenRun, TokenWindow, Window


def test_empty_window_counts_as_zero():
    assert Window().mean(5.0) == 0.0
    assert TokenWindow().mean(5.0) == 0.0


def test_values_leave_after_ten_seconds():
    window = Window()
    window.add(1.0, 4.0)
    window.add(2.0, 8.0)
    assert window.mean(10.9) == 6.0
    assert window.mean(11.0) == 8.0
    assert window.mean(12.0) == 0.0


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
