"""The planner: coefficients against direct simulation, enumeration against all pairs, and what Table 2 can and cannot show."""

import re
from dataclasses import replace
from itertools import product, starmap

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.clusters import hardware, profiled, session
from support.md1 import mean_wait

from engines.ampd.planner import (
    TIE,
    ClosedForm,
    Coefficients,
    PhaseLatency,
    PlanCounts,
    PlannerConfig,
    PlanningWorkload,
    Program,
    backlog_exceeds,
    by_enumeration,
    coefficients,
    default_method,
    erlang_c,
    plan,
    simulate_decode,
    simulate_prefill,
    solve,
)
from engines.cluster.sessions import Session
from engines.errors import UserError
from engines.policies.views import Slo

PLATFORM = hardware()
MODEL = profiled(num_gpus=16)
SLO = Slo(ttft_s=2.0, itl_s=0.05)


def sample(num: int = 120, seed: int = 2) -> tuple[Session, ...]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, num)).tolist()
    lengths = rng.integers((300, 10), (1500, 80), (num, 3, 2)).tolist()
    return tuple(session(index, time, *rounds) for index, (time, rounds) in enumerate(zip(times, lengths, strict=True)))


def workload(rate: float) -> PlanningWorkload:
    return PlanningWorkload(sessions=sample(), rate=rate, slo=SLO)


def test_workload_gives_lengths_and_load():
    found = PlanningWorkload(sessions=(session(0, 0.0, (100, 5), (50, 3)), session(1, 4.0, (7, 2))), rate=0.5, slo=SLO)
    assert found.rounds_per_s == 0.75
    assert found.span_s == 4.0
    assert [each.arrival_s for each in found.at_rate()] == [0.0, 4.0]
    expected = [MODEL.prefill_s(*each, 4) for each in ((0, 100), (105, 50), (0, 7))]
    assert found.prefill_s(MODEL, 4).tolist() == expected


def test_idle_pools_have_the_latency_of_one_round():
    """Sessions that never meet: P95 of the prefills themselves, and of decoding alone."""
    alone = workload(1e-4)
    direct = simulate_prefill(MODEL, alone, 4, 1)
    assert direct.seconds == pytest.approx(np.percentile(alone.prefill_s(MODEL, 4), 95))
    assert direct.of_slo == pytest.approx(direct.seconds / 2.0)
    assert simulate_decode(MODEL, alone, 4, 1).of_slo == pytest.approx(MODEL.decode_s(1, 4) / 0.05)
    closed = ClosedForm(MODEL, alone)
    assert closed.prefill(4, [1])[0].seconds == pytest.approx(direct.seconds, rel=0.03)
    assert closed.decode(4, 1).of_slo == pytest.approx(MODEL.decode_s(1, 4) / 0.05, rel=0.02)


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0])
def test_closed_forms_follow_direct_simulation(rate):
    """Also in overload: a factor of 2.5 at the very worst, 20 % in the middle, over three orders of magnitude."""
    direct = coefficients(MODEL, workload(rate), (2, 4, 8), 16, "direct")
    closed = coefficients(MODEL, workload(rate), (2, 4, 8), 16, "closed")
    for ours, theirs, middle, worst in (
        (closed.prefill, direct.prefill, 0.25, 0.9),
        (closed.decode, direct.decode, 0.08, 0.3),
    ):
        assert ours.keys() == theirs.keys()
        off = [abs(np.log(ours[key].of_slo / theirs[key].of_slo)) for key in ours]
        assert np.median(off) < middle
        assert max(off) < worst


def test_cached_coefficients_are_direct_ones_with_gaps_filled():
    direct = coefficients(MODEL, workload(1.0), (2, 4), 24, "direct")
    cached = coefficients(MODEL, workload(1.0), (2, 4), 24, "cached")
    assert cached.prefill.keys() == direct.prefill.keys()
    same = [key for key in cached.prefill if cached.prefill[key] == direct.prefill[key]]
    assert {(2, 1), (2, 2), (2, 4), (2, 8), (2, 11), (4, 5)} <= set(same)
    assert len(same) < len(direct.prefill)
    for key in cached.prefill:
        assert cached.prefill[key].seconds == pytest.approx(direct.prefill[key].seconds, rel=0.25)


