"""``repro calibrate --sensitivity`` and ``repro bench --batch-rule`` as a user meets them."""

import csv
import json
import re

from support.command import repro
from support.told_suite import checked, step_rows, told_suite

from repro import paths
from repro.families.cost import describe_calibration, load_calibration
from repro.gpu_suite.calibration import Fitted, calibrated
from repro.reports import sensitivity


def test_sensitivity_prints_and_stores_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(sensitivity, "NUM_REQUESTS", 3)
    monkeypatch.setattr(sensitivity, "LENGTH_SCALES", (0.5, 1.0, 2.0))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    done = repro("calibrate --platform rtx4090 --sensitivity")
    assert done.code == 0
    rules = [line for line in done.out.splitlines() if re.fullmatch("-+(  -+)*", line)]
    assert rules
    assert max(map(len, rules)) <= 80
    (path,) = tmp_path.iterdir()
    assert path.name == "rtx4090-sensitivity.csv"
    first = path.read_bytes()

    printed = json.loads(repro("calibrate --platform rtx4090 --sensitivity --json").out)["rows"]
    stored = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["item"] for row in printed] == [row["item"] for row in stored]
    assert path.read_bytes() == first


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
