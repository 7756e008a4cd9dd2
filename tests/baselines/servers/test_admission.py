"""The policy in a real engine decides as on the simulated instance; here the engine is a loop that takes a millisecond a token."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill import TokenCost, turns

from baselines.servers.admission import Admission, AdmissionConfig, replay
from engines.errors import UserError
from engines.laps.cluster import PrefillCluster

ROOM = 10**9
SPEED = {"base_ms": 0.0, "request_us": 0.0, "token_us": 1000.0}
CONFIGS = {
    "laps": AdmissionConfig(policy="laps", boundary=64, chunk_tokens=128, window_ms=0.0, **SPEED),
    "reserve": AdmissionConfig(policy="reserve", slo_ms=2000.0, **SPEED),
}


def served(
    config: AdmissionConfig, arrivals: Sequence[tuple[float, int]]
) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Who is admitted in each step that admits anybody, and the log of an engine that asks when it is free."""
    admission = Admission(config)
    left = {str(i): tokens for i, (_, tokens) in enumerate(arrivals)}
    coming = list(enumerate(arrivals))
    log: list[dict[str, Any]] = []
    order: list[tuple[str, ...]] = []
    computed: dict[str, int] = {}
    now = 0.0
    while coming or left:
        while coming and coming[0][1][0] <= now:
            number, (arrival_s, tokens) = coming.pop(0)
            admission.arrive(str(number), tokens, arrival_s)
            log.append({"kind": "arrive", "name": str(number), "tokens": tokens, "now": arrival_s})
        log.append({"kind": "step", "now": now, "computed": dict(computed), "room": ROOM, "block": 16})
        plan = admission.step(now, computed, ROOM, 16)
        order += [plan.admitted] if plan.admitted else []
        if not plan.shares:
            assert coming, "somebody waits, and nothing happens"
            now = coming[0][1][0]
            continue
        for name, share in plan.shares.items():
            computed[name] = computed.get(name, 0) + share
            if computed[name] == left[name]:
                del left[name], computed[name]
        now += sum(plan.shares.values()) * 1e-3
    return order, log


def simulated(config: AdmissionConfig, arrivals: Sequence[tuple[float, int]]) -> list[set[str]]:
    run = PrefillCluster(system=config.system, cost=TokenCost(), boundary=config.boundary).simulate(turns(*arrivals))
    steps: dict[float, set[str]] = {}
    for number, started_s in enumerate(run.requests["started_s"]):
        steps.setdefault(float(started_s), set()).add(str(number))
    return [steps[time] for time in sorted(steps)]


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 400)), min_size=1, max_size=20, unique_by=lambda pair: pair[0]
)


@pytest.mark.parametrize("name", CONFIGS)
@given(drawn=ARRIVALS)
@settings(max_examples=60, deadline=None)
def test_the_order_is_that_of_the_simulated_instance(name, drawn):
    config = CONFIGS[name]
    # Steps take whole milliseconds and no two arrivals share a fraction of one: no step ends at one's arrival.
    arrivals = [((at + i / 32) * 1e-3, tokens) for i, (at, tokens) in enumerate(sorted(drawn))]
    order, log = served(config, arrivals)
    assert sorted((name for step in order for name in step), key=int) == [str(i) for i in range(len(arrivals))]
    assert simulated(config, arrivals) == [{*step} for step in order]
    assert replay(config, log) == [name for step in order for name in step]


def test_laps_takes_short_prompts_before_a_long_one_and_reserve_the_shortest_first():
    waiting = [(0.0, 400), (0.0, 300), (0.0, 10), (0.0, 20)]
    assert served(CONFIGS["laps"], waiting)[0] == [("2", "3"), ("0",), ("1",)]
    assert served(CONFIGS["reserve"], waiting)[0][0][:2] == ("2", "3")


def test_who_leaves_is_not_admitted():
    admission = Admission(CONFIGS["laps"])
    for name, tokens in (("a", 10), ("b", 20), ("c", 200)):
        admission.arrive(name, tokens, 0.0)
    admission.leave("a")
    admission.leave("nobody")
    assert admission.step(0.1, {}, ROOM, 16).admitted == ("b",)
    assert admission.step(0.2, {"b": 20}, ROOM, 16) == (("c",), {"c": 128})
    admission.leave("c")
    assert admission.step(0.3, {}, ROOM, 16) == ((), {})


def test_k_v_that_is_not_there_is_not_planned_for():
    admission = Admission(CONFIGS["laps"])
    for name in ("a", "b"):
        admission.arrive(name, 31, 0.0)
    assert admission.step(0.0, {}, 48, 16).admitted == ("a",), "two blocks each, a token of the answer included"
    assert "b" in admission


@pytest.mark.parametrize(
    ("text", "policy", "sentence"),
    [
        ("{}", "fcfs", "policy='fcfs' is unknown: use one of laps, reserve"),
        ("[]", "laps", "policy_settings='[]' is no JSON object"),
        ('{"bound": 3}', "laps", "bound=3 has no effect with policy_settings: leave it out, or use one of boundary"),
        ('{"boundary": 0}', "laps", "boundary=0 must be at least 1"),
        ('{"slo_ms": 0}', "reserve", "slo_s=0"),
        ('{"token_us": 0}', "reserve", "token_us=0 must be above 0"),
        ('{"boundary": "x"}', "laps", "boundary='x' must be a whole number"),
    ],
)
def test_settings_are_refused_in_a_sentence(text, policy, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        AdmissionConfig.parse(text, policy=policy)
