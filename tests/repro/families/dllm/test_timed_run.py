"""A card fitted to the steps of a measured run, and what it then charges."""

import json
from pathlib import Path

import pytest
from support.command import repro as command

import repro
from engines.cost.roofline import CardCalibration
from repro.families.cost import save_calibration
from repro.families.dllm.record import BLOCKS, STEPS
from repro.families.dllm.replay import steps_of_run
from repro.files import forget

CARD = """\
name: this-cpu
bf16_tflops: 4
memory_bandwidth_gb_s: 2000
memory_gb: 0.064
dllm: {model: tiny, max_num_batched_tokens: 400, max_num_logits: 256, max_num_seqs: 64, max_model_len: 400}
"""
ASKED = {"gen_length": 32, "block_length": 16, "steps": 32, "num_prompts": 5, "max_num_batched_tokens": 400}
DOUBTING = {"refresh_rule": "support.engine_runs:OnDoubt", "below": 0.99}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    forget()
    (tmp_path / "cpu.yaml").write_text(CARD)
    return tmp_path


def test_a_measured_run_is_fitted_and_followed(own):
    measured = repro.run("dllm-serve", "osc", result_dir="runs", **ASKED, **DOUBTING)
    done = command(f"calibrate --platform cpu.yaml --measured {measured.file} --json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    # Which of them the steps of a busy machine tell is the clock's.
    assert set(found["untold"]) <= {"arithmetic", "memory"}
    assert found["leave_one_out"]["median_percent"] is not None
    (own / "cpu.yaml").write_text(CARD + "calibration: cpu.calibration.json\n")
    followed = {"num_prompts": 5, "replay": str(measured.file)}
    simulated = repro.run("dllm-serve", "osc", platform="cpu.yaml", result_dir="runs", **followed)
    assert simulated.obtained == "simulated"
    assert simulated.table(STEPS)["query_tokens"] == measured.table(STEPS)["query_tokens"]


def test_what_some_steps_take_besides_is_charged_to_them_alone(own):
    """By the phases of the run's blocks, and by which requests ran in a step and the step before."""
    measured = repro.run("dllm-serve", "osc", result_dir="runs", **ASKED, **DOUBTING)
    charged = {}
    for name, seconds in {"none": {}, "both": {"layout_s": 10.0, "build_s": 1000.0}}.items():
        flat = dict.fromkeys(("matmul_efficiency", "attention_efficiency", "bandwidth_efficiency"), 1.0)
        constants = CardCalibration(
            gpu="this-cpu", step_overhead_s=0.0, **flat, **seconds, fitted_on=(), note="planted"
        )
        save_calibration(constants, own / f"{name}.json")
        (own / f"{name}.yaml").write_text(CARD + f"calibration: {name}.json\n")
        followed = {"num_prompts": 5, "replay": str(measured.file)}
        charged[name] = repro.run("dllm-serve", "osc", platform=f"{name}.yaml", result_dir="runs", **followed)
    besides = [
        round(more - less)
        for less, more in zip(*(charged[name].table(STEPS)["duration_s"] for name in ("none", "both")), strict=True)
    ]
    table = measured.table(STEPS)
    assert {*besides} <= {0, 10, 1000, 1010}
    assert besides[0] == 1010
    assert sum(each >= 1000 for each in besides) == sum(n > 0 for n in table["num_refresh"])  # all refreshes build here
    assert all("f" not in phases for phases in measured.table(BLOCKS)["phases"])
    for place, each in enumerate(besides[1:], start=1):
        if table["query_tokens"][place] != table["query_tokens"][place - 1]:
            assert each % 1000 == 10, place
    assert 0 in besides
    works = [step.work for step in steps_of_run(measured.file, 100)]
    assert {(work.new_layout, work.builds) for work in works} == {(each % 1000 // 10, each // 1000) for each in besides}
