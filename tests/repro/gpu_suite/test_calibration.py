"""A card's constants are those its steps were made with; what they give of everything else is a prediction."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import refused, repro
from support.tables import data_beside
from support.told_suite import KNOWN, LENGTH, checked, peak_rows, served, step_rows, timed, told_suite

from engines.cost.roofline import H200, Calibration, Gpu
from engines.errors import UserError
from repro.families.cost import save_calibration
from repro.files import SEAL, sealed
from repro.gpu_suite.calibration import CALIBRATION, Fitted, calibrated, fit, fitted_rows, read_fit
from repro.reports import fitting

CASES = data_beside(__file__, "cases")

SIZES = (1, 16, 64, 256)


@given(share=st.floats(0.05, 0.95), overhead_s=st.floats(0.0, 0.05), bandwidth=st.floats(0.5, 1.0))
def test_a_known_share_and_overhead_are_fitted_back(share, overhead_s, bandwidth):
    known = replace(
        KNOWN,
        matmul_efficiency=share,
        attention_efficiency=share,
        step_overhead_s=overhead_s,
        bandwidth_efficiency=bandwidth,
    )
    rows = tuple(timed(kind, size, known) for size in (1, 256) for kind in ("refresh", "reuse"))
    copied = Gpu.of_peaks("h200", H200.peak_flops, bandwidth * H200.bandwidth)
    found = fit(rows, H200, copy_card=copied)
    assert found.matmul_efficiency == found.attention_efficiency == pytest.approx(share, rel=1e-4)
    assert found.step_overhead_s == pytest.approx(overhead_s, rel=1e-3, abs=1e-5)
    assert found.bandwidth_efficiency == pytest.approx(bandwidth)
    assert "that of a timed copy" in found.note


def test_constants_lie_between_rows_that_disagree():
    apart = (timed("refresh", 256, KNOWN, slower=slower) for slower in (0.9, 1.1))
    rows = (*apart, timed("reuse", 1, KNOWN))
    found = fit(rows, H200)
    assert found.matmul_efficiency == pytest.approx(KNOWN.matmul_efficiency, rel=0.03)
    assert "bandwidth share 0.8 is assumed" in found.note
    assert [name.partition(":")[0] for name in found.fitted_on] == [row.name for row in rows]


def test_the_two_ends_are_fitted_and_the_rest_is_predicted():
    rows = [timed(kind, size, KNOWN) for size in SIZES for kind in ("refresh", "reuse", "mixed")]
    longer = [timed("refresh", 512, KNOWN, length=2 * LENGTH)]
    chosen = fitted_rows([*rows, *longer])
    assert [(row.kind, row.batch_size) for row in chosen] == [
        ("refresh", 1),
        ("reuse", 1),
        ("refresh", 256),
        ("reuse", 256),
    ]


def test_steps_that_cannot_tell_are_refused():
    with pytest.raises(UserError, match="1 timed steps cannot fix two constants"):
        fit((timed("reuse", 1, KNOWN),), H200)
    with pytest.raises(UserError, match="none of the timed steps is bound by arithmetic"):
        fit(tuple(timed("reuse", size, KNOWN) for size in (1, 2)), H200)
    with pytest.raises(UserError, match="steps are faster than the peaks of h200 allow"):
        fit(tuple(timed("refresh", size, KNOWN, slower=0.3) for size in (16, 256)), H200)


def test_a_suite_is_calibrated_by_its_own_runs(tmp_path):
    assert calibrated(told_suite(tmp_path, {})) == "not run yet"
    assert not (tmp_path / CALIBRATION).exists()

    told = {
        **checked("step", "steps", script="step", rows=step_rows()),
        **served("small-card", {"dllm-serve": 900.0, "fast-dllm": 300.0}),
    }
    found = calibrated(told_suite(tmp_path, told))
    assert isinstance(found, Fitted)
    assert found.calibration.matmul_efficiency == pytest.approx(KNOWN.matmul_efficiency, rel=1e-4)
    assert found.calibration.step_overhead_s == pytest.approx(KNOWN.step_overhead_s, rel=1e-3)
    roles = [(each.role, each.unit) for each in found.comparisons]
    assert roles.count(("fitted", "ms")) == 4
    assert roles.count(("prediction", "ms")) == 4
    assert roles.count(("prediction", "tok/s")) == 2
    assert all(abs(each.error_percent) < 0.1 for each in found.comparisons if each.unit == "ms")
    speed = next(each for each in found.comparisons if each.name.startswith("dllm-serve on osc, small-card"))
    assert speed.measured == 900.0
    assert 100 < speed.predicted < 10_000
    assert found.medians["steps"]["count"] == 4

    # What a timed copy reached takes the place of what is assumed.
    told |= checked("step", "peaks", script="peaks", rows=peak_rows(0.9))
    again = calibrated(told_suite(tmp_path, told))
    assert isinstance(again, Fitted)
    assert again.calibration.bandwidth_efficiency == pytest.approx(0.9)


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    calibrated(told_suite(tmp_path, checked("step", "steps", script="step", rows=step_rows())))
    return tmp_path


def test_what_was_fitted_on_the_card_becomes_its_calibration(fitted, monkeypatch):
    value = read_fit(fitted, "h200")
    assert value["calibration"]["matmul_efficiency"] == pytest.approx(KNOWN.matmul_efficiency, rel=1e-4)
    monkeypatch.setattr("repro.paths.CALIBRATION", fitted / "stored")
    fitting.write_report(value)
    note = fitting.predictions_note("h200")
    assert note.startswith("Predictions of h200 against numbers measured on NVIDIA H200 at commit abcdef0, median")
    assert "% over 4 steps" in note


@pytest.mark.parametrize(("changes", "says"), CASES["fits"])
def test_a_fit_without_its_origin_is_refused(fitted, changes, says):
    path = fitted / CALIBRATION
    value = {name: part for name, part in json.loads(path.read_text()).items() if name != SEAL}
    path.write_text(json.dumps(sealed(value | changes)))
    with pytest.raises(UserError, match=says):
        read_fit(fitted, "h200")


def test_what_is_no_fit_is_refused(fitted):
    path = fitted / CALIBRATION
    fit = json.loads(path.read_text())
    for text in (json.dumps([fit]), json.dumps({**fit, "medians": {}}), "[" * 100_000):
        path.write_text(text)
        refused(repro("calibrate", "--platform", "h200", "--dry-run", "--result-dir", fitted), "calibration.json")


def test_no_fit_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match="run 'make gpu-first' on such a card"):
        read_fit(tmp_path, "h200")


def test_a_fit_is_a_calibration_that_can_be_stored(tmp_path):
    found = fit(tuple(timed(kind, size, KNOWN) for size in (1, 256) for kind in ("refresh", "reuse")), H200)
    save_calibration(found, tmp_path / "h200.json")
    assert Calibration.load(tmp_path / "h200.json") == found
    assert found.fitted_on
