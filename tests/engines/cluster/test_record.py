"""Sessions, and when each of them comes: what is drawn by then, and when none is to come any more."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import LinearCost, serve, session, session_lists, simulation

from engines.cluster.record import READINGS, ClusterRun, Reading, attainments, grouped_stats, observe
from engines.cluster.sessions import EventLoop, OpenArrivals, OpenLoop, Round, Session
from engines.cluster.simulation import StopRule
from engines.errors import UserError
from engines.policies.views import Slo

STATS = {
    "mean": np.mean,
    "p95": lambda values: np.percentile(values, 95),
    "p99": lambda values: np.percentile(values, 99),
    "max": np.max,
    "p95-lower": lambda values: np.percentile(values, 95, method="lower"),
    "p95-higher": lambda values: np.percentile(values, 95, method="higher"),
}


def by_hand(run: ClusterRun, slo: Slo, reading: Reading) -> float:
    """Session by session, round by round, token by token."""
    rows: dict[int, list[int]] = {}
    for row, owner in enumerate(run.rounds["session_id"]):
        rows.setdefault(owner, []).append(row)

    def meets_itl(of: list[int]) -> bool:
        mine = np.isin(run.gaps.row, of)
        tokens = np.repeat(run.gaps.gap_s[mine], run.gaps.tokens[mine])
        return len(tokens) == 0 or STATS[reading.itl](tokens) <= slo.itl_s

    good = total = 0
    for owner, num_rounds, status in zip(
        run.sessions["session_id"], run.sessions["num_rounds"], run.sessions["status"], strict=True
    ):
        mine = rows.get(owner, [])
        ttft = [
            math.inf
            if run.rounds["first_token_s"][row] is None
            else run.rounds["first_token_s"][row] - run.rounds["ready_s"][row]
            for row in mine
        ]
        quick_on_average = np.mean(ttft) <= slo.ttft_s if mine else False
        if reading.scope == "round":
            total += num_rounds
            for row, value in zip(mine, ttft, strict=True):
                quick = value <= slo.ttft_s if reading.ttft == "every" else quick_on_average
                good += bool(quick and run.rounds["finished_s"][row] is not None and meets_itl([row]))
        else:
            total += 1
            quick = max(ttft, default=math.inf) <= slo.ttft_s if reading.ttft == "every" else quick_on_average
            good += bool(quick and status == "ok" and meets_itl(mine))
    return good / total


@settings(max_examples=40)
@given(session_lists(8), st.floats(0.01, 0.5), st.floats(0.011, 0.1), st.sampled_from((None, 0.4, 1.5)))
def test_every_reading_against_a_count_by_hand(sessions, ttft_s, itl_s, until_s):
    cost = LinearCost(token_s=1e-4, slope_s=3e-6)
    run = serve(simulation(homes=2, cost=cost, stop=StopRule(until_s=until_s)), *sessions)
    slo = Slo(ttft_s=ttft_s, itl_s=itl_s)
    if not run.num_sessions:
        return
    found = attainments(observe(run), slo)
    assert list(found) == list(READINGS)
    for reading in READINGS:
        assert found[reading] == pytest.approx(by_hand(run, slo, reading)), str(reading)


def test_there_are_twenty_four_readings_by_name():
    assert len(set(map(str, READINGS))) == 24
    assert str(READINGS[0]) == "round/every/mean"


def test_boundary_counts_as_met():
    run = serve(simulation(), session(0, 0.0, (100, 3)))
    reading = Reading(scope="session", ttft="every", itl="max")
    itl_s = float(run.gaps.gap_s.max())
    for ttft_s, factor, share in ((0.1, 1.0, 1.0), (0.0999, 1.0, 0.0), (0.1, 0.999, 0.0)):
        assert attainments(observe(run), Slo(ttft_s=ttft_s, itl_s=itl_s * factor))[reading] == share
    none = attainments(observe(serve(simulation())), Slo(ttft_s=1, itl_s=1))
    assert all(math.isnan(share) for share in none.values())


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


def test_totals():
    agent = session(3, 1.5, (100, 20), (30, 5, 0.5))
    assert (agent.prefill_tokens, agent.decode_tokens, agent.context_tokens) == (130, 25, 155)


@pytest.mark.parametrize(
    "entry", [Round(0, 5), Round(5, 0), Round(-1, 5), Round(5, -2), Round(5, 5, -0.1), Round(5, 5, math.inf)]
)
def test_impossible_round_is_refused_by_name(entry):
    with pytest.raises(UserError, match=r"session 7 round 1: prefill_tokens="):
        Session(7, 0.0, (Round(1, 1), entry))


def test_open_loop_wants_sessions_in_order():
    loop = EventLoop()
    unsorted = OpenLoop(sessions=(session(0, 2.0, (1, 1)), session(1, 1.0, (1, 1))))
    OpenArrivals(loop, unsorted.sessions, print)
    with pytest.raises(UserError, match=r"session 1: arrival_s=1.0 is before 2.0"):
        loop.run()


def test_events_of_one_time_run_in_the_order_they_were_scheduled():
    """Also those that are scheduled while others of that time run: they come last."""
    seen: list[str] = []
    loop = EventLoop()
    loop.at(1.0, lambda: (seen.append("first"), loop.at(1.0, seen.append, "later")))
    loop.at(0.5, seen.append, "early")
    loop.at(1.0, seen.append, "second")
    loop.run()
    assert seen == ["early", "first", "second", "later"]
