import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import LinearCost, serve, session, session_lists, simulation

from engines.cluster.record import READINGS, ClusterRun, Reading, attainment, attainments, observe
from engines.cluster.simulation import StopRule
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
    assert attainment(observe(run), Slo(ttft_s=0.1, itl_s=itl_s), reading) == 1.0
    assert attainment(observe(run), Slo(ttft_s=0.0999, itl_s=itl_s), reading) == 0.0
    assert attainment(observe(run), Slo(ttft_s=0.1, itl_s=itl_s * 0.999), reading) == 0.0


def test_run_without_sessions_has_no_attainment():
    reading = READINGS[0]
    assert math.isnan(attainment(observe(serve(simulation())), Slo(ttft_s=1, itl_s=1), reading))
