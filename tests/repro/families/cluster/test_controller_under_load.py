"""The controller near capacity: eight instances under constant load, as Figure 7 has them, for a minute."""

import pytest
from support.cells import a_cell

from repro.families.cluster.laps_record import MOVES
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord

CAPACITY, INSTANCES, LENGTH_S = 83.0, 8, 60.0
"""Turns/s of one instance with Qwen2.5-14B."""


def run(load: float, seed: int) -> RunRecord:
    rate = load * INSTANCES * CAPACITY
    knobs = {"num_instances": INSTANCES, "num_prompts": round(rate * LENGTH_S), "transient": True}
    cell = a_cell("laps", dataset="lmsys-chat-1m", platform="h200", executor="roofline", rate=rate, seed=seed, **knobs)
    return prepare(cell).run()


@pytest.mark.parametrize(("load", "seed"), [(0.5, 0), (0.7, 0), (0.9, 0), (0.9, 1)])
def test_mended_moves_at_most_once_a_minute(load, seed):
    record = run(load, seed)
    assert len(record.tables[MOVES]["time_s"]) <= 1
    assert all(1 <= num < INSTANCES for num in record.tables[MOVES]["num_short"])
