"""A policy of a user's own as a variant of an ablation."""

from __future__ import annotations

import json
from pathlib import Path

from support.refusals import refuses
from typer.testing import CliRunner

from repro.cli.main import app
from repro.reports.ablation import CLUSTER_COMPONENTS, COMPONENTS, OWN, PREFILL_COMPONENTS, own_variant
from repro.runs.system import settings_of


def test_each_component_takes_policies_by_a_knob_of_its_system():
    assert OWN.keys() <= COMPONENTS.keys() | CLUSTER_COMPONENTS.keys() | PREFILL_COMPONENTS.keys()
    for component, knob in OWN.items():
        variant = own_variant(component, "mine:Policy", {"n": 2})
        assert (variant.label, variant.knobs) == ("Policy, n=2", ((knob, "mine:Policy"), ("n", 2)))
        assert any(knob in kind.__dataclass_fields__ for kind in settings_of(variant.system)) or knob == "scheduler"
    with refuses("variant='mine:Policy'"):
        own_variant("graphs", "mine:Policy", {})


def test_an_own_batcher_stands_beside_the_papers_on_the_same_seeds(tmp_path: Path):
    asked = ["ablate", "--component", "awd", "--num-runs", "2", "--knob", "num_prompts=40", "--json"]
    own = ["--variant", "support.own:Gather@window_s=0.05", "--variant", "support.own:Gather"]
    ran = CliRunner().invoke(app, [*asked, *own, "--result-dir", str(tmp_path)], catch_exceptions=False)
    rows = json.loads(ran.stdout)["rows"]
    assert [row["variant"] for row in rows[-2:]] == ["Gather, window_s=0.05", "Gather"]
    assert rows[0]["variant"] == "no waiting"
    assert all(len(row["run_folders"]) == 2 for row in rows)
    assert rows[-2]["ttft_mean_s"] > rows[-1]["ttft_mean_s"]
    assert not rows[-1]["ours"]
