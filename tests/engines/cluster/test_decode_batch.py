import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cluster.decode import DecodeBatch, Run
from engines.cost.roofline import DecodeLine

runs = st.builds(
    Run, st.floats(0, 1e4), st.floats(1e-4, 0.1), st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)), st.integers(1, 800)
)


@given(runs, st.floats(0, 1.1))
def test_steps_by_a_time_are_those_that_ended(run, share):
    now = run.start_s + share * run.after_s(run.steps)
    elapsed = now - run.start_s
    ends = [run.after_s(step) for step in range(run.steps + 1)]
    assert run.steps_by(now) == sum(end <= elapsed for end in ends) - 1


@given(runs, st.floats(0, 1))
def test_cut_ends_at_the_next_boundary(run, share):
    now = run.start_s + share * run.after_s(run.steps)
    cut = run.cut_at(now)
    assert 1 <= cut.steps <= run.steps
    assert cut.start_s + cut.after_s(cut.steps) >= now or cut.steps == run.steps
    if cut.steps > 1:
        assert run.start_s + run.after_s(cut.steps - 1) < now


def test_run_stops_where_the_context_outgrows_the_floor():
    """Base 1 ms + 1 us a token against a floor of 3 ms: 2,000 tokens of context are the turn."""
    batch = DecodeBatch()
    batch.size, batch.context = 10, 1905
    run = batch.run(0.0, 1000, DecodeLine(1e-3, 1e-6, 3e-3))
    assert (run.first_s, run.growth_s, run.steps) == (3e-3, 0.0, 10)
    batch.context += run.steps * batch.size
    after = batch.run(run.after_s(run.steps), 1000, DecodeLine(1e-3, 1e-6, 3e-3))
    assert after.first_s == pytest.approx(3.005e-3)
    assert after.growth_s == pytest.approx(10e-6)
    assert after.steps == 1000
