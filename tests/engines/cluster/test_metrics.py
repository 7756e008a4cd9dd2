import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clusters import serve, session, simulation

from engines.cluster.record import grouped_stats, observe


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(1e-4, 1.0), st.integers(1, 50)), max_size=60))
def test_grouped_stats_are_those_of_the_tokens_written_out(runs):
    group, value, count = (np.array(column) for column in zip(*runs, strict=True)) if runs else (np.array([]),) * 3
    stats = grouped_stats(group.astype(np.int64), value.astype(np.float64), count.astype(np.int64), 7)
    for index in range(7):
        tokens = np.repeat(value, count.astype(np.int64))[np.repeat(group, count.astype(np.int64)) == index]
        if len(tokens) == 0:
            assert all(np.isnan(stats[name][index]) for name in stats)
            continue
        assert stats["mean"][index] == pytest.approx(tokens.mean())
        assert stats["max"][index] == tokens.max()
        assert stats["p95"][index] == pytest.approx(np.percentile(tokens, 95))
        assert stats["p95-lower"][index] == np.percentile(tokens, 95, method="lower")
        assert stats["p95-higher"][index] == np.percentile(tokens, 95, method="higher")
        assert stats["p99"][index] == pytest.approx(np.percentile(tokens, 99))


def test_session_statistics_are_over_all_its_tokens():
    """One gap of 60 ms among ten of 10 ms: a tenth of the tokens, not half of the rounds."""
    run = serve(simulation(), session(9, 0.0, (100, 8), (10, 4)), session(4, 0.125, (50, 1)))
    observed = observe(run)
    assert observed.session_itl_s["mean"][0] == pytest.approx(0.015)
    assert observed.session_itl_s["max"][0] == pytest.approx(0.06)
    assert observed.round_itl_s["max"][0] == pytest.approx(0.06)
    assert np.isnan(observed.session_itl_s["mean"][1])
    assert observed.round_session.tolist() == [0, 1, 0]
    assert observed.e2el_s.tolist() == pytest.approx(
        [run.sessions["finished_s"][0], run.sessions["finished_s"][1] - 0.125]
    )


def test_empty_run():
    observed = observe(serve(simulation()))
    assert len(observed.e2el_s) == 0
    assert len(observed.ttft_s) == 0
