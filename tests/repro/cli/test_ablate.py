import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro.cli.main import app

WHERE = ["--platform", "rtx4090", "--dataset", "livebench"]


def ablate(tmp_path: Path, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["ablate", *WHERE, "--result-dir", str(tmp_path), "--json", *arguments])
    assert result.exit_code == 0, result.exception
    report: dict[str, object] = json.loads(result.stdout)
    return report


def test_a_component_switched_all_else_equal(tmp_path):
    report = ablate(tmp_path, "--component", "scheduler")
    rows = report["rows"]
    assert isinstance(rows, list)
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
    assert isinstance(rows, list)
    assert [row["variant"] for row in rows][:3] == ["Sparse-dLLM", "+ static batching", "+ inference engine"]
    assert len(rows) == 7
    assert all(len(row["run_folders"]) == 2 and row["throughput_half_width"] > 0 for row in rows)
