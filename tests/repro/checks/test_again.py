"""Runs behind committed figures that are made again, and code that is held to give the same numbers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.cost.roofline import Roofline, StepCost, StepWork
from engines.errors import UserError
from paper_figures.dllm_serve import fig3
from repro.checks.results import check_results
from repro.cli.main import app
from repro.reports import stamp as stamp_module
from repro.runs import code
from repro.runs.seal import sealed

SMALL = (
    "--platform",
    "rtx4090",
    "--cost",
    "roofline",
    "--request-rate",
    "0.5",
    "--num-prompts",
    "4",
    "--num-runs",
    "1",
)
CHANGED = "engines.dllm.sequence"


@pytest.fixture(params=["each", "many"])
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A figure whose stamp names its runs, and one that names them together."""
    if request.param == "many":
        monkeypatch.setattr(stamp_module, "MOST_ALONE", 0)
    runs, out = str(tmp_path / "local"), str(tmp_path / "rtx4090")
    result = CliRunner().invoke(app, ["reproduce", "fig3", *SMALL, "--result-dir", runs, "--out-dir", out])
    assert result.exit_code == 0, result.output
    return tmp_path


@pytest.fixture
def other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of every run that is edited on disk, and not in this process."""
    with edited_on_disk(CHANGED, tmp_path, monkeypatch) as edited:
        yield edited


@pytest.fixture
def other_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """So is one that draws."""
    with edited_on_disk("paper_figures.common.style", tmp_path, monkeypatch) as edited:
        yield edited


@contextmanager
def edited_on_disk(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    edited = folder / "edited.py"
    whole = code.place
    found = whole(name)
    assert found is not None
    edited.write_text(found.read_text() + "\nEXTRA = 1\n")
    monkeypatch.setattr(code, "place", lambda module: edited if module == name else whole(module))
    _forget_code()
    yield edited
    _forget_code()


def _forget_code() -> None:
    code._source.cache_clear()
    code.code_of.cache_clear()


def check(root: Path, *options: str) -> tuple[int, dict[str, str]]:
    result = CliRunner().invoke(app, ["check-results", "--results", str(root), *options, "--json"])
    (found,) = json.loads(result.stdout)["figures"]
    return result.exit_code, found


def test_runs_made_again_give_the_numbers_that_were_drawn(results):
    assert check(results, "--again", "2") == (0, check(results)[1])
    assert not (results / "held.json").exists()


def test_a_number_that_is_not_what_the_run_gives_is_found(results):
    path = results / "rtx4090" / "fig3-rtx4090-roofline.json"
    stamp = json.loads(path.read_text())
    del stamp["seal"]
    if "each" in stamp:
        stamp["each"] = " ".join(f"{entry.split(':')[0]}:00000000" for entry in stamp["each"].split())
    else:
        stamp["runs"] = [{**run, "numbers": "00000000"} for run in stamp["runs"]]
    path.write_text(json.dumps(sealed(stamp)))
    code_, found = check(results, "--again", "1")
    assert (code_, found["status"]) == (1, "stale")
    assert found["reason"].startswith("made again, ")
    assert found["reason"].endswith("has other numbers, and 3 more")
    assert check(results)[1]["status"] == "same"


def test_other_code_that_gives_the_same_numbers_is_held_until_it_changes_again(results, other_code):
    before = check(results)[1]
    assert (before["status"], before["fault"]) == ("other code", True)
    assert check(results, "--again", "2")[1]["status"] == "same"
    assert check(results)[1] == before  # what was seen is kept only where that is asked for
    assert check(results, "--again", "2", "--accept")[0] == 0
    kept = check(results)[1]
    assert kept["status"] == "same"
    assert kept["reason"] == "12 runs; 12 by other code, of whose runs 8 made again are the same"
    other_code.write_text(other_code.read_text() + "EXTRA = 2\n")
    _forget_code()
    assert check(results)[1] == before


def test_other_code_that_gives_other_numbers_is_not_held(results, other_code, monkeypatch):
    assert check(results, "--again", "2", "--accept")[0] == 0
    charged = Roofline.step_time

    def slower(self: Roofline, work: StepWork, **options: int) -> StepCost:
        cost = charged(self, work, **options)
        return replace(cost, total_s=cost.total_s * 1.001)

    monkeypatch.setattr(Roofline, "step_time", slower)
    code_, found = check(results, "--again", "2", "--accept")
    assert (code_, found["status"]) == (1, "stale")
    assert "has other numbers" in found["reason"]
    assert check(results)[1]["status"] == "other code"


def test_what_other_code_drew_is_drawn_again_from_the_stored_runs(results, other_drawing):
    before = check(results)[1]
    assert (before["status"], before["reason"]) == ("other code", "it was drawn by other code")
    # Where no runs are stored there is nothing to draw it from.
    assert check(results, "--again", "1", "--result-dir", str(results / "none"))[1] == before
    stored = ("--again", "1", "--result-dir", str(results / "local"))
    assert check(results, *stored)[1]["status"] == "same"
    assert check(results)[1] == before
    assert check(results, *stored, "--accept")[0] == 0
    assert check(results)[1]["status"] == "same"
    other_drawing.write_text(other_drawing.read_text() + "EXTRA = 2\n")
    _forget_code()
    assert check(results)[1] == before


def test_what_is_drawn_otherwise_is_not_held(results, other_drawing, monkeypatch):
    drawn = fig3.ratio_notes
    monkeypatch.setattr(fig3, "ratio_notes", lambda *given: [*drawn(*given), "Another sentence."])
    status, found = check(results, "--again", "1", "--result-dir", str(results / "local"), "--accept")
    assert (status, found["status"]) == (1, "stale")
    assert "it is drawn now with" in found["reason"] or "that it is drawn with now" in found["reason"]
    monkeypatch.setattr(fig3, "ratio_notes", drawn)
    assert check(results)[1]["status"] == "other code"


def test_what_is_held_cannot_be_edited(results, other_code):
    check(results, "--again", "1", "--accept")
    path = results / "held.json"
    path.write_text(path.read_text().replace('"runs": 1', '"runs": 9', 1))
    with pytest.raises(UserError, match=r"held\.json cannot be read \(it is not as it was written\)"):
        check_results(results)
    assert check(results, "--again", "1", "--accept")[1]["status"] == "same"
    assert check(results)[1]["status"] == "same"
