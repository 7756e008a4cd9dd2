import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import repro
from support.refusals import refuses

from repro.cli.ablate import AMPD, LAPS, MEASURED_RUNS, AblationOptions, _dllm_study, _speed_text, difference
from repro.cli.plots import _error_bar
from repro.reports.ablation import COMPONENTS, OWN, own_variant, system_of
from repro.runs.family import Validity
from repro.runs.statistics import mean_interval
from repro.runs.system import settings_of

WHERE = ["--platform", "rtx4090", "--dataset", "livebench"]


def ablate(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = repro("ablate", *WHERE, "--result-dir", tmp_path, "--json", *arguments)
    assert result.code == 0, result.err
    report: dict[str, Any] = json.loads(result.out)
    return report


def test_a_component_switched_all_else_equal(tmp_path):
    report = ablate(tmp_path, "--component", "scheduler")
    rows = report["rows"]
    assert [(row["variant"], row["ours"]) for row in rows] == [
        ("request", False),
        ("phase", False),
        ("lookahead", True),
    ]
    assert rows[0]["relative"] == 1
    for row in rows:
        assert row["relative"] == pytest.approx(row["throughput_tok_s"] / rows[0]["throughput_tok_s"])
        assert (row["obtained"], row["valid"], row["accuracy"]) == ("composed", True, None)
        assert row["kv_rows"] > 0
        assert len(row["run_folders"]) == 1
    # Phases share steps: more requests run at once than when each reserves a whole Refresh for life.
    assert rows[1]["mean_running"] > rows[0]["mean_running"]
    again = ablate(tmp_path, "--component", "scheduler")
    assert again["rows"] == rows


def test_budgeting_frees_cache_rows_and_a_single_refresh_is_faster(tmp_path):
    monolithic, decomposed = ablate(tmp_path, "--component", "budgeting")["rows"]
    assert decomposed["kv_rows"] > monolithic["kv_rows"]
    assert decomposed["throughput_tok_s"] > monolithic["throughput_tok_s"]
    two, one = ablate(tmp_path, "--component", "refresh")["rows"]
    assert one["throughput_tok_s"] > 1.3 * two["throughput_tok_s"]  # most of the work is in Refreshes
    assert two["run_folders"] == decomposed["run_folders"]


def test_the_ladder_and_its_repeats(tmp_path):
    rows = ablate(tmp_path, "--component", "ladder", "--num-runs", "2", "--knob", "num_prompts=24")["rows"]
    assert [row["variant"] for row in rows][:3] == ["Sparse-dLLM", "+ static batching", "+ inference engine"]
    assert len(rows) == 7
    assert all(len(row["run_folders"]) == 2 and row["throughput_half_width"] > 0 for row in rows)


def test_variants_are_held_against_the_first_seed_by_seed(tmp_path):
    rows = ablate(tmp_path, "--component", "scheduler", "--num-runs", "3", "--knob", "num_prompts=16")["rows"]
    first, second, _ = rows
    assert (first["against"], first["relative"], first["relative_low"], first["relative_high"]) == (None, 1, 1, 1)
    assert second["against"] == "request"
    pairs = [second["throughput_by_seed"][seed] / first["throughput_by_seed"][seed] for seed in ("0", "1", "2")]
    found = mean_interval([math.log(pair) for pair in pairs])
    assert second["relative"] == pytest.approx(math.exp(found.mean or 0))
    assert second["relative_low"] == pytest.approx(math.exp(found.low or 0))
    expected = difference(second["relative_low"], second["relative_high"], 1, ("slower", "faster"))
    assert second["difference"] == expected
    # Nothing was measured: no processor worked on it.
    assert (second["tokens_per_processor_s"], second["relative_processor"]) == (None, None)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        *((0.7, 1.9, "no difference shown"), (1.1, 1.9, "faster"), (0.2, 0.9, "slower")),
        *((1, 1.2, "no difference shown"), (0.8, 1, "no difference shown")),
    ],
)
def test_an_interval_that_holds_one_shows_no_difference(low, high, expected):
    assert difference(low, high, 1, ("slower", "faster")) == expected


def ended(attainment: float, violations: float) -> SimpleNamespace:
    """Of a run as much as its row is made of."""
    parts = dict.fromkeys(("ttft_all_s", "ttft_short_s", "ttft_long_s", "rps", "graph_share"))
    parts |= dict.fromkeys(("ttft_initial_s", "ttft_incremental_s", "itl_s", "local_share"))
    summary = {**parts, "slo_attainment": attainment, "slo_violations": violations}
    return SimpleNamespace(summary=summary, validity=Validity(valid=True, reasons=()), facts={"deployment": ""})


@pytest.mark.parametrize("row", [AMPD.row, LAPS.row])
def test_more_that_meet_their_objective_is_better(row):
    worse, better = ([ended(share, 1 - share) for share in shares] for shares in ((0.5, 0.6, 0.7), (0.6, 0.72, 0.8)))
    assert [row(better, worse)["difference"], row(worse, better)["difference"]] == ["better", "worse"]


