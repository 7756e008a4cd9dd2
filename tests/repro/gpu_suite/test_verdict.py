"""The verdict says what was found beside its target, and what has not run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.told_suite import Validity, checked, first_jobs, host_rows, peak_rows, served, step_rows, told_suite

from repro.gpu_suite import calibration
from repro.gpu_suite.verdict import VERDICT, write_verdict

SPEEDS = {
    "dllm-serve": 900.0,
    "dllm-serve, one refresh": 960.0,
    "fast-dllm, on our engine": 1000.0,
    "fast-dllm": 300.0,
    "sparse-dllm": 250.0,
    "dllm-cache": 100.0,
}
RATIOS = (
    "llada-8b, whole card, 128 tokens each",
    "llada-8b, 24 GB, 128 tokens each",
    "dream-7b, whole card, 64 tokens each",
)


@pytest.fixture(autouse=True)
def _simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration's own tests ask what it predicts of systems."""
    monkeypatch.setattr(calibration, "predicted_tok_s", lambda cell, fitted: 500.0)


def page(root: Path, told: dict[str, Any]) -> str:
    text = write_verdict(told_suite(root, told))
    assert (root / VERDICT).read_text() == text
    return text


def answers(text: str) -> dict[str, list[str]]:
    """Line of the first table -> found, simulated, target, answer."""
    table = text.partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


def ratio_of(text: str, what: str, system: str = "dllm-serve") -> list[str]:
    return answers(text)[f"{what}: {system} over the best static baseline"]


def everything(**more: Any) -> dict[str, Any]:
    return {
        **checked("tests", "57 passed"),
        **checked("goldens", "120 of 120 cases"),
        **checked("step", "peaks", script="peaks", rows=peak_rows(0.8)),
        **checked("step", "steps", script="step", rows=step_rows()),
        **checked("step", "host", script="host", rows=host_rows(0.7, 10)),
        **served("throughput", SPEEDS, **more),
    }


def test_nothing_has_run(tmp_path):
    text = page(tmp_path, {})
    found = answers(text)
    assert len(found) == 5 + 4 * len(RATIOS)
    assert {row[-1] for row in found.values()} == {"not run yet"}
    assert "17 not run yet." in text
    # What the simulator expects stands there before anything is measured.
    assert ratio_of(text, RATIOS[0])[1] == "1.25 x fast-dllm"
    assert ratio_of(text, RATIOS[0], "dllm-serve, one refresh")[1] == "1.50 x fast-dllm"
    assert found[f"{RATIOS[0]}: dllm-serve over fast-dllm, on our engine"][1] == "0.83 x fast-dllm, on our engine"
    assert text.count("Not run yet.") == 3


def test_what_is_there_is_judged_and_the_rest_has_not_run(tmp_path):
    text = page(tmp_path, everything())
    found = answers(text)
    assert found["tests marked gpu"] == ["57 passed", "-", "all pass", "met"]
    assert found["golden cases in float32"] == ["120 of 120 cases", "-", "all, token by token", "met"]
    assert ratio_of(text, RATIOS[0]) == [
        "3.00 x fast-dllm (900.0 against 300.0 tok/s; the baseline without CUDA graphs)",
        "1.25 x fast-dllm",
        "at least 2.5 x",
        "met",
    ]
    assert ratio_of(text, RATIOS[0], "dllm-serve, one refresh")[0].startswith("3.20 x fast-dllm (960.0 against 300.0")
    # Not a static baseline, and there is no ratio that is wanted.
    assert found[f"{RATIOS[0]}: dllm-serve, one refresh over fast-dllm, on our engine"] == [
        "0.96 x fast-dllm, on our engine (960.0 against 1000.0 tok/s; both with CUDA graphs)",
        "1.00 x fast-dllm, on our engine",
        "-",
        "-",
    ]
    for what in RATIOS[1:]:
        assert ratio_of(text, what)[-1] == "not run yet"
    # 50 % of the datasheet's, whose peaks are reached by four fifths.
    assert found["dLLM-Serve's share of the roofline at saturation"] == [
        "50 % at datasheet peaks; 62 to 62 % at measured peaks",
        "-",
        "at least 60 %",
        "met",
    ]
    assert found["host time of a Reuse step of 64 requests"][-1] == "met"
    assert found["kernels that a layer launches"] == ["10 (reuse)", "-", "at most 12", "met"]
    assert "repro calibrate --platform h200 --write" in text
    assert "% of the matrix peak" in text
    for system in ("fast-dllm", "sparse-dllm", "dllm-cache"):
        assert f"| throughput | llada-8b | {system} | 256 |" in text
    assert text.count("| 100 % | 50 % | 25 % |") == 6
    assert text.count("x, the baseline without CUDA graphs |") == 3
    assert "7 met, 8 not run yet." in text


def test_everything_has_run(tmp_path):
    told = everything() | served("small-card", SPEEDS) | served("shapes", SPEEDS, model="dream-7b")
    text = page(tmp_path, told)
    assert "11 met." in text
    assert ratio_of(text, RATIOS[2])[-1] == ratio_of(text, RATIOS[1])[-1] == "met"


def test_a_missing_baseline_leaves_the_ratio_open(tmp_path):
    told = everything() | served("throughput", {"dllm-cache": 1e6}, validity=Validity(valid=False))
    found, *_, answer = ratio_of(page(tmp_path, told), RATIOS[0])
    assert found.endswith("without dllm-cache")
    assert answer == "not run yet"


MISSED: dict[str, Callable[[], dict[str, Any]]] = {
    f"{RATIOS[0]}: dllm-serve over the best": lambda: served("throughput", SPEEDS | {"sparse-dllm": 500.0}),
    "dLLM-Serve's share of the roofline": lambda: checked("step", "peaks", script="peaks", rows=peak_rows(1.0)),
    "host time of a Reuse step": lambda: checked("step", "host", script="host", rows=host_rows(2.1, 10)),
    "kernels that a layer launches": lambda: checked("step", "host", script="host", rows=host_rows(0.7, 13)),
}


@pytest.mark.parametrize("what", MISSED)
def test_a_target_that_is_missed_is_said(tmp_path, what):
    found = answers(page(tmp_path, everything() | MISSED[what]()))
    (row,) = (row for name, row in found.items() if name.startswith(what))
    assert row[-1] == "NOT met"


def test_tests_that_were_skipped_show_nothing(tmp_path):
    found = answers(page(tmp_path, checked("tests", "57 skipped")))
    assert found["tests marked gpu"] == ["57 skipped", "-", "all pass", "not run yet"]


def test_rows_of_a_benchmark_that_was_cut_off_are_shown(tmp_path):
    cut = Validity(valid=False, reasons=("it did not end",))
    told = checked("step", "steps", script="step", rows=step_rows(sizes=(1, 16)), validity=cut)
    text = page(tmp_path, told)
    assert "It was cut off, these are the rows by then: it did not end" in text
    assert "| refresh | 16 | 512 |" in text


def test_a_check_that_failed_is_no_target_met(tmp_path):
    suite = told_suite(tmp_path, everything())
    job = next(job for job in first_jobs() if job.stage == "goldens")
    suite.entries[job.name].status, suite.entries[job.name].note = "failed", "1 of 120 golden cases differ | x"
    text = write_verdict(suite)
    assert answers(text)["golden cases in float32"] == [
        "1 of 120 golden cases differ / x",
        "-",
        "all, token by token",
        "FAILED",
    ]
