"""The simulated instances: conservation, Little's law, histories and caches; their step cost by hand, and the model fitted to it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill import TokenCost, chat, h200_14b, little, summarise, turns

from baselines.ar.sglang import SglangConfig, graphs_only, sglang, vllm_pd
from engines.cluster.record import rows_of
from engines.cluster.sessions import ClosedLoop, OpenLoop, Round, Session
from engines.cost.roofline import RTX4090
from engines.errors import UserError
from engines.laps.batching import GRID, LADDER, WaitConfig
from engines.laps.cluster import OpenTurns, PrefillCluster, PrefillCost, PrefillRun, Turn
from engines.laps.system import (
    ControllerConfig,
    InstanceView,
    LapsConfig,
    LeastTokens,
    PrefillSystem,
    Spatial,
    laps,
    reserve,
)
from engines.models.shape import QWEN2_5_14B
from engines.policies.views import FALLBACK, Bucket, Chunk, PrefillTask, Rung

COST, MODEL = h200_14b()
SPATIAL = LapsConfig(spatial=Spatial(num_short=1, controller=ControllerConfig(cooldown_s=1.0)))
SYSTEMS: dict[str, PrefillSystem] = {
    "sglang": sglang(),
    "sglang-graphs": sglang(SglangConfig(prefill_graphs=True, routing="cache-aware"), MODEL),
    "vllm-pd": vllm_pd(),
    "graphs-only": graphs_only(MODEL),
    "laps": laps(MODEL),
    "laps-guarded": laps(MODEL, LapsConfig(graphs="nearest", wait=WaitConfig(wait="guarded"))),
    "laps-ladder": laps(MODEL, LapsConfig(graphs="ladder", wait=WaitConfig(wait="off"))),
    "laps-spatial": laps(MODEL, SPATIAL),
    "laps-each": laps(MODEL, LapsConfig(spatial=Spatial(num_short=2, pooling="each"))),
    "reserve": reserve(MODEL),
}


def talk(session_id: int, *rounds: tuple[int, int], delay_s: float = 0.0) -> Session:
    return Session(session_id, 0.0, tuple(Round(prefill, decode, delay_s) for prefill, decode in rounds))


def as_bytes(run: PrefillRun) -> str:
    return json.dumps([run.requests, run.steps, run.moves, run.instances, dict(run.facts)], default=list)


def simulate(system: PrefillSystem, arrivals: Any, until_s: float = float("inf"), **config: Any) -> PrefillRun:
    return PrefillCluster(system=system, cost=TokenCost(), **config).simulate(arrivals, until_s=until_s)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_request_is_served_once_and_the_same_way_again(name):
    cluster = PrefillCluster(system=SYSTEMS[name], cost=COST, num_instances=3)
    run = cluster.simulate(chat(90.0, 4.0, seed=1), until_s=60.0)
    requests, steps = run.requests, run.steps
    assert None not in requests["finished_s"]
    assert sum(steps["tokens"]) == sum(requests["tokens"]) == sum(run.instances["tokens"])
    assert sum(steps["num_finished"]) == len(run.requests["request_id"])
    assert all(padded >= tokens for padded, tokens in zip(steps["padded_tokens"], steps["tokens"], strict=True))
    for arrival, started, finished in rows_of(requests, "arrival_s", "started_s", "finished_s"):
        assert arrival <= started < finished
    rows = list(rows_of(steps, "instance", "start_s", "duration_s"))
    for index in range(3):
        own = [(start, duration) for instance, start, duration in rows if instance == index]
        assert all(start + duration <= after + 1e-9 for (start, duration), (after, _) in pairwise(own))
        assert run.instances["busy_s"][index] == pytest.approx(sum(duration for _, duration in own))
    if name.startswith("laps"):
        assert all(not (short and long) for short, long in zip(steps["num_short"], steps["num_long"], strict=True))
    number, product = little(run)
    assert number == pytest.approx(product)
    assert as_bytes(cluster.simulate(chat(90.0, 4.0, seed=1), until_s=60.0)) == as_bytes(run)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000), rate=st.floats(5, 300), until_s=st.floats(0.5, 4), name=st.sampled_from(sorted(SYSTEMS))
)
def test_littles_law_holds_for_a_run_cut_off(seed, rate, until_s, name):
    arrivals = OpenTurns(turns=[*chat(rate, 3.0, seed=seed).turns, Turn(3.0, 10**6, 0, 0, 50)])
    run = PrefillCluster(system=SYSTEMS[name], cost=COST, num_instances=3).simulate(arrivals, until_s=until_s)
    if len(run.requests["request_id"]):
        number, product = little(run)
        assert number == pytest.approx(product, abs=1e-9)
    assert sum(run.instances["busy_s"]) <= 3 * run.facts["end_s"] + 1e-9


def test_a_closed_loop_keeps_its_clients_busy_one_turn_at_a_time():
    sessions = [talk(index, (100, 40), (50, 10), delay_s=0.2) for index in range(6)]
    run = simulate(sglang(), ClosedLoop(sessions=sessions, num_clients=2, think_s=0.5))
    requests = run.requests
    assert requests["session_id"] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert requests["history"] == [0, 0, 140, 140] * 3
    assert requests["tokens"] == [100, 100, 50, 50] * 3
    # Client 0 finishes at 0.1 and comes back after 0.2; a new session starts 0.2 + 0.5 after the last turn... of think time.
    assert requests["arrival_s"][:3] == pytest.approx([0.0, 0.0, 0.3])
    number, product = little(run)
    assert number == pytest.approx(product)
    # With clients that never think, two requests are in the system at any time.
    eager = [talk(index, (100, 40), (50, 10)) for index in range(40)]
    run = simulate(sglang(), ClosedLoop(sessions=eager, num_clients=2), until_s=2.0)
    assert little(run)[0] == pytest.approx(2.0)


def test_little_bounds_throughput_by_latency_in_a_closed_loop():
    """With c clients that never think, c = throughput x latency: a latency cut of 20 % allows at most 25 % more."""
    sessions = [talk(index, (60, 100), (900, 50), (30, 80)) for index in range(4000)]
    for name in ("sglang", "laps", "reserve"):
        cluster = PrefillCluster(system=SYSTEMS[name], cost=COST)
        run = cluster.simulate(ClosedLoop(sessions=sessions, num_clients=16), until_s=30.0)
        found = summarise(run)
        assert found.requests_per_s * found.mean_s == pytest.approx(16, rel=0.02)


def test_streams_run_side_by_side():
    shorts = ClosedLoop(sessions=[talk(index, (50, 1)) for index in range(1000)], num_clients=4)
    longs = ClosedLoop(sessions=[talk(10**6 + index, (1500, 1)) for index in range(1000)], num_clients=1)
    run = simulate(sglang(), [shorts, longs], until_s=20.0)
    # The very first request finds the instance idle and starts alone, so three short clients and the long one fall
    # into step: they come back together, while the fourth runs.
    assert set(zip(run.steps["num_short"], run.steps["num_long"], strict=True)) == {(1, 0), (3, 1)}


@pytest.mark.parametrize(
    ("cache", "reprefills", "expected"),
    [
        # Round robin puts the second turn on the other instance, the third on the first again.
        ("shared", False, [(0, 100), (140, 50), (200, 30)]),
        ("shared", True, [(0, 100), (100, 90), (190, 40)]),
        ("instance", False, [(0, 100), (0, 190), (140, 90)]),
        ("instance", True, [(0, 100), (0, 190), (100, 130)]),
    ],
)
def test_what_is_not_cached_is_prefilled_again(cache, reprefills, expected):
    arrivals = OpenLoop(sessions=[talk(0, (100, 40), (50, 10), (30, 5))])
    run = simulate(sglang(), arrivals, num_instances=2, cache=cache, reprefills_answer=reprefills)
    assert list(zip(run.requests["history"], run.requests["tokens"], strict=True)) == expected


def test_a_router_that_knows_the_caches_keeps_a_session_where_it_is():
    sessions = [Session(index, 0.01 * index, tuple(Round(40, 20, 0.3) for _ in range(5))) for index in range(8)]
    for routing, moves in (("cache-aware", False), ("least-tokens", False), ("round-robin", True)):
        system = sglang(SglangConfig(routing=routing))
        run = simulate(system, OpenLoop(sessions=sessions), num_instances=3, cache="instance")
        assert (sum(run.requests["tokens"]) > 8 * 5 * 40) == moves


def test_a_history_prefilled_again_can_make_a_request_long():
    system = laps(MODEL, LapsConfig(wait=WaitConfig(wait="off"), spatial=Spatial(num_short=1, pooling="each")))
    arrivals = OpenLoop(sessions=[talk(0, (300, 10), (20, 5)), talk(1, (100, 10), (20, 5))])
    run = simulate(system, arrivals, num_instances=2, cache="instance")
    rows = sorted(rows_of(run.requests, "session_id", "turn", "length_class", "instance", "tokens"))
    # Session 0 began in the long pool: 310 tokens of history more would not be short, so its second turn stays there.
    assert rows == [(0, 0, "long", 1, 300), (0, 1, "short", 1, 20), (1, 0, "short", 0, 100), (1, 1, "short", 0, 20)]


def test_a_request_left_unfinished_is_a_violation_once_its_deadline_passed():
    arrivals = turns((0.0, 300), (0.0, 300), (0.7, 9000), (0.95, 50))
    run = simulate(sglang(SglangConfig(max_num_batched_tokens=300)), arrivals, until_s=1.2, slo_s=0.4)
    requests = run.requests
    assert requests["finished_s"] == [pytest.approx(0.3), pytest.approx(0.6), None, None]
    assert requests["violated"] == [False, True, True, None]
    assert requests["deadline_s"] == pytest.approx([0.4, 0.4, 1.1, 1.35])
    found = summarise(run)
    assert found.violation_rate == pytest.approx(2 / 3)
    assert found.longest_s == pytest.approx(0.6)
    assert found.num_requests == 4
    assert found.mean_s == pytest.approx(0.45)
    assert run.instances["busy_s"] == pytest.approx([1.1])
    free = simulate(sglang(), arrivals, slo_s=None)
    assert free.requests["violated"] == [False] * 4
    assert free.requests["deadline_s"] == [None] * 4


def test_what_is_unfinished_at_the_end_is_late_once_its_deadline_is_over():
    """200 tokens take 200 ms: neither is done at 150 ms. A deadline that is just there can still be met."""
    for slo_s, late in ((0.149, True), (0.15, None), (0.2, None)):
        cluster = PrefillCluster(system=sglang(), cost=TokenCost(), slo_s=slo_s)
        run = cluster.simulate(turns((0.0, 200), (0.0, 200)), until_s=0.15)
        assert run.requests["finished_s"] == [None, None]
        assert run.requests["violated"] == [late, late]


@pytest.mark.parametrize(("slo_s", "late"), [(0.1, [False]), (0.099, [True]), (None, [False])])
def test_a_turn_is_late_after_its_objective_and_not_at_it(slo_s, late):
    """100 tokens take 0.1 s. The controller reads what the instance notes, the record says the same."""
    seen: list[Any] = []

    class Watched(LeastTokens):
        def pick(self, task: PrefillTask, instances: Sequence[InstanceView], now: float) -> int:
            seen.extend(instances)
            return super().pick(task, instances, now)

    system = replace(sglang(), make_router=Watched)
    run = simulate(system, turns((0.0, 100)), slo_s=slo_s)
    assert run.requests["finished_s"] == [0.1]
    assert seen[0].late == run.requests["violated"] == late


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: COST.step_s([Chunk(0, 65)], 0, 0, Bucket(64, 1)), "does not hold"),
        (lambda: COST.step_s([Chunk(0, 65)], 0, 0, Rung(64)), "does not hold"),
        (lambda: COST.step_s([Chunk(0, 65)], 0, 0, "graph"), "unknown"),
        (lambda: COST.step_s([Chunk(0, 60)], 1, 100, Rung(64)), "captured for prefills alone"),
        (lambda: PrefillCost(QWEN2_5_14B, RTX4090), "use a smaller model"),
        (
            lambda: PrefillCluster(system=laps(MODEL, SPATIAL), cost=COST, num_instances=2, cache="instance"),
            "use pooling='each'",
        ),
        (lambda: simulate(sglang(), turns((1.0, 5), (0.5, 5))), "sort what arrives"),
        (lambda: simulate(sglang(), OpenTurns(turns=[Turn(0.0, 0, 1, 10, 5, 20)])), "part of the history"),
        (lambda: simulate(sglang(), []), "give at least one"),
    ],
)
def test_what_cannot_be_is_refused(do, says):
    with pytest.raises(UserError, match=says):
        do()


def test_the_fitted_model_predicts_the_steps_it_has_not_seen():
    steps = [
        ([Chunk(700, 90)], None),
        ([Chunk(0, 333), Chunk(2000, 40)], None),
        ([Chunk(300, 200)] * 20, None),
        ([Chunk(100, 50)] * 3, FALLBACK),
        ([Chunk(800, 60)] * 30, Bucket(64, 32)),
        ([Chunk(800, 100), Chunk(0, 300)], Rung(448)),
    ]
    for chunks, mode in steps:
        assert MODEL.step_s(chunks, 0, 0, mode) == pytest.approx(COST.step_s(chunks, 0, 0, mode), rel=0.03), (
            chunks,
            mode,
        )
    assert MODEL.mean_error < 0.01
    assert MODEL.knee_tokens == pytest.approx(400, rel=0.02)
    assert set(MODEL.shapes) == {*GRID, *LADDER}
