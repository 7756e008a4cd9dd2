"""``repro eval``."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command import refused, repro
from support.jail import needs_jail
from support.tables import data_beside

from engines.dllm.method import DLLM_SERVE
from repro.cli.evaluate import _cache_text, _print_curves
from repro.runs.store import read_run
from repro.tasks.sandbox import client
from repro.workbench.accuracy import axis_of

CASES = data_beside(__file__, "cases")


@needs_jail
@pytest.mark.usefixtures("no_data")
def test_command(tmp_path):
    words = "eval --task mini-code --limit 3 --gen-length 40 --block-length 8 --selection dense"
    asked = (words, "--result-dir", tmp_path)
    done = repro(*asked, "--json")
    assert (done.code, done.err.split(",")[0]) == (0, "1 run done")
    result = json.loads(done.out)
    said = (result["task"], result["criterion"], result["obtained"], result["valid"])
    assert said == ("mini-code", "pass@1", "measured", True)
    assert result["accuracy"]["value"] == result["accuracy_strict"]["value"] == 1.0
    assert (result["selection"], result["retention"]) == ("dense", 1.0)
    assert Path(result["file"]).is_file()
    again = repro(*asked)
    assert (again.code, "0 runs done, 1 reused" in again.err) == (0, True)
    assert "100.0 [43.9, 100.0]" in again.out
    assert "all context rows" in again.out
    assert f"strict: {result['strict_criterion']}" in again.out


def test_every_reason_against_a_point_is_told(capsys):
    row = dict.fromkeys(("accuracy", "accuracy_strict", "added_points", "p_value", "throughput_tok_s"))
    row |= dict.fromkeys(("tokens_per_processor_s", "cache_rows"))
    row |= dict.fromkeys(("task", "criterion", "system", "obtained", "model", "platform", "dataset", "cache"), "word")
    row |= {"is_reference": True, "valid": False, "reasons": ["too short", "too late"]}
    curve = SimpleNamespace(points=[SimpleNamespace(knobs={})])
    _print_curves([curve], [row])
    said = capsys.readouterr().out
    assert "word, word: too short; too late" in said
    assert "strict" not in said


@pytest.mark.usefixtures("no_data")
def test_programs_run_without_a_jail_only_with_consent_which_the_run_records(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "jail_refusal", lambda: "bwrap is not installed: install bubblewrap")
    command = ("eval", "--task", "mini-code", *SHORT, "--selection", "dense", "--result-dir", tmp_path, "--json")
    refused = repro(*command)
    assert (refused.code, "install bubblewrap" in refused.err) == (2, True)
    done = repro(*command, "--allow-code-execution")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["accuracy"]["value"] == 1.0
    assert read_run(Path(result["file"])).cell.knob_values["allow_code_execution"] is True


def test_what_a_preset_leaves_out_stands_beside_its_accuracy():
    said = {name: _cache_text(DLLM_SERVE.sampler("llada", {"preset": name})) for name in ("exact", "balanced")}
    assert said == {
        "exact": "all context rows",
        "balanced": "all context rows, settle_after=1, full_every=4, renew_at=2",
    }
    settled = DLLM_SERVE.sampler("llada", {"settle_after": 2})
    assert _cache_text(settled) == "50 % of the context rows (head), settle_after=2"


SHORT = ("--limit", 3, "--gen-length", 40, "--block-length", 8)


@needs_jail
@pytest.mark.usefixtures("no_data")
def test_accuracy_against_retention_in_one_command(tmp_path):
    ratios = ("--retention-ratio", 0.3, "--retention-ratio", 0.9)
    command = ("eval", "--task", "mini-code", *ratios, *SHORT, "--result-dir", tmp_path / "r")
    done = repro(*command, "--json", "--plot", tmp_path / "curve.pdf")
    assert done.code == 0, done.err
    assert "3 runs to measure" in done.err
    found = json.loads(done.out)
    assert found["axis"] == "retention_ratio"
    assert [(row["retention_ratio"], row["is_reference"]) for row in found["points"]] == [
        *((0.3, False), (0.9, False)),
        (1.0, True),
    ]
    runs = [read_run(Path(row["files"][0])) for row in found["points"]]
    dense = runs[-1].record.requests["correct"]
    assert all(dense)
    for row, run in zip(found["points"], runs, strict=True):
        summary, spent = run.summary, run.facts["processor_s"]
        tokens = summary["throughput_tok_s"] * summary["window_s"]
        assert row["tokens_per_processor_s"] == pytest.approx(tokens / spent)
        assert row["accuracy"] == run.summary["accuracy"]
        assert row["throughput_tok_s"] == run.summary["throughput_tok_s"]
    least, most, whole = found["points"]
    assert least["cache_rows"] < most["cache_rows"] < whole["cache_rows"]
    lengths = runs[-1].record.requests["prompt_len"]
    assert whole["cache_rows"] <= max(lengths) + 40, "a request holds no more rows than its tokens"
    lost = sum(not each for each in runs[0].record.requests["correct"])
    assert (least["only_this"], least["only_reference"], least["added_points"]) == (0, lost, -100 * lost / 3)
    assert least["added_low"] <= least["added_points"] <= least["added_high"]
    assert least["p_value"] == min(1.0, 2 / 2**lost)
    assert (whole["added_points"], whole["p_value"]) == (None, None)
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "curve.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == [row["accuracy"]["value"] for row in found["points"]]
    assert [float(row["accuracy_low"]) for row in rows] == [row["accuracy"]["low"] for row in found["points"]]
    again = repro(*command)
    assert (again.code, "0 runs done, 3 reused" in again.err) == (0, True)
    assert "McNemar" in again.out


@needs_jail
@pytest.mark.usefixtures("no_data")
def test_a_ratio_of_one_that_is_asked_for_is_the_reference(tmp_path):
    ratios = ("--retention-ratio", 1.0, "--retention-ratio", 0.5)
    done = repro("eval", "--task", "mini-code", *ratios, *SHORT, "--result-dir", tmp_path, "--json")
    points = json.loads(done.out)["points"]
    assert [(row["retention_ratio"], row["is_reference"]) for row in points] == [(0.5, False), (1.0, True)]


@needs_jail
@pytest.mark.usefixtures("no_data")
def test_other_options_and_seeds_take_several_values(tmp_path):
    several = ("--task", "mini-code", "--task", "mini-gsm", "--seed", 0, "--seed", 1, "--limit", 1)
    done = repro("eval", *several, *SHORT[2:], "--selection", "dense", "--result-dir", tmp_path, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["axis"] is None
    assert [(row["task"], row["accuracy"]["n"], row["num_runs"]) for row in found["points"]] == [
        *(("mini-code", 2, 2), ("mini-gsm", 2, 2))
    ]
    lengths = ("--gen-length", 40, "--gen-length", 48, "--limit", 2, "--block-length", 8)
    done = repro("eval", "--task", "mini-code", *lengths, "--result-dir", tmp_path, "--plot", tmp_path / "l.png")
    assert (done.code, "2 runs to measure" in done.err) == (0, True), done.err
    with (tmp_path / "l.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["gen_length"], row["is_reference"]) for row in rows] == [("40", "True"), ("48", "False")]
    selections = ("--selection", "dense", "--selection", "head", "--limit", 2, "--gen-length", 40, "--block-length", 8)
    done = repro("eval", "--task", "mini-code", *selections, "--result-dir", tmp_path, "--plot", tmp_path / "s.png")
    assert done.code == 0, done.err
    with (tmp_path / "s.csv").open(encoding="utf-8", newline="") as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert [label.partition(", ")[2] for label in labels] == ["selection=dense", "selection=head"]


@pytest.mark.usefixtures("no_data")
def test_what_a_small_model_is_warned_of(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "How many are two and three?", "answer": "2+3=5\n#### 5"}) + "\n")
    command = ("eval", "--task", "gsm8k", "--dataset-path", file, "--result-dir", tmp_path / "r")
    done = repro(*command, "--num-fewshot", 0, "--gen-length", 8, "--block-length", 8)
    assert done.code == 0, done.err
    warning = " ".join(done.err.partition("to measure")[0].split())
    assert (warning.startswith("warning"), "--model" in warning) == (True, True)
    # Eight examples are too long for it.
    refused(repro(*command), "--num-fewshot", "--knob max_model_len")


@pytest.mark.parametrize(("varied", "expected"), CASES["axes"])
def test_what_points_lie_over(varied, expected):
    assert axis_of(varied) == expected
