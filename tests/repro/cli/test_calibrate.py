"""``repro calibrate --sensitivity`` and ``repro bench --batch-rule`` as a user meets them."""

import csv
import json
import re
import sys

import pytest
from support.told_suite import checked, step_rows, told_suite

from repro import paths
from repro.cli.main import main
from repro.gpu_suite.calibration import Fitted, calibrated
from repro.reports import sensitivity
from repro.systems.cost import describe_calibration, load_calibration


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["repro", *arguments])
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def test_sensitivity_prints_and_stores_the_same(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sensitivity, "NUM_REQUESTS", 3)
    monkeypatch.setattr(sensitivity, "LENGTH_SCALES", (0.5, 1.0, 2.0))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    assert call(monkeypatch, "calibrate", "--platform", "rtx4090", "--sensitivity") == 0
    out = capsys.readouterr().out
    rules = [line for line in out.splitlines() if re.fullmatch("-+(  -+)*", line)]
    assert rules
    assert max(map(len, rules)) <= 80
    (path,) = tmp_path.iterdir()
    assert path.name == "rtx4090-sensitivity.csv"
    first = path.read_bytes()

    assert call(monkeypatch, "calibrate", "--platform", "rtx4090", "--sensitivity", "--json") == 0
    printed = json.loads(capsys.readouterr().out)["rows"]
    stored = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["item"] for row in printed] == [row["item"] for row in stored]
    assert path.read_bytes() == first


def test_what_a_suite_fitted_on_its_card_is_stored(monkeypatch, capsys, tmp_path):
    rows = checked("step", "steps", script="step", rows=step_rows())
    fitted = calibrated(told_suite(tmp_path / "suite", rows))
    assert isinstance(fitted, Fitted)
    stored = tmp_path / "stored"
    monkeypatch.setattr(paths, "CALIBRATION", stored)
    monkeypatch.setattr("repro.systems.cost.CALIBRATION", stored)
    asked = ("calibrate", "--platform", "h200", "--result-dir", str(tmp_path / "suite"))
    try:
        assert call(monkeypatch, *asked, "--dry-run") == 0
        assert not stored.exists()
        assert call(monkeypatch, *asked, "--write") == 0
        assert load_calibration("h200") == fitted.calibration
        assert describe_calibration(load_calibration("h200")).startswith("h200, fitted on refresh step of 1 requests")
        assert (stored / "h200-report.json").is_file()
    finally:
        load_calibration.cache_clear()
    dry, written = capsys.readouterr().out.split("h200: matmul")[1:]
    assert dry == written
    assert "median absolute error of predictions: " in dry
