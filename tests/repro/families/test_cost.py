"""What simulated steps are charged by is a knob of every family: refused where it has no effect, told in every run."""

from dataclasses import replace
from statistics import mean

import pytest
from support.cells import a_cell
from support.refusals import refuses

import engines.cost.kernels as tables
from repro.families.cost import CostKnobs
from repro.runs.cell import Cell
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS

FAMILIES = {
    "dllm-serve": ("burst", "l40s", 2.0, {}),
    "ampd": ("gaia", "h20x32", 1.0, {"transient": True}),
    "laps": ("lmsys-chat-1m", "h200", 40.0, {"transient": True}),
}


def cell(system: str, **knobs: object) -> Cell:
    dataset, platform, rate, own = FAMILIES[system]
    return a_cell(system, dataset, platform, "roofline", rate=rate, **{"num_prompts": 10, **own, **knobs})


def run(system: str, **knobs: object) -> tuple[RunRecord, str]:
    deployment, workload = SYSTEMS.get(system).prepare(cell(system, **knobs))
    record = deployment.run(workload)
    assert record.obtained == deployment.obtained
    return record, deployment.basis


@pytest.mark.parametrize("system", FAMILIES)
def test_a_run_says_what_its_steps_were_composed_of(system):
    plain, by_roofline = run(system, cost="roofline")
    composed, basis = run(system)
    assert (plain.obtained, run(system, cost="composed")[1]) == ("simulated", basis)
    assert composed.obtained == "composed"
    framework = "sglang" if system == "laps" else "vllm"
    said = composed.manifest["calibration"]
    assert f"composed of {framework} kernels measured in aiconfigurator-core 0.12.0" in said
    assert ("transferred from the h200" in said) == (system == "ampd")  # the H20 has no tables
    other, another = run(system, kernels="trtllm")
    assert len({by_roofline, basis, another}) == 3
    finished = [record.tables["requests"]["finished_s"] for record in (plain, composed, other)]
    assert len({tuple(times) for times in finished}) == 3


@pytest.mark.parametrize("system", FAMILIES)
def test_the_table_is_a_part_of_what_a_run_rests_on(system, monkeypatch):
    before = SYSTEMS.get(system).prepare(cell(system, cost="composed"))[0].basis
    digest = tables.digest_of
    monkeypatch.setattr(tables, "digest_of", lambda content: digest(content + b" "))
    tables.load_tables.cache_clear()
    try:
        assert SYSTEMS.get(system).prepare(cell(system, cost="composed"))[0].basis != before
    finally:
        tables.load_tables.cache_clear()


def test_a_card_without_tables_or_a_twin_is_refused():
    with refuses("card='h300'"):
        CostKnobs(cost="composed").basis("h300")
    assert CostKnobs().on("h300") == CostKnobs(cost="roofline")
    assert CostKnobs().on("rtx4090") == CostKnobs(cost="composed")
    assert CostKnobs(cost="roofline").on("l40s").framework is None


def test_a_cluster_of_the_measured_card_serves_the_same_sessions_faster():
    """Nothing is transferred there, and with six times the arithmetic first tokens come earlier."""
    plain = cell("ampd", cost="composed")
    (_, there), (deployment, workload) = (
        SYSTEMS.get("ampd").prepare(replace(plain, platform=name)) for name in ("h20x32", "h200x32")
    )
    assert workload == there
    record = deployment.run(workload)
    assert "transferred" not in record.manifest["calibration"]
    slower = SYSTEMS.get("ampd").prepare(plain)[0].run(workload)
    waits = [mean(each.tables["requests"]["first_output_s"]) for each in (record, slower)]
    assert waits[0] < waits[1]
