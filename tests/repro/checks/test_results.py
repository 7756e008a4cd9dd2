"""Which committed figures would come out the same today."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engines.dllm.memory import budget
from repro import paths
from repro.checks.results import Checked, check_results, is_alike
from repro.cli.main import app
from repro.reports import stamp as stamp_module
from repro.runs import code
from repro.runs.seal import sealed
from repro.systems import calibration

SMALL = ("--platform", "rtx4090", "--cost", "roofline", "--request-rate", "0.5", "--num-prompts", "4")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated figure in the folder of its platform, with rates, sizes and a number of repeats of its own."""
    root = tmp_path_factory.mktemp("results")
    out = root / "rtx4090"
    result = CliRunner().invoke(
        app, ["reproduce", "fig3", *SMALL, "--num-runs", "2", "--result-dir", str(root / "runs"), "--out-dir", str(out)]
    )
    assert result.exit_code == 0, result.output
    return root


@pytest.fixture
def results(drawn: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    (tmp_path / "rtx4090").mkdir()
    for path in (drawn / "rtx4090").iterdir():
        (tmp_path / "rtx4090" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def only(root: Path) -> Checked:
    (found,) = check_results(root)
    return found


def edit_stamp(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """By one who knows the seal."""
    path = root / "rtx4090" / "fig3-rtx4090-roofline.json"
    stamp = json.loads(path.read_text())
    del stamp["seal"]
    change(stamp)
    path.write_text(json.dumps(sealed(stamp)))


def test_what_was_just_drawn_is_the_same(results):
    found = only(results)
    assert (found.figure, found.status, found.is_fault) == ("dllm-serve/fig3", "same", False)
    assert found.reason == "24 runs"


def test_a_file_changed_by_hand_is_stale(results):
    path = results / "rtx4090" / "fig3-rtx4090-roofline.csv"
    path.write_text(path.read_text().replace("osc", "OSC", 1))
    found = only(results)
    assert (found.status, found.is_fault, found.reason) == ("stale", True, f"{path.name} is not as it was drawn")


def test_a_stamp_changed_by_hand_is_stale(results):
    path = results / "rtx4090" / "fig3-rtx4090-roofline.json"
    path.write_text(path.read_text().replace('"valid": true', '"valid": false', 1))
    assert (only(results).status, only(results).is_fault) == ("stale", True)
    assert only(results).reason == f"{path.name} is not as it was written: draw its figure again"


def test_a_file_that_was_not_drawn_with_the_others_is_stale(results):
    (results / "rtx4090" / "fig3-rtx4090-roofline.md").write_text("| 1.81 |")
    assert (only(results).status, only(results).reason) == ("stale", "fig3-rtx4090-roofline.md was not drawn with it")


@pytest.mark.parametrize("name", ["panel", "style"])
def test_other_drawing_code_is_a_fault_of_simulated_figures_alone(results, name, monkeypatch):
    """A module that the figure's own imports is edited on disk: its throughput may be doubled there."""
    whole = code.place

    def path_of(module: str) -> Path | None:
        found = whole(module)
        if module != f"paper_figures.common.{name}" or found is None:
            return found
        edited = results / "edited.py"
        edited.write_text(found.read_text() + "\nFACTOR = 2.0\n")
        return edited

    monkeypatch.setattr(code, "place", path_of)
    code._source.cache_clear()
    code.code_of.cache_clear()
    try:
        found = only(results)
        assert (found.status, found.is_fault, found.reason) == ("other code", True, "it was drawn by other code")
        edit_stamp(results, lambda stamp: [run.update(obtained="measured") for run in stamp["runs"]])
        assert (only(results).status, only(results).is_fault) == ("other code", False)
    finally:
        code._source.cache_clear()
        code.code_of.cache_clear()


def test_another_number_of_the_paper_is_found(results, monkeypatch):
    shutil.copytree(paths.PAPER, results / "paper")
    monkeypatch.setattr(paths, "PAPER", results / "paper")
    assert only(results).status == "same"
    table = results / "paper" / "dllm_serve" / "table4.csv"
    for path in (table, results / "paper" / "dllm_serve" / "claims.yaml", results / "paper" / "figures.yaml"):
        before = path.read_text()
        path.write_text(before.replace("1.81", "1.91", 1) if "1.81" in before else before.replace("76", "77", 1))
        assert (only(results).status, only(results).is_fault) == ("other code", True), path
        assert "paper's numbers" in only(results).reason
        path.write_text(before)


def test_arithmetic_is_done_again(tmp_path, monkeypatch):
    out = tmp_path / "l40s"
    result = CliRunner().invoke(
        app, ["reproduce", "fig2", "--platform", "l40s", "--result-dir", str(tmp_path / "local"), "--out-dir", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert (only(tmp_path).status, only(tmp_path).reason) == ("same", "no runs, drawn again")
    monkeypatch.setattr(budget, "GUARD_FRACTION", 0.25)
    found = only(tmp_path)
    assert (found.status, found.is_fault) == ("stale", True)
    assert found.reason.startswith("fig2-l40s.txt has ") or found.reason.startswith("fig2-l40s.csv has ")
    assert ", where it is drawn now with " in found.reason


@pytest.mark.parametrize(
    ("there", "now", "is_same"),
    [
        ("laps,0.12345678901234567,x", "laps,0.12345678901234568,x", True),
        ("laps,0.1234567,x", "laps,0.1234568,x", False),
        ("34 requests", "3 requests", False),
        ("1.5,2.5", "1.5", False),
        ("x 1.0", "y 1.0", False),
        ("-1.0", "1.0", False),
    ],
)
def test_last_places_alone_may_differ(there, now, is_same):
    assert is_alike(there, now) is is_same


def test_another_calibration_is_stale(results, monkeypatch):
    monkeypatch.setattr(calibration, "CALIBRATION", results)
    calibration.load_calibration.cache_clear()
    try:
        found = only(results)
    finally:
        calibration.load_calibration.cache_clear()
    assert (found.status, found.is_fault) == ("stale", True)
    assert "other data, calibration or settings" in found.reason


def test_notes_that_quote_another_report_are_stale(results):
    def quote(stamp: dict[str, Any]) -> None:
        (place,) = (i for i, note in enumerate(stamp["notes"]) if note.startswith("Predictions of rtx4090"))
        stamp["notes"][place] = stamp["notes"][place].replace("%", "per cent", 1)

    edit_stamp(results, quote)
    assert (only(results).status, only(results).is_fault) == ("stale", True)
    assert only(results).reason == "its notes quote another report than rtx4090-report.json"


def test_other_code_is_a_fault_of_simulated_figures_alone(results):
    edit_stamp(results, lambda stamp: stamp["runs"][0].update(code="0" * 12))
    found = only(results)
    assert (found.status, found.is_fault, found.reason) == ("other code", True, "1 of 24 runs were made by other code")
    edit_stamp(results, lambda stamp: [run.update(obtained="measured") for run in stamp["runs"]])
    assert not only(results).is_fault


def test_a_figure_without_a_stamp_is_a_fault(results):
    (results / "rtx4090" / "fig3-rtx4090-roofline.json").unlink()
    assert (only(results).status, only(results).is_fault) == ("no stamp", True)


def test_the_command_says_which_and_ends_with_1(results):
    asked = ["check-results", "--results", str(results), "--json"]
    fine = CliRunner().invoke(app, asked)
    assert fine.exit_code == 0
    edit_stamp(results, lambda stamp: stamp["files"].update({"gone.png": "0"}))
    spoilt = CliRunner().invoke(app, asked)
    assert spoilt.exit_code == 1
    assert [(each["status"], each["fault"]) for each in json.loads(spoilt.stdout)["figures"]] == [("stale", True)]


def test_many_runs_are_named_by_one_digest(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(stamp_module, "MOST_ALONE", 1)
    where = ["--result-dir", str(drawn / "runs"), "--out-dir", str(tmp_path / "rtx4090")]
    result = CliRunner().invoke(app, ["figure", "fig3", *SMALL, "--num-runs", "2", *where])
    assert result.exit_code == 0, result.output
    stamp = json.loads((tmp_path / "rtx4090" / "fig3-rtx4090-roofline.json").read_text())
    assert stamp["folders"].startswith("24x")
    assert sum(group["count"] for group in stamp["runs"]) == 24
    assert (only(tmp_path).status, only(tmp_path).reason) == ("same", "24 runs")
    edit_stamp(tmp_path, lambda stamp: stamp["runs"][0].update(code="other"))
    assert (only(tmp_path).status, only(tmp_path).is_fault) == ("other code", True)
    edit_stamp(tmp_path, lambda stamp: stamp.update(folders="24x000000000000"))
    assert (only(tmp_path).status, only(tmp_path).is_fault) == ("stale", True)