@pytest.mark.parametrize(("half", "text"), [(4.0, "10.0 ± 4.0"), (12.0, "10.0 (8.0 to 12.0)"), (None, "10.0")])
def test_an_interval_that_holds_nothing_is_the_slowest_and_the_fastest(half, text):
    row = {"throughput_tok_s": 10.0, "throughput_half_width": half, "throughput_by_seed": {0: 12.0, 1: 8.0}}
    assert _speed_text(row) == text


def test_arms_of_an_interval_reach_its_ends():
    assert _error_bar({"x": 1.5, "x_low": 1.25, "x_high": 2.0}, "x") == (0.25, 0.5)
    assert _error_bar({"x": 1.5, "x_half": 2.0}, "x") == (1.5, 2.0)
    assert _error_bar({"x": 1.5}, "x") == (0, 0)


def test_one_repeat_has_no_interval_and_says_so(tmp_path):
    (_, second, _) = ablate(tmp_path, "--component", "scheduler")["rows"]
    assert (second["relative_low"], second["relative_high"], second["difference"]) == (None, None, None)
    told = repro("ablate", *WHERE, "--component", "scheduler", "--result-dir", tmp_path)
    assert "--num-runs" in told.out


def test_a_measured_ablation_says_what_it_will_run_and_counts_processor_seconds(tmp_path):
    short = ("--knob", "num_prompts=2", "--knob", "gen_length=4", "--knob", "block_length=4", "--knob", "steps=4")
    command = ("ablate", "--component", "scheduler", "--dataset", "osc", "--num-runs", 2, *short)
    done = repro(*command, "--result-dir", tmp_path / "r", "--json", "--plot", tmp_path / "a.png")
    assert done.code == 0, done.err
    assert "6 runs to measure, 2 repeats in turns" in done.err
    rows = json.loads(done.out)["rows"]
    for row in rows:
        assert row["num_runs"] == 2
        assert row["tokens_per_processor_s"] > 0
        assert row["relative_processor_low"] <= row["relative_processor"] <= row["relative_processor_high"]
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        drawn = list(csv.DictReader(file))
    assert [float(row["relative_processor_low"]) for row in drawn] == [row["relative_processor_low"] for row in rows]
    assert [float(row["throughput_tok_s_half"]) for row in drawn] == [row["throughput_half_width"] for row in rows]
    again = repro(*command, "--result-dir", tmp_path / "r")
    assert "to measure" not in again.err
    assert "tok/CPU s" in again.out


def test_repeats_of_a_measured_ablation_where_none_are_asked_for(tmp_path):
    options = AblationOptions(component="scheduler", dataset=["osc"])
    assert all(len(cells) == MEASURED_RUNS for cells in _dllm_study(options, {}).cells.values())


@pytest.mark.parametrize("component", [*COMPONENTS["laps"], "reordering"])
def test_variants_of_clusters_are_paired_with_the_component_switched_off(component, tmp_path):
    is_ampd = component in COMPONENTS["ampd"]
    short = ("--dataset", "dureader") if is_ampd else ("--knob", "num_prompts=150")
    command = ("ablate", "--component", component, *short, "--num-runs", 2, "--result-dir", tmp_path / "runs", "--json")
    done = repro(*command, "--plot", tmp_path / "a.png")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    variants = COMPONENTS[system_of(component)][component]
    assert [row["variant"] for row in rows] == [variant.label for variant in variants]
    assert rows[0]["added_points"] == 0
    share = "slo_attainment" if is_ampd else "slo_violations"
    for row in rows:
        assert row["obtained"] == "composed"
        assert row["num_runs"] == len(row["run_folders"]) == 2
        assert row["added_points"] == pytest.approx(100 * (row[share] - rows[0][share]))
        assert row["valid"] == (row["reasons"] == [])
    assert len({row.get("deployment") for row in rows}) == 1
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_each_component_takes_policies_by_a_knob_of_its_system():
    for component, knob in OWN.items():
        variant = own_variant(component, "mine:Policy", {"n": 2})
        assert (variant.label, variant.knobs) == ("Policy, n=2", ((knob, "mine:Policy"), ("n", 2)))
        assert any(knob in kind.__dataclass_fields__ for kind in settings_of(variant.system)) or knob == "scheduler"
    with refuses("variant='mine:Policy'"):
        own_variant("graphs", "mine:Policy", {})


def test_an_own_batcher_stands_beside_the_papers_on_the_same_seeds(tmp_path: Path):
    asked = ("ablate --component awd --num-runs 2 --knob num_prompts=40 --json", "--result-dir", tmp_path)
    own = ("--variant", "support.own:Gather@window_s=0.05", "--variant", "support.own:Gather")
    rows = json.loads(repro(*asked, *own).out)["rows"]
    assert [row["variant"] for row in rows[-2:]] == ["Gather, window_s=0.05", "Gather"]
    assert rows[0]["variant"] == "no waiting"
    assert all(len(row["run_folders"]) == 2 for row in rows)
    assert rows[-2]["ttft_mean_s"] > rows[-1]["ttft_mean_s"]
    assert not rows[-1]["ours"]
