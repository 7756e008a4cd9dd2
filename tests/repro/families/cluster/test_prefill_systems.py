"""Prefill systems through the harness: what a cell becomes, what its record holds, what is checked of it, what is refused."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cells import a_cell, ran

from repro.families.cluster.laps_record import PREFILL, STEPS, Window, littles_law, tokens_are_whole, window_of
from repro.families.cluster.laps_settings import open_turns
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare
from repro.runs.record import REQUESTS
from repro.workloads.conversations import ConversationConfig, Conversations, draw_conversations
from repro.workloads.draws import ArrivalConfig

SYSTEMS = (
    *("laps", "laps-graphs-only", "laps-disaggregation-only", "reserve", "on-time", "sglang-pd"),
    *("sglang-pd-router", "vllm-pd"),
)
POISSON = ArrivalConfig(kind="poisson", rate=50.0)


def cell(system: str = "laps", *, rate: float | None = None, seed: int = 0, **knobs: Scalar) -> Cell:
    given: dict[str, Scalar] = {"num_prompts": 300, **({"clients": 8} if rate is None else {}), **knobs}
    if "long_clients" in knobs or "short_clients" in knobs:
        given.pop("clients")
    return a_cell(system, dataset="lmsys-chat-1m", platform="h200", executor="roofline", rate=rate, seed=seed, **given)


@pytest.mark.parametrize("system", [*SYSTEMS, "edf"])
def test_another_process_builds_the_same_system(system):
    deployment = prepare(cell(system, rate=40.0)).deployment
    assert pickle.loads(pickle.dumps(deployment)) == deployment


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("rate", [None, 40.0])
@pytest.mark.parametrize("instances", [1, 4])
def test_runs_are_whole_valid_and_the_same_again(system, rate, instances):
    experiment, record = ran(cell(system, rate=rate, num_instances=instances))
    PREFILL.check_tables(record)
    assert PREFILL.assess(record).reasons == ()
    assert len(record.requests["request_id"]) == experiment.workload.streams[0].num_turns
    assert experiment.run().tables == record.tables
    found = PREFILL.summarize(record)
    times = np.array(record.requests["finished_s"]) - np.array(record.requests["arrival_s"])
    counted = np.array(record.requests["counted"])
    assert found["ttft_all_s"]["mean"] == pytest.approx(times[counted].mean())
    assert found["slo_violations"] == pytest.approx((times[counted] > 0.4).mean())
    assert found["ttft_all_s"]["n"] == sum(each["n"] for each in found["by_length"].values())
    assert found["ttft_all_s"]["n"] == found["ttft_short_s"]["n"] + found["ttft_long_s"]["n"]


def test_a_closed_loop_that_dies_before_its_last_conversation_is_counted_up_to_its_end():
    """As printed the wait for company ends for ever in a round without a request, and with it LAPS."""
    _, record = ran(cell(clients=12, num_prompts=300, wait="printed"))
    assert record.facts["window_s"][1] == record.facts["end_s"]
    json.dumps([record.facts, PREFILL.summarize(record)], allow_nan=False)
    assert PREFILL.assess(record).reasons == ("12 of 70 requests did not finish",)


def test_the_printed_algorithm_never_ends_and_its_run_says_so():
    _, record = ran(cell(rate=30.0, wait="printed"))
    verdict = PREFILL.assess(record)
    assert not verdict.valid
    assert "did not finish" in verdict.reasons[0]
    assert PREFILL.summarize(record)["slo_violations"] > 0.5, "a turn without a token misses its objective"


def test_overload_is_invalid_unless_it_is_meant():
    asked = {"rate": 200.0, "num_prompts": 1000}
    _, record = ran(cell("sglang-pd", **asked))
    assert any("never drains" in reason for reason in PREFILL.assess(record).reasons)
    _, meant = ran(cell("sglang-pd", transient=True, **asked))
    assert PREFILL.assess(meant).valid


def test_a_run_that_breaks_littles_law_is_found_out():
    _, record = ran(cell(clients=8))
    assert list(littles_law(record)) == []
    late = [stamp + 0.2 for stamp in record.requests["finished_s"]]
    assert any(
        "clients are in the system" in each for each in littles_law(record.with_columns(REQUESTS, finished_s=late))
    )
    _, opened = ran(cell(rate=40.0))
    assert list(littles_law(opened)) == []


def test_a_run_that_loses_tokens_is_found_out():
    _, record = ran(cell(clients=8))
    assert list(tokens_are_whole(record)) == []
    lost = [tokens - 1 for tokens in record.tables[STEPS]["tokens"]]
    assert list(tokens_are_whole(record.with_columns(STEPS, tokens=lost)))


def test_the_window_opens_after_a_tenth_and_closes_where_it_is_told():
    turns: dict[str, list[Any]] = {
        "session_id": list(range(100)),
        "turn": [0] * 100,
        "arrival_s": [*map(float, range(100))],
    }
    assert window_of(turns, 200.0) == Window(10.0, 99.0)
    assert window_of(turns, 200.0, [50, 60]) == Window(5.0, 50.0)
    assert window_of(turns, 200.0, [100]) == Window(10.0, 200.0), "a conversation that never began"
    assert window_of({"arrival_s": []}, 200.0) == Window(0.0, 0.0)


def conversations(num_turns: int, seed: int) -> Conversations:
    return draw_conversations(ConversationConfig(dataset="sharegpt", num_turns=num_turns, seed=seed))


@given(num_turns=st.integers(1, 900), seed=st.integers(0, 50))
def test_turns_at_their_own_times_are_all_there_in_order_with_their_histories(num_turns, seed):
    drawn = conversations(num_turns, seed)
    turns = list(open_turns(drawn, POISSON, seed).turns)
    assert len(turns) == drawn.num_turns
    asked = sorted(turn.prefill_tokens for session in drawn.sessions for turn in session.rounds)
    assert sorted(turn.tokens for turn in turns) == asked
    latest: dict[int, Any] = {}
    for turn in turns:
        before = latest.get(turn.session_id)
        if before is not None:
            assert turn.turn == before.turn + 1
            assert turn.history == before.history + before.tokens + turn.answered
        assert (turn.history == 0) == (turn.turn == 0)
        latest[turn.session_id] = turn