@given(st.integers(1, 40), st.floats(0.2, 0.9), st.floats(0.05, 2.0))
def test_backlog_tends_to_the_stationary_queue(servers, load, limit):
    """Watched for long: Erlang's C times an exponential with Lee and Longton's mean."""
    services = np.linspace(0.5, 1.5, 41)
    rate = load * servers / services.mean()
    cv2 = services.var() / services.mean() ** 2
    found = float(backlog_exceeds(np.array([[limit]]), services, np.array([servers]), rate, 1e7)[0, 0])
    waits = erlang_c(servers, load * servers)
    mean_s = mean_wait(servers, load, float(cv2)) * services.mean() / waits
    assert found == pytest.approx(waits * np.exp(-limit / mean_s), rel=0.01, abs=1e-6)


def test_backlog_in_overload_grows_with_time():
    """Twice the load for 100 s: the last of it waits about 100 s, the average arrival half of that."""
    services = np.full(10, 1.0)
    limits = np.array([-1.0, 0.0, 25.0, 50.0, 75.0, 110.0])
    (found,) = backlog_exceeds(limits[None, :], services, np.array([4]), 8.0, 100.0)
    assert found[0] == 1.0
    assert found == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0], abs=0.1)
    assert (np.diff(found) <= 0).all()


def test_backlog_at_a_load_of_one_lies_between_those_beside_it():
    services, limit = np.full(10, 1.0), np.array([[5.0]])
    below, at, above = (
        float(backlog_exceeds(limit, services, np.array([4]), rate, 1000.0)[0, 0]) for rate in (3.99, 4.0, 4.01)
    )
    assert below < at < above


latencies = st.floats(0.01, 100.0)


