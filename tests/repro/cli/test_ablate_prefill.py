"""``repro ablate`` of LAPS's components, end to end."""

import csv
import json

import pytest
from support.command import repro

from repro.reports.ablation import PREFILL_COMPONENTS


@pytest.mark.parametrize("component", PREFILL_COMPONENTS)
def test_variants_are_paired_with_the_component_switched_off(component, tmp_path):
    short = ("--knob", "num_prompts=150", "--num-runs", 2)
    command = ("ablate", "--component", component, *short, "--result-dir", tmp_path / "runs", "--json")
    done = repro(*command, "--plot", tmp_path / "a.png")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["variant"] for row in rows] == [variant.label for variant in PREFILL_COMPONENTS[component]]
    assert rows[0]["added_points"] == 0
    for row in rows:
        assert row["obtained"] == "composed"
        assert row["num_runs"] == len(row["run_folders"]) == 2
        assert row["added_points"] == pytest.approx(100 * (row["slo_violations"] - rows[0]["slo_violations"]))
        assert row["valid"] == (row["reasons"] == [])
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
