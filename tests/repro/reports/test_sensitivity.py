"""What predictions depend on: counted steps against simulated runs, and the tables made of them."""

import csv
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cells import a_cell

from engines.cost.roofline import Calibration, gpu
from repro.paths import CALIBRATION
from repro.reports import sensitivity as module
from repro.reports.fitting import PROTOCOLS, STEP_OVERHEAD_S, SYSTEM, calibration_with, stated_values
from repro.reports.sensitivity import BATCH_RULES, OVERHEADS_S, length_for, num_runs, save, sensitivity, tally
from repro.runs.cell import Scalar
from repro.runs.family import served_per_second
from repro.runs.system import SYSTEMS

SMALL: dict[str, Scalar] = {"num_prompts": 9, "gen_length": 64, "steps": 64}
CASES: list[tuple[str, dict[str, Scalar]]] = [
    ("dllm-serve", {}),
    ("dllm-serve", {"refresh_delay": 0}),
    ("sparse-dllm", {"reading": "published"}),
    ("fast-dllm", {"reading": "published", "batch_rule": "max_model_len"}),
    ("dllm-cache", {"reading": "published"}),
    ("dllm-cache", {"reading": "policy"}),
]


@pytest.mark.parametrize(("system", "knobs"), CASES)
def test_counted_steps_say_what_a_simulation_says(system, knobs):
    """Under constants that they were not counted with, as all requests are there from the start."""
    counted = tally("l40s", system, "burst", **SMALL, **knobs)
    cell = a_cell(system, dataset="burst", platform="l40s", executor="roofline", cost="roofline", **{**SMALL, **knobs})
    deployment, workload = SYSTEMS.get(system).prepare(cell)
    for share, overhead in ((1.0, 0.0), (0.3, 0.005), (0.05, 0.2)):
        calibration = replace(
            Calibration.datasheet(gpu("l40s")),
            matmul_efficiency=share,
            attention_efficiency=share,
            step_overhead_s=overhead,
        )
        record = replace(deployment, calibration=calibration).run(workload)
        assert counted.throughput(calibration) == pytest.approx(served_per_second(record, "output_len"), rel=1e-9)
    assert counted.num_tokens == 9 * 64
    assert counted.batch_size == deployment.batch_size


@given(
    scale=st.floats(1, 1e4),
    power=st.floats(-2, -0.1),
    at=st.floats(0, 1),
    lengths=st.lists(st.floats(10, 5000), min_size=2, max_size=6, unique_by=round),
)
def test_the_length_of_a_power_law_is_exact(scale, power, at, lengths):
    points = [(length, scale * length**power) for length in lengths]
    length = min(lengths) * (max(lengths) / min(lengths)) ** at
    found = length_for(scale * length**power * (1 - 1e-12), points)
    assert found is None or found == pytest.approx(length, rel=1e-6)
    assert found is not None or at in (0, 1)
    assert length_for(2 * max(value for _, value in points), points) is None
    assert length_for(min(value for _, value in points) / 2, points) is None


@pytest.mark.parametrize("card", PROTOCOLS)
def test_the_tables(card, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NUM_REQUESTS", 3)
    monkeypatch.setattr(module, "LENGTH_SCALES", (0.5, 1.0, 2.0))
    protocol, runs = PROTOCOLS[card], []
    found = sensitivity(protocol, on_run=lambda: runs.append(1))
    assert len(runs) == num_runs(protocol)
    # Each share is fitted to what is stated of dLLM-Serve, by the geometric mean.
    stated = stated_values(protocol)
    values = {(row.table, row.item, row.setting): row.value for row in found}
    assert len(values) == len(found)
    overheads = [setting for _, item, setting in values if item == "share of peak"]
    assert overheads == [f"{1e3 * seconds:g} ms" for seconds in OVERHEADS_S]
    share = values["step overhead", "share of peak", f"{1e3 * STEP_OVERHEAD_S:g} ms"]
    product, count = 1.0, len(protocol.targets)
    for target in protocol.targets:
        own = tally(card, SYSTEM, target.dataset).throughput(calibration_with(protocol, share))
        assert values["batch rule", f"dllm-serve {target.dataset}", "packed"] == pytest.approx(own)
        product *= own / stated[SYSTEM, target.dataset]
    assert share == 1 or product ** (1 / count) == pytest.approx(1, abs=2e-3)

    # What the paper states of baselines goes into no fit.
    errors = [
        sorted(
            abs(values["batch rule", f"{system} {dataset}", rule] / value - 1)
            for (system, dataset), value in stated.items()
            if system != "dllm-serve"
        )
        for rule in BATCH_RULES
    ]
    for rule, each in zip(BATCH_RULES, errors, strict=True):
        assert values["batch rule", "median error of baselines", rule] == pytest.approx(100 * each[len(each) // 2])

    path = save(found, tmp_path / "x.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["table"], row["item"], row["setting"]) for row in rows] == list(values)
    assert [float(row["value"]) for row in rows] == pytest.approx(list(values.values()), rel=1e-5)


def test_the_papers_order_needs_prompts_that_no_public_data_has():
    rows = list(csv.DictReader((CALIBRATION / "l40s-sensitivity.csv").read_text().splitlines()))
    needed = {row["item"]: float(row["value"]) for row in rows if row["setting"] == "mean prompt for the paper's"}
    assert needed["burst"] < needed["osc"] < needed["livebench"]