@st.composite
def programs(draw: st.DrawFn, latencies: st.SearchStrategy[float] = latencies) -> Program:
    num_gpus = draw(st.sampled_from((4, 8, 12, 16)))
    degrees = draw(st.sampled_from(((1, 2, 4), (2, 4, 8), (2,), (1, 8))))
    keys = [(n, k) for n in degrees for k in range(1, (num_gpus - min(degrees)) // n + 1)]
    return Program(
        prefill={key: draw(latencies) for key in keys},
        decode={key: draw(latencies) for key in keys},
        num_gpus=num_gpus,
        uses_all=draw(st.booleans()),
        objective=draw(st.sampled_from(("max", "sum"))),
    )


def fits(program: Program, choice: PlanCounts) -> bool:
    used = sum(n * k for n, k in choice)
    return used == program.num_gpus if program.uses_all else used <= program.num_gpus


def every_pair(program: Program, excluded: list[PlanCounts]) -> PlanCounts | None:
    """``by_enumeration`` pair by pair."""
    pairs = starmap(PlanCounts, product(program.prefill, program.decode))
    allowed = [pair for pair in pairs if fits(program, pair) and pair not in excluded]
    if not allowed:
        return None
    least = min(program.value(*pair) for pair in allowed)
    return min(
        (pair for pair in allowed if program.value(*pair) <= least * (1 + TIE)),
        key=lambda pair: (
            program.tie_break(pair.prefill, is_prefill=True, least=least)
            + program.tie_break(pair.decode, is_prefill=False, least=least)
        ),
    )


def ranked(program: Program, top: int) -> list[PlanCounts]:
    found: list[PlanCounts] = []
    while len(found) < top and (each := every_pair(program, found)) is not None:
        found.append(each)
    return found


@settings(max_examples=50)
@given(programs() | programs(st.sampled_from((0.0, 1.0, 1.00005, 1.0002, 2.0))))
def test_enumeration_finds_the_plans_of_all_pairs_in_their_order(program):
    """Ties included, until there is no plan left."""
    first = ranked(program, 12)
    assert [by_enumeration(program, first[:place]) for place in range(len(first))] == first
    assert len(first) == 12 or by_enumeration(program, first) is None


def test_ties_go_by_both_latencies_then_by_replicas_then_by_prefill_gpus():
    """In units of the least objective; a replica costs a ten-thousandth over the GPUs, a prefill's GPUs half of it at most."""
    program = Program(
        prefill={(2, 3): 0.5, (4, 1): 0.25},
        decode={(2, 3): 2.0, (4, 1): 0.8},
        num_gpus=8,
        uses_all=True,
        objective="max",
    )
    for pair, is_prefill, expected in (
        ((2, 3), True, 0.25 + 1e-4 * (3 + 6 / 16) / 8),
        ((4, 1), True, 0.125 + 1e-4 * (1 + 4 / 16) / 8),
        ((2, 3), False, 1.0 + 1e-4 * 3 / 8),
    ):
        assert program.tie_break(pair, is_prefill=is_prefill, least=2.0) == pytest.approx(expected, abs=1e-12)
    flat = Program(prefill={(1, 1): 0.0}, decode={(1, 1): 0.0}, num_gpus=2, uses_all=True, objective="sum")
    assert flat.tie_break((1, 1), is_prefill=False, least=0.0) == pytest.approx(1e-4 / 2, abs=1e-12)


@pytest.mark.parametrize("uses_all", [True, False])
def test_four_thousand_gpus_are_enumerated(uses_all):
    """Latencies that fall with a phase's GPUs are balanced where both phases have half of them."""
    keys = [(n, k) for n in (1, 2, 4, 8) for k in range(1, 4095 // n + 1)]
    tau = {(n, k): 1 / (n * k) for n, k in keys}
    program = Program(prefill=tau, decode=tau, num_gpus=4096, uses_all=uses_all, objective="max")
    assert by_enumeration(program) == PlanCounts((8, 256), (8, 256))


def test_the_worst_phase_comes_first_and_the_sum_decides_among_equals():
    """Eight GPUs: 1.0 and 1.0 before 1.5 and 0.1, whose sum is less; but 1.0 and 0.4 before 1.0 and 1.0."""
    pre, dec = {(4, 1): 1.0, (2, 1): 1.5}, {(4, 1): 1.0, (2, 3): 0.1}
    program = Program(prefill=pre, decode=dec, num_gpus=8, uses_all=True, objective="max")
    assert by_enumeration(program, []) == PlanCounts((4, 1), (4, 1))
    assert by_enumeration(program, [PlanCounts((4, 1), (4, 1))]) == PlanCounts((2, 1), (2, 3))
    equals = replace(program, prefill={(4, 1): 1.0, (2, 1): 1.0}, decode={(4, 1): 1.0, (2, 3): 0.4})
    assert by_enumeration(equals, []) == PlanCounts((2, 1), (2, 3))
    summed = replace(program, objective="sum")
    assert by_enumeration(summed, []) == PlanCounts((2, 1), (2, 3))


@given(programs())
def test_top_plans_are_ranked_and_distinct(program):
    table = Coefficients(
        prefill={key: PhaseLatency(seconds=value, of_slo=value) for key, value in program.prefill.items()},
        decode={key: PhaseLatency(seconds=value, of_slo=value) for key, value in program.decode.items()},
    )
    config = PlannerConfig(uses_all=program.uses_all, objective=program.objective)
    found = solve(table, program.num_gpus, top=3, config=config)
    expected = ranked(program, 3)
    assert len({each.deployment for each in found}) == len(found) == len(expected)
    assert [each.value for each in found] == pytest.approx([program.value(*each) for each in expected], rel=2e-3)


def test_plan_of_a_small_cluster_against_all_plans_simulated():
    """Eight GPUs: the plan has the least worst phase of all pairs, each simulated."""
    load = workload(0.6)
    best = plan(MODEL, load, (2, 4), 8, top=3)
    values = []
    for (n, k), (m, j) in product(((2, 1), (2, 2), (2, 3), (4, 1)), repeat=2):
        if n * k + m * j == 8:
            pre, dec = simulate_prefill(MODEL, load, n, k), simulate_decode(MODEL, load, m, j)
            values.append(max(pre.of_slo, dec.of_slo))
    assert best[0].value == pytest.approx(min(values))
    assert all(each.deployment.gpus == 8 for each in best)


def test_second_replica_is_worth_its_gpus_as_eq_5_could_not_see():
    """Three times the load that one worker of four GPUs prefills."""
    (busy,) = plan(MODEL, workload(2.0), (4,), 16)
    assert busy.deployment.prefill[0].replicas > 1


def test_at_most_n_leaves_gpus_idle_only_if_they_bring_nothing():
    flat = PhaseLatency(seconds=1.0, of_slo=1.0)
    table = Coefficients(prefill={(2, 1): flat, (2, 2): flat}, decode={(2, 1): flat, (2, 2): flat})
    (all_used,) = solve(table, 6)
    (any_used,) = solve(table, 6, config=PlannerConfig(uses_all=False))
    assert all_used.deployment.gpus == 6
    assert any_used.deployment.gpus == 4


@settings(max_examples=40)
@given(
    st.tuples(latencies, latencies, latencies).map(lambda taus: sorted(taus, reverse=True)),
    st.tuples(latencies, latencies, latencies).map(lambda taus: sorted(taus, reverse=True)),
    latencies,
    latencies,
)
def test_no_bound_on_the_worst_phase_ranks_mixtral_as_table_2(pre_2, dec_2, pre_4, dec_4):
    """Mixtral on eight GPUs: P4x1 D4x1, then P2x1 D2x3, then P4x1 D2x2, and P2x2 D4x1 behind them.

    With any tau that falls with the replicas, Z = max(tau_pre, tau_dec) cannot give this order but by exact ties.
    """
    pre = {(2, k + 1): tau for k, tau in enumerate(pre_2)} | {(4, 1): pre_4}
    dec = {(2, k + 1): tau for k, tau in enumerate(dec_2)} | {(4, 1): dec_4}
    program = Program(prefill=pre, decode=dec, num_gpus=8, uses_all=True, objective="max")
    table_2 = [PlanCounts((4, 1), (4, 1)), PlanCounts((2, 1), (2, 3)), PlanCounts((4, 1), (2, 2))]
    values = [program.value(*each) for each in (*table_2, PlanCounts((2, 2), (4, 1)))]
    assume(len(set(values)) == 4)
    assert values != sorted(values)


def test_sum_of_both_phases_can_rank_mixtral_as_table_2():
    pre = {(2, 1): 0.78, (2, 2): 0.75, (2, 3): 0.74, (4, 1): 0.5}
    dec = {(2, 1): 2.0, (2, 2): 1.3, (2, 3): 1.0, (4, 1): 1.1}
    program = Program(prefill=pre, decode=dec, num_gpus=8, uses_all=True, objective="sum")
    assert ranked(program, 3) == [((4, 1), (4, 1)), ((2, 1), (2, 3)), ((4, 1), (2, 2))]


def test_method_goes_by_size():
    assert [default_method(gpus) for gpus in (8, 32, 64, 256)] == ["direct", "direct", "cached", "closed"]


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: plan(MODEL, workload(1.0), (2, 4), 2), "num_gpus=2"),
        (lambda: plan(MODEL, workload(1.0), (), 8), "degrees=()"),
        (lambda: workload(0), "rate=0"),
        (lambda: PlanningWorkload(sessions=(), rate=1.0, slo=SLO), "sessions=()"),
        (lambda: plan(MODEL, workload(1.0), (2, 4), 8, top=0), "top=0"),
    ],
)
def test_impossible_requests_are_refused(do, says):
    with pytest.raises(UserError, match=re.escape(says)):
        do()
