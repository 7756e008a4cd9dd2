"""Measured instances: what a cell of this CPU becomes, with steps whose time is known, and one with the model itself."""

import numpy as np
import pytest
from support.cells import CPU_TINY, a_cell
from support.exact_instance import FLOOR_S, TOKEN_S, ExactInstance, profile_little

from repro.families.cluster import on_torch
from repro.families.cluster.laps_record import PREFILL, STEPS
from repro.families.cluster.laps_settings import MEASURED_GRID
from repro.families.platforms import PrefillPart
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare
from repro.runs.sitting import interleaved

SYSTEMS = ("laps", "laps-graphs-only", "laps-disaggregation-only", "reserve", "sglang-pd", "vllm-pd")
PART = CPU_TINY.part(PrefillPart)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torch, "instance", lambda max_len: ExactInstance())


def cell(system: str = "laps", *, seed: int = 0, **knobs: Scalar) -> Cell:
    return a_cell(system, dataset="lmsys-chat-1m", seed=seed, **{"num_prompts": 200, **knobs})


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("system", SYSTEMS)
def test_runs_are_whole_valid_and_say_that_they_were_measured(system):
    experiment = prepare(cell(system, clients=8))
    record = experiment.run()
    PREFILL.check_tables(record)
    assert PREFILL.assess(record).reasons == ()
    assert record.obtained == "measured"
    assert record.manifest["calibration"] is None
    assert (record.facts["slo_s"], record.facts["boundary"]) == (PART.slo_s, 64)
    found, steps = PREFILL.summarize(record), record.tables[STEPS]
    assert found["busy_s"] == pytest.approx(sum(FLOOR_S + TOKEN_S * tokens for tokens in steps["padded_tokens"]))
    times = np.array(record.requests["finished_s"]) - np.array(record.requests["arrival_s"])
    assert found["slo_violations"] == pytest.approx((times > PART.slo_s)[record.requests["counted"]].mean())


def test_lengths_are_a_quarter_of_the_simulated_ones():
    where = {"platform": "h200", "executor": "roofline"}
    cells = cell(clients=4), Cell(**{**vars(cell(clients=4)), **where})
    measured, simulated = (prepare(each).workload.streams[0].sessions for each in cells)
    for small, large in zip(measured, simulated, strict=True):
        for ours, theirs in zip(small.rounds, large.rounds, strict=True):
            assert ours.prefill_tokens == max(1, round(theirs.prefill_tokens / 4))
            assert ours.decode_tokens == max(1, round(theirs.decode_tokens / 4))


def test_measured_runs_are_other_runs_than_simulated_ones():
    measured = prepare(cell(clients=4))
    simulated = prepare(Cell(**{**vars(cell(clients=4)), "platform": "h200", "executor": "roofline"}))
    assert measured.is_measured
    assert measured.machine is not None
    assert measured.cell.key != simulated.cell.key


def test_systems_of_a_comparison_take_turns():
    grid = [
        cell(system, seed=seed, clients=clients, comparison="x")
        for seed in (0, 1)
        for clients in (1, 4)
        for system in SYSTEMS[:3]
    ]
    order = [each.cell for each in interleaved([prepare(each) for each in grid])]
    assert [each.seed for each in order] == [0] * 6 + [1] * 6
    assert [each.system for each in order[:6]] == [*SYSTEMS[:3]] * 2
    assert order[6].system == SYSTEMS[1], "another begins in every repeat"


def test_the_model_itself_serves_a_few_turns(monkeypatch):
    """Steps take time of this machine's: nothing is said of how much."""
    profile_little(monkeypatch)
    record = prepare(cell(clients=2, num_prompts=24, max_tokens=255)).run()
    assert PREFILL.assess(record).reasons == ()
    assert min(record.tables[STEPS]["duration_s"]) > 0
    instance = record.facts["instance"]
    assert (instance["threads"], instance["attention"]) == (1, "sdpa")
    assert instance["buckets"] == len(MEASURED_GRID)
