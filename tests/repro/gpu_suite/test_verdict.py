"""The verdict says what was found beside its target, and what has not run."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.tables import data_beside

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from support.told_suite import Validity, checked, first_jobs, host_rows, peak_rows, served, step_rows, told_suite

from repro.gpu_suite import calibration
from repro.gpu_suite.verdict import VERDICT, write_verdict

SPEEDS = data_beside(__file__, "verdict")["speeds"]
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


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "some": everything,
    "all": lambda: everything() | served("small-card", SPEEDS) | served("shapes", SPEEDS, model="dream-7b"),
    "cut off": lambda: checked("step", "steps", script="step", rows=step_rows(sizes=(1, 16)), validity=CUT_OFF),
}
"""What has run."""
CUT_OFF = Validity(valid=False, reasons=("it did not end",))


def stored(name: str) -> Path:
    return Path(__file__).with_name("verdicts") / f"{name}.md"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_stored(name, tmp_path):
    """On purpose it changes by ``python tests/repro/gpu_suite/test_verdict.py``."""
    assert page(tmp_path, PAGES[name]()) == stored(name).read_text(encoding="utf-8")


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


if __name__ == "__main__":
    calibration.predicted_tok_s = lambda cell, fitted: 500.0
    for each, told in PAGES.items():
        with TemporaryDirectory() as place:
            stored(each).parent.mkdir(exist_ok=True)
            stored(each).write_text(page(Path(place), told()), encoding="utf-8")
