"""Checks as runs: what they find is stored like any run, and a fault makes it INVALID."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.refusals import refuses

from engines.errors import UserError
from repro.families.dllm import on_torch
from repro.gpu_suite import checks
from repro.gpu_suite.checks import CHECK, Benchmark, Goldens, GpuTests, check_cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep


def told(**knobs: Any) -> Experiment:
    cell = a_cell("support.fake_checks:TOLD", dataset="none", **knobs)
    return prepare(cell)


def run_of(experiment: Experiment, root: Path) -> StoredRun:
    Sweep([experiment], Store(root)).run()
    return Store(root).load(experiment)


def test_what_a_check_found_is_stored(tmp_path):
    run = run_of(told(finds="all is well"), tmp_path)
    assert run.validity.valid
    assert run.summary == {"note": "all is well"}
    assert run.facts["note"] == "all is well"
    assert (run.manifest["family"], run.obtained, len(run.record.requests["request_id"])) == ("check", "measured", 0)
    assert run.manifest["facts"]["device"] == "cpu"


def test_a_fault_makes_it_invalid(tmp_path):
    run = run_of(told(finds="a token", fails=True), tmp_path)
    assert run.validity.reasons == ("a token is wrong",)
    assert run.summary["note"] == "a token"


def test_knobs_are_fields_and_part_of_the_key(tmp_path):
    assert told(finds="a").cell.key != told(finds="b").cell.key
    with pytest.raises(UserError, match=r"check 'told': .*unexpected keyword argument 'colour'"):
        told(colour="red")
    with pytest.raises(UserError, match=r"check 'goldens': .*'cases'"):
        prepare(check_cell("GOLDENS", "cpu-tiny", cases=3))


def test_a_check_says_what_device_it_needs():
    import torch

    experiment = prepare(check_cell("GOLDENS", "h200"))
    assert experiment.deployment.device == "cuda"
    if not torch.cuda.is_available():
        with refuses("device='cuda'"):
            experiment.deployment.check_machine()


def test_the_device_is_free_before_a_check_looks(monkeypatch, tmp_path):
    """A model that the last cell has left, and the limit it was held to."""
    limits: list[tuple[str, int | None]] = []
    monkeypatch.setattr(on_torch, "limit_memory", lambda device, limit: limits.append((device.type, limit)))
    on_torch.load("tiny", "float32", "cpu", "checkpoint", "a digest")
    assert on_torch.load.cache_info().currsize > 0
    run_of(told(), tmp_path)
    assert on_torch.load.cache_info().currsize == 0
    assert limits == [("cpu", None)]


GPU_TEST = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    assert {}\n"


def looked(check: checks.Check) -> dict[str, Any]:
    return dict(check.look())


@pytest.mark.parametrize(
    ("text", "failed", "note"),
    [
        (GPU_TEST.format("True"), False, "1 passed"),
        (GPU_TEST.format("False"), True, "1 failed"),
        ("def test_it():\n    assert False\n", False, "no test is marked gpu"),
    ],
    ids=["passes", "fails", "none"],
)
def test_tests_of_a_card(tmp_path, text, failed, note):
    path = tmp_path / "test_card.py"
    path.write_text(text)
    found = looked(GpuTests(device="cpu", paths=str(path)))
    assert note in found["note"]
    assert (found.get("failed") is not None) == failed
    assert not failed or note in found["failed"]
    assert not list(tmp_path.glob("**/.pytest_cache"))


def test_a_benchmark_leaves_its_rows():
    found = looked(Benchmark(device="cpu", script="peaks"))
    (row,) = found["rows"]["rows"]
    assert row["flops_per_s"] > 0
    assert found["rows"]["device"] == "cpu"
    assert "TFLOP/s" in found["note"]
    assert found["failed"] is None


def test_a_benchmark_that_fails_says_why(tmp_path, monkeypatch):
    """One that imports no torch: what is looked at is how it ends."""
    script = tmp_path / "repro" / "bench" / "strict.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "for name in ('--device', '--json'):\n"
        "    parser.add_argument(name)\n"
        "parser.parse_args()\n"
    )
    monkeypatch.setattr(checks, "REPO", tmp_path)
    found = looked(Benchmark(device="cpu", script="strict", options="--colour red"))
    assert found["returncode"] == 2
    assert "unrecognized arguments: --colour red" in found["failed"]
    assert found["rows"] is None


def test_a_process_of_its_own_ends_with_its_time(tmp_path):
    path = tmp_path / "test_card.py"
    path.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_it():\n    time.sleep(600)\n")
    with pytest.raises(UserError, match="did not end within 1 s: give it more time"):
        looked(GpuTests(device="cpu", paths=str(path), limit_s=1.0))


def test_a_benchmark_that_is_cut_off_keeps_its_rows(tmp_path, monkeypatch):
    script = tmp_path / "repro" / "bench" / "endless.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import json, sys, time\n"
        "path = sys.argv[sys.argv.index('--json') + 1]\n"
        "with open(path, 'w') as file: file.write(json.dumps({'rows': [{'ms': 1.0}]}))\n"
        "open('has-rows', 'w').close()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(checks, "REPO", tmp_path)
    communicate = subprocess.Popen.communicate

    def once_it_has_rows(process: subprocess.Popen[str], *given: Any, **named: Any) -> Any:
        """A busy machine starts it late: its time begins with its rows."""
        while not (tmp_path / "has-rows").exists():
            assert process.poll() is None
            time.sleep(0.01)
        return communicate(process, *given, **named)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_has_rows)
    found = looked(Benchmark(device="cpu", script="endless", limit_s=1.0))
    assert found["rows"] == {"rows": [{"ms": 1.0}]}
    assert "did not end within 1 s" in found["failed"]


def test_goldens_that_differ_are_named(monkeypatch):
    from repro.checks import goldens
    from repro.checks.goldens import METHODS

    found = looked(Goldens(device="cpu", per_method=1))
    assert found["passed"] == found["cases"] == sum(entry["cases"] for entry in found["methods"].values())
    assert set(found["methods"]) <= set(METHODS)
    assert "failed" not in found
    assert found["note"] == f"{found['cases']} of {found['cases']} cases"

    replay, wrong = goldens.replay, list[str]()

    def replayed(case: goldens.GoldenCase, *, device: str) -> goldens.CaseResult:
        result = replay(case, device=device)
        if wrong:
            return result
        wrong.append(case.id)
        return replace(result, token_ids=(-1, *result.token_ids[1:]))

    monkeypatch.setattr(goldens, "replay", replayed)
    spoilt = looked(Goldens(device="cpu", per_method=1))
    assert spoilt["passed"] == spoilt["cases"] - 1
    (difference,) = spoilt["differences"].values()
    assert spoilt["differences"].keys() == {wrong[0]}
    assert difference.startswith("token 0 is -1, recorded ")
    assert spoilt["failed"] == (f"1 of {spoilt['cases']} golden cases differ, the first: {wrong[0]}: {difference}")


def test_checks_have_no_metrics_of_requests():
    assert [metric.name for metric in CHECK.metrics] == ["note"]
