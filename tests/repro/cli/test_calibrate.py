"""``repro calibrate`` as a user meets it."""

from support.command import repro
from support.told_suite import checked, step_rows, told_suite

from repro import paths
from repro.families.cost import describe_calibration, load_calibration
from repro.gpu_suite.calibration import Fitted, calibrated


def test_what_a_suite_fitted_on_its_card_is_stored(monkeypatch, tmp_path):
    rows = checked("step", "steps", script="step", rows=step_rows())
    fitted = calibrated(told_suite(tmp_path / "suite", rows))
    assert isinstance(fitted, Fitted)
    stored = tmp_path / "stored"
    monkeypatch.setattr(paths, "CALIBRATION", stored)
    monkeypatch.setattr("repro.families.cost.CALIBRATION", stored)
    asked = ("calibrate", "--platform", "h200", "--result-dir", str(tmp_path / "suite"))
    try:
        dry = repro(*asked, "--dry-run")
        assert (dry.code, stored.exists()) == (0, False)
        written = repro(*asked, "--write")
        assert written.code == 0
        assert load_calibration("h200") == fitted.calibration
        assert describe_calibration(load_calibration("h200")).startswith("h200, fitted on refresh step of 1 requests")
        assert (stored / "h200-report.json").is_file()
    finally:
        load_calibration.cache_clear()
    assert dry.out == written.out
    assert "median absolute error of predictions: " in dry.out
