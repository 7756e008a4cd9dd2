"""Folders of a checkout; everything generated lands below ``results`` and nowhere else."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DATASETS = REPO / "datasets"
RESULTS = REPO / "results"
PAPER = RESULTS / "paper"
CALIBRATION = RESULTS / "calibration"
LOCAL = RESULTS / "local"
LOCAL_FIGURES = RESULTS / "figures"
