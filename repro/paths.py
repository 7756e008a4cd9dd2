"""Folders of data and results. A checkout has both below its root; an installed package brings its own data, and writes results to the
working directory."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
_PACKAGED = Path(__file__).resolve().parent / "data"
"""The part of the folders below that a wheel contains (setup.py)."""
IS_INSTALLED = _PACKAGED.is_dir()

_DATA = _PACKAGED if IS_INSTALLED else REPO
DATASETS = _DATA / "datasets"
COMMITTED = _DATA / "results"
PAPER = COMMITTED / "paper"
CALIBRATION = COMMITTED / "calibration"
ACCURACY = COMMITTED / "cpu-tiny" / "accuracy-cpu-tiny.csv"
"""Accuracy of every compared configuration. Figures at equal accuracy choose configurations by it."""

RESULTS = Path("results") if IS_INSTALLED else REPO / "results"
LOCAL = RESULTS / "local"
LOCAL_FIGURES = RESULTS / "figures"


def figures_beside(result_dir: Path | None) -> Path:
    """Folder for the figures of the runs in ``result_dir``; None is the default result folder."""
    return LOCAL_FIGURES if result_dir is None else result_dir / "figures"
